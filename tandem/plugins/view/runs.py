"""The runs below a folder, and the numbers of each by column.

    runs/demo/train/   config.toml, run.json           -> a run named "demo/train"
                       metrics.jsonl, timings.jsonl    -> columns
                       lock, status.json               -> running, finished, stopped, killed
                       log.txt                         -> why it failed, and its warnings

Reads alone and takes no lock, so a run never waits for it. A line that is no row (half-written, or
damaged) is passed over and counted. It does not know episodes: that is episodes.py.
"""

import json
import math
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from tandem.run_folder.best import BEST, read_best
from tandem.run_folder.config_changes import toml_values
from tandem.run_folder.files import read_file
from tandem.run_folder.metrics import flatten
from tandem.run_folder.read import Notes, read_notes
from tandem.runtime.errors import UserError
from tandem.runtime.processes import started_at

DEPTH = 3  # folders below the given one in which runs are looked for
MOST_RUNS = 1000
TIMES = "timings/"  # before the names of timings.jsonl, as in TensorBoard
FAILURES = ("reward_errors", "env_errors", "env_timeouts")
FRESH_S = 600.0  # that a run of another machine counts as running after it wrote something
CLOCKS_S = 60.0  # that a clock may have been set since a run began
_NEWS = ("metrics.jsonl", "status.json", "lock", "log.txt", "episodes", "why", BEST)
_LIVELY = ("metrics.jsonl", "status.json", "log.txt")
Stamp = tuple[str, int, int]  # name, time in ns and size of a file
_DAMAGED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


