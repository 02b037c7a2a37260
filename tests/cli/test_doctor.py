"""`tandem doctor`: the facts as a document for programs, and versions that were not tested."""

import json
import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tandem import __version__
from tandem.cli.doctor import TESTED, versioned
from tests.support.home import invoke

ROOT = Path(__file__).parents[2]


def test_json_has_every_check_under_stable_keys():
    result = invoke("doctor", "--json")
    document = json.loads(result.stdout)
    assert document["tandem"] == __version__
    assert document["ok"] == (result.exit_code == 0)
    checks = document["checks"]
    there = [
        *("python", "torch", "transformers", "gpu", "exactness", "bfloat16"),
        *("reward_workers", "sandbox", "disk"),
    ]
    assert [name for name in checks if not name.startswith("gpu_")] == there
    for check in checks.values():
        assert isinstance(check["ok"], bool) and isinstance(check["detail"], str)
    assert document["ok"] == all(check["ok"] for check in checks.values())
    assert checks["torch"].keys() > {"version", "tested", "threads", "cores", "processor"}
    assert checks["gpu"].keys() > {"count", "driver", "triton"}
    assert checks["exactness"]["exact"] is True and checks["disk"]["free_bytes"] > 0


def test_each_pin_is_within_the_bounds_of_its_requirement_and_the_page_has_both():
    pins = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    pins = {canonicalize_name(name): pin for name, pin in pins.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [text for extra in project["optional-dependencies"].values() for text in extra]
    needed = {r.name: r for r in map(Requirement, [*extras, *project["dependencies"]])}
    bounds = {name: needed[name].specifier for name in needed if canonicalize_name(name) in pins}
    assert len(bounds) > 25 and bounds.keys() >= {"torch", "transformers", "tokenizers"}
    outside = {n: str(b) for n, b in bounds.items() if pins[canonicalize_name(n)] not in b}
    assert outside == {}
    page = (ROOT / "docs/reference/versions.md").read_text()
    assert re.search(
        rf"every commit .* torch {pins['torch']}, transformers {pins['transformers']}", page
    )
    assert re.findall(r"`(torch|transformers)>=(\S+)`", page) == [
        (name, str(bounds[name]).removeprefix(">=")) for name in ("torch", "transformers")
    ]


def test_tested_versions_are_those_that_are_pinned_and_those_of_the_page():
    pins = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    page = (ROOT / "docs/reference/versions.md").read_text()
    for name in ("torch", "transformers"):
        assert versioned(name, pins[name]).facts["tested"], name
        assert all(f"{name} {version}." in page for version in TESTED[name]), name
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    named = [line.rpartition(" ")[2] for line in classifiers if "Python :: 3." in line]
    assert tuple(named) == TESTED["python"]
    assert all(f"| {version}." in page for version in TESTED["python"])
