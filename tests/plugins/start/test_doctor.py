"""`tandem doctor`: a line for each check, and versions that were not tested."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tandem.plugins.start.doctor import TESTED, versioned
from tests.support.home import invoke

ROOT = Path(__file__).parents[3]


def test_every_check_has_a_line_and_all_of_them_decide():
    result = invoke("doctor")
    states = {line[6:21].strip(): line[:4].strip() for line in result.stdout.splitlines()}
    there = [
        *("python", "torch", "transformers", "gpu", "exactness", "bfloat16"),
        *("reward workers", "sandbox", "disk"),
    ]
    assert [name for name in states if not name.startswith("gpu ")] == there
    assert set(states.values()) <= {"ok", "FAIL"} and states["exactness"] == "ok"
    assert (result.exit_code == 0) == ("FAIL" not in states.values())


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
        assert "not tested" not in versioned(name, pins[name]).detail, name
        assert all(f"{name} {version}." in page for version in TESTED[name]), name
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    named = [line.rpartition(" ")[2] for line in classifiers if "Python :: 3." in line]
    assert tuple(named) == TESTED["python"]
    assert all(f"| {version}." in page for version in TESTED["python"])
