"""Tandem from Python: the commands as functions, and a run as an object.

    import tandem

    def score(problem, completion):
        return float(completion.split()[-1:] == [problem.answer])

    run = tandem.train(model="runs/tiny", data=rows, reward=score, steps=20, group_size=8)
    run.metrics, run.episodes(), run.model_dir
    run.resume(steps=40)

A command runs in a process of its own, as on the command line: the same bits, nothing of the
caller's process is changed, and its memory is free afterwards. What is given as objects becomes
files (given.py), so the command line can go on with the run, too. Knows no stage of a run.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tandem.api.given import kept, overrides_of, values_of
from tandem.config.recipe import load_config, merged, to_toml
from tandem.run_folder.episode_files import read_groups
from tandem.run_folder.files import require_run
from tandem.run_folder.metrics import read_metrics
from tandem.run_folder.read import open_past
from tandem.run_folder.status import read_status
from tandem.runtime.errors import UserError
from tandem.runtime.processes import STARTER
from tandem.types import Episode

Recipe = str | Path | dict[str, Any] | None
# called with each row of metrics that this call has made; False: save, and stop the run
Callback = Callable[[dict[str, Any]], Any]
Callbacks = Callback | Sequence[Callback]

POLL_S = 0.1
OF_TERMINALS = ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE")  # Jupyter sets the first one


def train(
    recipe: Recipe = None, /, *, callbacks: Callbacks = (), fresh: bool = False, **keys: Any
) -> "Run":
    """Train by reinforcement learning, as `tandem train`; a run of the same folder is resumed.

    recipe: a TOML file, or a dict of its sections. keys: over the recipe, sections and keys of the
    configuration by their names, and `model`, `data`, `eval_data`, `reward`, `env` and `tools`,
    which take paths, rows, functions and classes (values_of in given.py). fresh: start over; the
    old folder is kept beside it. Without `folder` the run is in runs/<recipe>-train, or runs/train.

    Raises UserError for a mistake in them, RuntimeError for a bug, and KeyboardInterrupt once an
    interrupted run is saved.

    Example:
        run = tandem.train(model="runs/tiny", data=[{"prompt": "1 + 1 =", "answer": "2"}], steps=2)
    """
    return _run("train", recipe, callbacks=callbacks, fresh=fresh, **keys)


def sft(recipe: Recipe = None, /, **arguments: Any) -> "Run":
    """Fine-tune on chats, as `tandem sft`; data: rows with messages. Arguments as of `train`."""
    return _run("sft", recipe, **arguments)


def dpo(recipe: Recipe = None, /, **arguments: Any) -> "Run":
    """Optimize preferences, as `tandem dpo`; data: rows with prompt, chosen and rejected. Arguments
    as of `train`."""
    return _run("dpo", recipe, **arguments)


def rm(recipe: Recipe = None, /, **arguments: Any) -> "Run":
    """Train a reward model, as `tandem rm`; data as of `dpo`, arguments as of `train`."""
    return _run("rm", recipe, **arguments)


def distill(recipe: Recipe = None, /, **arguments: Any) -> "Run":
    """Distill on-policy, as `tandem distill`; teacher: a path. Arguments as of `train`."""
    return _run("distill", recipe, **arguments)


def evaluate(recipe: Recipe = None, /, **keys: Any) -> dict[str, float]:
    """Evaluate a model on problems, as `tandem eval`; data: the problems. Returns the metrics by
    name. Arguments as of `train`."""
    path, _ = _recipe("eval", recipe, keys)
    return dict(json.loads(_result(["eval", str(path)])))


def generate(task: str, count: int = 1000, **options: Any) -> list[dict[str, Any]]:
    """Generate the problems of a built-in task, as `tandem generate`; options: difficulty, seed,
    split and weights. Returns the rows."""
    given = [f"--{name}={value}" for name, value in {"count": count, **options}.items()]
    return [json.loads(line) for line in _result(["generate", task, *given]).splitlines()]


def _result(arguments: list[str]) -> str:
    """Run a command and return the text of the file that it writes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.jsonl"
        _Process([*arguments, "--out", str(out)]).close()
        return out.read_text(encoding="utf-8")


