"""Hold two revisions against each other: the same short runs must leave the same bits.

    python tools/same_bits.py 9f41608 HEAD                  two commits
    python tools/same_bits.py main . --only grpo partial    a commit, and the working tree as it is

Every run (same_bits_runs.py) goes through `python -m tandem` and each revision's own code, so modules
may move between the two. Compared are metrics, episodes, ledger, checkpoints and exported models
(same_bits_left.py). One line a run: equal, or where the two first differ. What a commit leaves stays
in .cache/same-bits, so the next comparison with it costs the other side only. Both sides run the
plain kernels, since a commit here has no compiled ones. Exit code 1 on any difference.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import version
from pathlib import Path

import same_bits_runs as the
from same_bits_left import Left, facts, first_difference, short_hash
from same_bits_runs import RENAMED_SETTINGS, RUNS

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "same-bits"


class Failed(Exception):
    """A run that did not end as it should."""


class Side:
    """A revision: its code, and the run folders that it leaves."""

    def __init__(self, revision: str, place: Path, *, kept: bool):
        self.revision, self.place, self.code = revision, place, place / "code"
        self.runs = cache_folder() / commit(revision) if kept else place / "runs"
        for folder in (place, self.runs):
            folder.mkdir(exist_ok=True)
        if revision == ".":
            self.code = ROOT
        else:
            git("archive", "-o", f"{place}/code.tar", revision)
            with tarfile.open(place / "code.tar") as archive:
                archive.extractall(self.code, filter="data")
        self.known = self.tandem("plan", "--keys") if RENAMED_SETTINGS else ""

    def make(self, name: str) -> str:
        """Run it, if that is not done yet; returns what went wrong."""
        run, folder = RUNS[name], self.place / name
        if (self.runs / name).exists():
            return ""
        settings = self.settings(the.COMMON + run.settings)
        command = [run.command, "recipe.toml", *settings, f"run.folder={folder}"]
        try:
            if run.killed:
                self.kill(command, folder)
            self.tandem(*command)
        except Failed as failed:
            return f"{self.revision}: {failed}"
        folder.rename(self.runs / name)
        return ""

    def kill(self, command: list[str], folder: Path) -> None:
        """Start it, and kill -9 once a checkpoint and the row of KILL_AT are on the disk."""
        saved, row = folder / "checkpoints/step_000002", f'"step": {the.KILL_AT},'.encode()
        with self.start(*command) as process:
            while process.poll() is None:
                if saved.exists() and row in (folder / "metrics.jsonl").read_bytes():
                    process.kill()
                time.sleep(0.002)
        if process.returncode >= 0:
            raise Failed("it ended before it was killed")

    def tandem(self, *command: str) -> str:
        with self.start(*command) as process:
            output = process.communicate()[0].decode(errors="replace")
        if process.returncode:
            raise Failed(f"exit code {process.returncode}\n{output[-1500:]}")
        return output

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        own = {"PYTHONPATH": str(self.code), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        return subprocess.Popen(
            [sys.executable, "-m", "tandem", *command],
            cwd=inputs(),
            env={"TANDEM_KERNELS": "plain", **os.environ, **own, "COLUMNS": "200"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def settings(self, text: str) -> list[str]:
        """The settings, by the names that this revision knows; the last value of each."""
        given, named = dict(pair.split("=", 1) for pair in text.split()), {}
        for key, value in given.items():
            named[key if f" {key} " in self.known else RENAMED_SETTINGS.get(key, key)] = value
        return [f"{key}={value}" for key, value in named.items() if key]


def verdict(old: Side, new: Side, name: str) -> Iterator[str]:
    """Return what is wrong with a run that both have made."""
    run, left = RUNS[name], {side: Left(side.runs / name) for side in (old, new)}
    if found := first_difference(facts(left[old]), facts(left[new])):
        yield found
    for side in (old, new):
        if not shows(run, left[side]):
            yield f"{side.revision} does not show {run.shows}"
        unkilled = facts(Left(side.runs / run.killed)) if run.killed else {}
        if unkilled and (found := first_difference(unkilled, facts(left[side]))):
            yield f"{side.revision} differs from {run.killed}: {found}"


def shows(run: the.Run, left: Left) -> bool:
    try:
        return run.seen(left)
    except (LookupError, ValueError):  # no such metric, column or file
        return False


def make_inputs(side: Side) -> None:
    """Data, a random model, and one with a warm start; made once, by whoever comes first."""
    if (inputs() / "model").exists():
        return
    for name, text in the.input_files().items():
        (inputs() / name).write_text(text)
    shutil.rmtree(inputs() / "random", ignore_errors=True)
    side.tandem("tiny", "random", *the.TINY.split())
    settings = side.settings(the.COMMON + the.WARM)
    side.tandem("sft", "recipe.toml", *settings, "run.folder=warm", "--fresh")
    next(inputs().glob("warm/hf/*")).rename(inputs() / "model")


def inputs() -> Path:
    return cache_folder() / "inputs"


@cache
def cache_folder() -> Path:
    """Named by all that the bits of a commit's runs depend on besides: settings, data, machine."""
    runs = {name: (run.command, run.settings, run.killed) for name, run in RUNS.items()}
    recipes = [runs, the.COMMON, the.KILL_AT, the.TINY, the.WARM, the.input_files()]
    libraries = ("torch", "transformers", "numpy", "pyarrow", "safetensors")
    machine = [sys.version, *map(version, libraries)]
    if (cpu := Path("/proc/cpuinfo")).exists():
        lines = set(cpu.read_text().splitlines())
        machine += sorted(line for line in lines if line.startswith(("model name", "flags")))
    folder = CACHE / short_hash(json.dumps([recipes, machine]).encode())
    (folder / "inputs").mkdir(parents=True, exist_ok=True)
    return folder


def commit(revision: str) -> str:
    return revision if revision == "." else git("rev-parse", f"{revision}^{{commit}}")


def git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("old", help="a commit, as git names it")
    parser.add_argument("new", help="another, or . for the working tree")
    parser.add_argument("--only", nargs="+", choices=RUNS, metavar="NAME", help=", ".join(RUNS))
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the run folders there")
    args = parser.parse_args()
    wanted = {name for one in args.only or RUNS for name in (one, RUNS[one].killed)}
    names = [name for name in RUNS if name in wanted]
    # A commit against itself is run anew: the runs should not differ from one time to the next.
    new_is_kept = args.new != "." and commit(args.new) != commit(args.old)
    differ = False
    with tempfile.TemporaryDirectory(dir=cache_folder()) as place, ThreadPoolExecutor(2) as pool:
        old = Side(args.old, Path(place) / "old", kept=args.old != ".")
        new = Side(args.new, Path(place) / "new", kept=new_is_kept)
        make_inputs(old)
        failed = {}
        for side in (old, new):
            start = time.perf_counter()
            failed[side] = dict(zip(names, pool.map(side.make, names), strict=True))
            print(f"{side.revision}: {time.perf_counter() - start:.0f} s", flush=True)
        for name in names:
            wrong = [text for text in (failed[old][name], failed[new][name]) if text]
            try:
                wrong = wrong or list(verdict(old, new, name))
            except (OSError, LookupError) as error:
                wrong = [f"a file or a name is not there: {error!r}"]
            print(f"{name:16}{'; '.join(wrong) or 'equal'}")
            differ = differ or bool(wrong)
        for side, name in ((old, "old"), (new, "new")):
            if args.keep:
                shutil.copytree(side.runs, args.keep / name, dirs_exist_ok=True)
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
