"""The wheel, built from a copy of the tree and unpacked apart from it: the first run that a user
has who installed it and has no clone."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import httpx
import pytest

from tests.support.viewing import viewing

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
# every stage once, as short as it can be
SHORT = [
    *("run.steps=2", "sft.steps=2", "sft.batch_size=4", "rl.prompts_per_step=2", "rl.group_size=2"),
    *("eval.every=0", "eval.samples=1", "run.show_samples=0", "rollout.max_new_tokens=4"),
]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The folder that a wheel was unpacked to, beside nothing of the tree; as on a machine without
    a compiler, since every set-up compiles the kernels."""
    place = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "tandem", place / "tree/tandem", ignore=_no_caches)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, place / "tree")
    build = [sys.executable, "-c", BUILD, str(place)]
    env = {**os.environ, "CC": "false", "CXX": "false"}
    done = subprocess.run(build, cwd=place / "tree", env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [wheel] = place.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(place / "unpacked")
    shutil.rmtree(place / "tree")
    return place / "unpacked"


def _no_caches(folder, names):
    return [name for name in names if name == "__pycache__" or name.endswith(".so")]


def in_wheel(unpacked, *arguments, cwd):
    """The output of a command of the unpacked wheel."""
    variables = {"PYTHONPATH": str(unpacked), "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={"PATH": os.environ["PATH"], "COLUMNS": "200", "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_file_of_the_package_is_in_the_wheel(unpacked):
    there, packed = (
        {str(path.relative_to(root)) for path in (root / "tandem").rglob("*") if path.is_file()}
        for root in (ROOT, unpacked)
    )
    assert {name for name in there if "__pycache__" not in name and ".so" not in name} == packed


def test_demo_of_a_wheel_runs_apart_from_a_clone_and_is_shown(unpacked, tmp_path):
    where = "import tandem; print(tandem.__file__)"
    assert in_wheel(unpacked, "-c", where, cwd=tmp_path).startswith(str(unpacked))
    printed = in_wheel(unpacked, "-m", "tandem", "demo", *SHORT, cwd=tmp_path)
    assert "view runs/demo" in printed and "in stock transformers" in printed
    status = in_wheel(unpacked, "-m", "tandem", "status", "runs/demo/train", cwd=tmp_path)
    assert "has finished" in status and "step 2 of 2" in status
    with viewing(tmp_path / "runs") as url:
        runs = httpx.get(f"{url}/api/runs", trust_env=False).json()["runs"]
    shown = {run["name"]: (run["state"], run["step"]) for run in runs}
    assert shown == {"demo/sft": ("finished", 2), "demo/train": ("finished", 2)}


def test_help_and_errors_name_no_file_of_a_clone(unpacked, tmp_path):
    text = in_wheel(unpacked, "-m", "tandem", "train", "--help", cwd=tmp_path)
    assert "my.toml" in text and "recipes/" not in text
    told = "from tandem.runtime.errors import UserError as E; print(E('docs/guide/data.md'))"
    assert "/blob/main/docs/guide/data.md" in in_wheel(unpacked, "-c", told, cwd=tmp_path)