@dataclass(frozen=True)
class Run:
    """A run folder. Example: Run("runs/demo/train").metrics"""

    folder: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder).absolute())
        require_run(self.folder)

    @property
    def metrics(self) -> Any:
        """The rows of metrics.jsonl by step: a pandas.DataFrame where pandas is installed, else a
        list of dicts."""
        rows = read_metrics(self.folder)
        try:
            from pandas import DataFrame
        except ImportError:
            return rows
        return DataFrame(rows).set_index("step") if rows else DataFrame()

    def episodes(self, step: int | None = None) -> list[Episode]:
        """Return the episodes of a step, counted from 1; by default of the newest. Raises UserError
        if the step is not there."""
        past = open_past(self.folder)
        steps = past.journaled()
        step = max(steps, default=0) if step is None else step
        if step not in steps:
            raise UserError("no episodes of that step", found=f"{step}", expected=f"one of {steps}")
        return [one for group in read_groups(past.journal(step)) for one in group.episodes]

    @property
    def model_dir(self) -> Path:
        """The model of the newest checkpoint, a Hugging Face directory, which is written now if the
        run stopped early. Raises UserError if the run has no checkpoint yet."""
        newest = max((path.name for path in self.folder.glob("*/step_*")), default="")
        if not newest:
            raise UserError(
                "the run has no checkpoint yet", where=str(self.folder), next="resume it"
            )
        if not (model := self.folder / "hf" / newest).exists():
            _Process(["export", str(self.folder), f"--step={int(newest[5:])}"]).close()
        return model

    def resume(self, **arguments: Any) -> "Run":
        """Go on with the run, with keys that may change, e.g. steps=200; arguments as of `train`,
        callbacks anew."""
        past = open_past(self.folder)
        given = {"folder": self.folder, "directory": past.directory, **arguments}
        return _run(past.command, self.folder / "config.toml", **given)

    def view(self, port: int = 0) -> "Viewer":
        """Serve the run's pages as `tandem view` does, until the returned viewer is closed or this
        process ends; a notebook shows them."""
        return Viewer(self.folder, port)


class Viewer:
    """Pages of a run. url: their address on this machine."""

    def __init__(self, folder: Path, port: int):
        self._process = _Process(["view", str(folder), f"--port={port}"])
        self.url = next((line.split()[-1] for line in self._process.lines() if "http:" in line), "")
        if not self.url:
            self._process.close()

    def __repr__(self) -> str:
        return f"Viewer({self.url})"

    def _repr_html_(self) -> str:
        return f'<iframe src="{self.url}" width="100%" height="640"></iframe>'

    def close(self) -> None:
        """Stop serving."""
        self._process.stop()


# ---- the command in its process