class Columns:
    """The rows of a file of metrics: the steps, and float64 [N] for each name. A poll reads new
    bytes only."""

    def __init__(self, path: Path, prefix: str = ""):
        self.path, self.prefix = path, prefix
        self._forget(0)

    def _forget(self, inode: int) -> None:
        self._rows, self.broken = dict[int, dict[str, float]](), 0
        self.values = dict[str, np.ndarray]()
        self._inode, self._offset = inode, 0

    @property
    def steps(self) -> list[int]:
        return list(self._rows)

    def refresh(self) -> None:
        """Read what has been appended; all of the file if it was replaced, as a resume does."""
        try:
            with self.path.open("rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self._inode or stat.st_size < self._offset:
                    self._forget(stat.st_ino)
                file.seek(self._offset)
                data = file.read()
        except OSError:
            self._forget(0)
            return
        whole = data.rfind(b"\n") + 1  # the rest is being written
        if not whole:
            return
        self._offset += whole
        for line in data[:whole].splitlines():
            try:
                row = json.loads(line)
                step = int(row.pop("step"))
                if step <= next(reversed(self._rows), step - 1):
                    raise ValueError("steps rise")
                row.pop("non_finite", None)
                self._rows[step] = flatten(row, self.prefix)
            except _DAMAGED:
                self.broken += 1
        rows = self._rows.values()
        self.values = {
            name: np.array([row.get(name, math.nan) for row in rows])
            for name in dict.fromkeys(name for row in rows for name in row)
        }

    def last(self, name: str) -> float | None:
        """Return the newest value that there is."""
        return next(iter(self.series(name)["y"][::-1]), None)

    def row(self, step: int) -> dict[str, float]:
        """Return the values of a step; none if it has no row."""
        found = self._rows.get(step, {})
        return {name: value for name, value in found.items() if not math.isnan(value)}

    def series(
        self, name: str, first: float = -math.inf, last: float = math.inf, points: int = 2000
    ) -> dict[str, list[Any]]:
        """Return {"x", "y"} of the steps from first to last, thinned to about so many points."""
        if name not in self.values:
            return {"x": [], "y": []}
        x, y = np.array(self.steps), self.values[name]
        kept = ~np.isnan(y) & (x >= first) & (x <= last)
        places = thin(y[kept], points)
        return {"x": x[kept][places].tolist(), "y": y[kept][places].tolist()}


def thin(values: np.ndarray, points: int) -> np.ndarray:
    """Return the places to keep of about so many points: the lowest and the highest of each
    stretch, so that no peak is lost."""
    count = len(values)
    if count <= points:
        return np.arange(count)
    width = -(-count // max(1, points // 2))
    padded = np.pad(values, (0, -count % width), mode="edge").reshape(-1, width)
    starts = np.arange(len(padded)) * width
    ends = (starts + padded.argmin(1), starts + padded.argmax(1))
    return np.unique(np.minimum(np.concatenate([[0], *ends, [count - 1]]), count - 1))


class Run:
    """A run folder, only read. Any thread may ask it."""

    def __init__(self, folder: Path, name: str):
        self.folder, self.name = folder, name
        self.metrics = Columns(folder / "metrics.jsonl")
        self.timings = Columns(folder / "timings.jsonl", TIMES)
        self._notes = list[Stamp](), Notes()
        self._lock = threading.Lock()

    def refresh(self) -> None:
        with self._lock:
            self.metrics.refresh()
            self.timings.refresh()

    def names(self) -> list[str]:
        """List the names of all columns."""
        with self._lock:
            return sorted({*self.metrics.values, *self.timings.values})

    def series(self, name: str, **options: Any) -> dict[str, list[Any]]:
        """Return a column's series. options: as Columns.series has them."""
        with self._lock:
            columns = self.timings if name.startswith(TIMES) else self.metrics
            return columns.series(name, **options)

    def row(self, step: int) -> dict[str, float]:
        """Return all numbers of a step."""
        with self._lock:
            return {**self.metrics.row(step), **self.timings.row(step)}

    def summary(self) -> dict[str, Any]:
        """Describe the run in the columns of the list of runs."""
        self.refresh()
        about, status = read_json(self.folder / "run.json"), self.status()
        metrics, last, best = self.metrics, self.metrics.last, dict[str, Any]()
        with suppress(UserError, OverflowError):
            best = asdict(read_best(self.folder))
        done, steps = self.progress(status)
        state = self.state(done, steps)
        failures = sum(np.nansum(metrics.values.get(name, ())) for name in FAILURES)
        reward = next((n for n in ("reward", "loss", "nll") if n in metrics.values), "reward")
        config, command = self.config_values(), str(about.get("command", ""))
        return {
            "name": self.name,
            "command": command,
            "algorithm": config.get("rl.algorithm", "") if command == "train" else "",
            "model": str(config.get("model.path", "")),
            "size": self.size(),
            "machine": str(read_json(self.folder / "machine.json").get("processor", "")),
            "created": str(about.get("created", "")),
            "written": str(status.get("time", "")),
            "state": state,
            **self.messages(state),
            "step": done,
            "steps": steps,
            "what": reward,
            "reward": last(reward),
            "trend": self.series(reward, points=60)["y"],
            "held_out_first": next(iter(self.series("eval/sampled")["y"]), None),
            "held_out": last("eval/sampled"),
            "best": best,
            "interval": last("eval/sampled_interval"),
            "step_s": self.timings.last(f"{TIMES}step_s"),
            "tokens_s": self.timings.last(f"{TIMES}generated_tokens_per_s"),
            "errors": int(failures),
            "broken": metrics.broken + self.timings.broken,
            "processes": status.get("processes", []),
        }

    def size(self) -> int:
        """Count the weights of the newest checkpoint, by the header of its file; 0 without one."""
        for path in sorted(self.folder.glob("checkpoints/step_*/policy.safetensors"), reverse=True):
            with suppress(OSError, SafetensorError), safe_open(path, "np") as file:
                shapes = [file.get_slice(name).get_shape() for name in file.offset_keys()]
                return sum(map(math.prod, shapes))
        return 0

    def progress(self, status: dict[str, Any]) -> tuple[int | None, Any]:
        """Return the last step that is done, and of how many."""
        steps = status.get("steps") or self.config_values().get("run.steps")
        last = self.metrics.steps[-1] if self.metrics.steps else None
        return status.get("step") or last, steps

    def messages(self, state: str) -> dict[str, Any]:
        """Return why the run failed, if its state is that, and its warnings."""
        notes = self.notes()
        failed = notes.failed if state == "failed" else ""
        return {"failed": failed, "warnings": list(notes.warnings)}

    def notes(self) -> Notes:
        """Return what log.txt says; it is read again when it has changed."""
        stamps = file_stamps(self.folder / "log.txt")
        if stamps != self._notes[0]:
            self._notes = stamps, read_notes(self.folder)
        return self._notes[1]

    def status(self) -> dict[str, Any]:
        return read_json(self.folder / "status.json")

    def state(self, done: int | None, steps: Any) -> str:
        """Tell from the lock's text, the last step and the log: running, finished, killed, failed
        (by an error), stopped, or not begun; unknown if a lock of another machine stands beside
        files that have not changed for long."""
        holder = ""
        with suppress(OSError, UnicodeDecodeError):
            holder = (self.folder / "lock").read_text().strip()
        lives = _lives(holder) if holder else False
        stamps = [at for _, at, _ in file_stamps(*(self.folder / name for name in _LIVELY))]
        fresh = any(time.time_ns() - stamp < FRESH_S * 10**9 for stamp in stamps)
        if lives or (lives is None and fresh):
            return "running"
        if not holder and self.notes().failed:
            return "failed"
        if done is not None and done == steps:
            return "finished"
        if lives is None:
            return "unknown"
        if holder:
            return "killed"
        return "stopped" if done else "not begun"

    def config_values(self) -> dict[str, Any]:
        """Read the resolved config as {"rl.group_size": 8, ...}; empty if it cannot be read."""
        with suppress(UserError):
            return read_file(self.folder / "config.toml", toml_values)
        return {}

    def stamp(self) -> list[Stamp]:
        """Return what changes when the run has written something."""
        return file_stamps(*(self.folder / name for name in _NEWS))


def file_stamps(*paths: Path) -> list[Stamp]:
    """List the stamps of those files that are there."""
    found = list[Stamp]()
    for path in paths:
        with suppress(OSError):
            stat = path.stat()
            found.append((path.name, stat.st_mtime_ns, stat.st_size))
    return found


def _lives(holder: str) -> bool | None:
    """Tell whether the process that a lock names, "pid 4711 on HOST since TIME", is alive; None for
    one of another machine. A younger process than the lock only has its number."""
    words = holder.split()
    with suppress(IndexError, ValueError):
        if words[3] == socket.gethostname() and sys.platform == "linux":
            since, started = datetime.fromisoformat(words[5]), started_at(int(words[1]))
            return started is not None and started < since.timestamp() + CLOCKS_S
    return None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; an empty one if it cannot be read."""
    with suppress(OSError, ValueError, RecursionError):
        value = json.loads(path.read_bytes())
        return value if isinstance(value, dict) else {}
    return {}


class Runs:
    """All runs below a folder, or the one that it is. Runs may appear and go."""

    def __init__(self, root: Path):
        self.root = root
        self._runs: dict[str, Run] = {}
        self._lock = threading.Lock()

    def list(self) -> list[Run]:
        """Find the runs; one that was known before keeps what was read of it."""
        folders = dict(_find(self.root.resolve()))
        with self._lock:
            known = self._runs
            self._runs = {
                name: known[name] if name in known else Run(folder, name)
                for name, folder in folders.items()
            }
            return list(self._runs.values())

    def get(self, name: str) -> Run:
        """Return a run by its name, with its newest rows. Raises KeyError."""
        with self._lock:
            run = self._runs.get(name)
        run = run or {one.name: one for one in self.list()}[name]
        run.refresh()
        return run


def _find(root: Path) -> list[tuple[str, Path]]:
    """List (name, folder) of the runs; a folder inside a run is not looked at."""
    found = list[tuple[str, Path]]()
    for name, below, files in os.walk(root, followlinks=True):
        place = Path(name).relative_to(root)
        is_run = {"config.toml", "run.json"} <= {*files}
        if is_run:
            found.append((str(place) if place.parts else root.name, root / place))
        ends = is_run or len(place.parts) == DEPTH
        below[:] = [] if ends else sorted(one for one in below if one[0] != ".")
    return found[:MOST_RUNS]
