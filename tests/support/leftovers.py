"""Leftovers of the tests: files in the checkout, in shared memory or in the temporary folder.

The session has a temporary folder of its own (TMPDIR), so that nothing is mistaken for what other
programs leave.
"""

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from pathlib import Path

ROOT = Path(__file__).parents[2]
# pytest's own folders, caches of compiled code and of modules, and what past_runs.py and
# multiprocessing remove when their process ends
KNOWN = ("pytest-of-", "torchinductor_", "past-runs-", "pymp-", "modules")


def _checkout() -> set[str]:
    """Paths of the checkout that git does not know, and what lies in the folders of runs and
    builds; caches are none of them."""
    status = ["git", "status", "--porcelain", "--untracked-files=all"]
    found = subprocess.run(status, cwd=ROOT, capture_output=True, text=True)
    unknown = {line for line in found.stdout.splitlines() if line.startswith("??")}
    return unknown | _in(ROOT, "runs/*", "build/*", "dist/*")


def _in(folder: Path, *patterns: str) -> set[str]:
    return {str(path) for pattern in patterns for path in folder.glob(pattern)}


def _shared_memory() -> set[str]:
    return _in(Path("/dev/shm"), "psm_*", "torch_*")


@dataclass
class Session:
    """Begins with a temporary folder of its own, and tells in the end what is there that was
    not."""

    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="tt-")))
    checkout: set[str] = field(default_factory=_checkout)
    shared: set[str] = field(default_factory=_shared_memory)

    def __post_init__(self):
        os.environ["TMPDIR"] = str(self.folder)
        # where transformers copies the code that model directories bring along
        os.environ["HF_MODULES_CACHE"] = str(self.folder / "modules")
        tempfile.tempdir = None  # it has been asked for, and is kept

    def left(self) -> list[str]:
        """Paths that the tests have left, besides the known ones."""
        paths = {path for path in _in(self.folder, "*") if not Path(path).name.startswith(KNOWN)}
        paths |= _checkout() - self.checkout
        return sorted(paths | (_shared_memory() - self.shared))

    def remove(self):
        """Remove the folder as the process ends, after what multiprocessing removes (-100)."""
        Finalize(None, shutil.rmtree, [self.folder, True], exitpriority=-200)