def _run(
    command: str,
    recipe: Recipe,
    *,
    callbacks: Callbacks = (),
    fresh: bool = False,
    directory: str = "",
    **keys: Any,
) -> Run:
    """Run a command to its end. directory: that relative paths begin in, "" for the current one."""
    callbacks = [*callbacks] if isinstance(callbacks, Iterable) else [callbacks]
    if not all(map(callable, callbacks)):
        raise UserError("callbacks are functions of a row", found=f"callbacks={callbacks!r:.60}")
    path, folder = _recipe(command, recipe, keys)
    saved = sorted((folder / "checkpoints").glob("step_*")) if not fresh else []
    last = int(saved[-1].name.rpartition("_")[2]) if saved else 0  # rows after it are made again
    # there the line of a step stands in the place of the one before
    in_place = sys.stdout.isatty() or "ipykernel" in sys.modules
    held, is_open, is_taken = "", False, False
    process = _Process([command, str(path), *["--fresh"] * fresh], directory)
    try:
        for line in process.lines():
            if line.startswith("error: ") or (held and line.startswith("  ")):
                held += f"{line}\n"  # it is raised if it is the end
            elif line:
                steps = in_place and line.startswith("step ")
                start = "\r" if steps else "\n" * is_open
                print(held + start + line.ljust(80 * steps), end="" if steps else "\n", flush=True)
                held, is_open = "", steps
            # until the process has taken up the run, its rows may be those of the run before
            is_taken = bool(callbacks) and (is_taken or process.has_taken(folder))
            rows = read_metrics(folder) if is_taken else []
            for row in (row for row in rows if row["step"] > last):
                last = row["step"]
                answers = [callback(row) for callback in callbacks]
                if any(isinstance(one, bool | np.bool_) and not one for one in answers):
                    process.stop()
                    break
    finally:
        process.stop()
        deque(map(print, filter(None, process.lines())), maxlen=0)  # after Ctrl-C
    process.close()
    return Run(folder)


def _recipe(command: str, recipe: Recipe, keys: dict[str, Any]) -> tuple[Path, Path]:
    """Write the recipe of a command, once it has no mistake, and return its path and the run
    folder."""
    if not isinstance(recipe, dict | str | Path | None):
        raise UserError("a recipe is a file or a dict of sections", found=f"{recipe!r:.60}")
    file = None if isinstance(recipe, dict | None) else Path(recipe)
    given = values_of(command, recipe) if isinstance(recipe, dict) else {}
    given |= values_of(command, keys)
    tree, _ = merged(file, [])
    usual = f"runs/{file.stem}-{command}" if file else f"runs/{command}"
    named = given.get("run.folder") or tree.get("run", {}).get("folder") or usual
    folder = Path(str(named)).absolute()
    inputs = folder.parent / "inputs"
    config = load_config(file, overrides_of({**given, "run.folder": str(folder)}, inputs))
    return Path(kept(inputs, folder.name, ".toml", to_toml(config).encode())), folder


class _Process:
    """A command in a process of its own, which ends with this one."""

    def __init__(self, arguments: Sequence[str], directory: str = ""):
        self._tail: deque[str] = deque(maxlen=400)  # for an error's text
        self._is_stopped = False
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        path = os.pathsep.join(map(os.path.abspath, sys.path))  # what the caller can import
        own = {STARTER: str(os.getpid()), "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tandem", *arguments],
            cwd=directory or None,
            env={name: os.environ[name] for name in os.environ if name not in OF_TERMINALS} | own,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C comes from here, once
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def lines(self) -> Iterator[str]:
        """Yield the lines until the end, and "" now and then."""
        while True:
            line: str | None = ""
            with suppress(queue.Empty):
                line = self._lines.get(timeout=POLL_S)
            if line is None:
                self._lines.put(None)  # for whoever asks again
                return
            if line:
                self._tail.append(line)
            yield line

    def has_taken(self, folder: Path) -> bool:
        """Tell whether it goes on with the run of a folder, whose later rows are cut then."""
        with suppress(UserError):  # a start drops the file of the run before at any moment
            status = read_status(folder) or {"processes": []}
            return any(one.get("pid") == self._process.pid for one in status["processes"])
        return False

    def stop(self) -> None:
        """Interrupt the command if it runs, as Ctrl-C does, and wait for its end."""
        while self._process.poll() is None:
            self._is_stopped = True
            self._process.send_signal(signal.SIGINT)
            self._process.wait()

    def close(self) -> None:
        """Wait for the end. Raises UserError for a user's mistake, and RuntimeError for a bug."""
        deque(self.lines(), maxlen=0)
        code, text = self._process.wait(), "\n".join(self._tail)
        if code == 2:
            raise UserError(text.rpartition("error: ")[2])
        if code and not (code == 130 and self._is_stopped):
            raise RuntimeError(f"tandem has ended with exit code {code}\n{text}")
