"""The trackers of a run, such as Weights & Biases (plugins/trackers): it never waits for them
before its end.

    trainer                              thread "tracker NAME"
    -------                              ---------------------
    log, log_samples -> bounded queue -> the tracker's own package
    close: at most CLOSE_S

A tracker that raises or does not keep up becomes one warning; the run goes on without that tracker.
"""

import json
import queue
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from tandem.config.schema import Config
from tandem.registry import BUILT_IN, find
from tandem.run_folder.files import read_file
from tandem.run_folder.metrics import Metrics, flatten
from tandem.run_folder.samples import Sample, printable
from tandem.runtime.disk import write_atomic
from tandem.runtime.errors import not_installed
from tandem.runtime.image_parts import message_text
from tandem.runtime.watchdog import heartbeat

CLOSE_S, LEAVE_S = 30.0, 3.0  # for what is queued at the end of a run, and when it is interrupted
QUEUED = 1000  # rows and tables that may wait
IDS = "trackers.json"
TEXT = 20_000  # characters of a prompt or a completion in a table
COLUMNS = ("step", "sample", "prompt", "completion", "reward")  # of a table of samples

SampleRow = dict[str, Any]  # by COLUMNS


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """A run as a tracker has it. Example: TrackedRun(id="5f0c...", name="demo-train", config={})"""

    id: str  # the same after a resume
    name: str
    config: dict[str, Any]  # by section


class Tracker(Protocol):
    """An open run of a tracker. May raise anything, and may hang: the training goes on."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Add the metrics of a step; a resumed run adds some again, with the same values."""

    def log_samples(self, step: int, rows: list[SampleRow]) -> None: ...

    def close(self) -> None: ...


Call = Callable[[Tracker], None]


def require_trackers(names: Sequence[str]) -> None:
    """Raise UserError for a tracker whose package is not installed."""
    for name in names:
        if name not in BUILT_IN["trackers"]:
            continue  # its package has named it
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # a folder ./wandb is no package
            where = f"run.trackers = {list(names)}"
            raise not_installed(name, name, where=where, instead="leave it out of run.trackers")


class Trackers(AbstractContextManager["Trackers"]):
    """The trackers of a run, each open until the context ends; none has an effect on the run."""

    def __init__(
        self, config: Config, folder: Path, report: Callable[[str], None], close_s: float = CLOSE_S
    ):
        self._config, self._folder, self._report = config, folder, report
        self._close_s = close_s
        self._links: list[Link] = []
        for name in dict.fromkeys(config.run.trackers):

            def opens(run: TrackedRun, name: str = name) -> Tracker:  # in the tracker's own thread
                return find("trackers", name, key="run.trackers")(run)  # type: ignore[no-any-return]

            self.add(name, opens)

    def add(self, name: str, opens: Callable[[TrackedRun], Tracker]) -> None:
        """Open a tracker in a thread of its own."""
        run = TrackedRun(
            id=_run_id(self._folder), name=run_name(self._folder), config=self._config.model_dump()
        )
        self._links.append(Link(name, partial(opens, run), self._report))

    def log(self, step: int, metrics: Metrics, timings: Metrics) -> None:
        """Send the row of a step."""
        row = flatten(metrics) | flatten(timings, "timings/")
        self._send(lambda tracker: tracker.log(step, row))

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Send episodes as a table."""
        rows: list[SampleRow] = []
        for sample in samples:
            prompt = (f"{m['role']}: {printable(message_text(m))}" for m in sample.prompt)
            row = {
                "step": step,
                "sample": sample.name,
                "prompt": "\n".join(prompt)[:TEXT],
                "completion": printable(sample.episode.text)[:TEXT],
                "reward": sample.episode.reward,
            }
            rows.append(row)
        self._send(lambda tracker: tracker.log_samples(step, rows))

    def _send(self, call: Call) -> None:
        for link in self._links:
            link.send(call)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        until = time.monotonic() + (self._close_s if error is None else LEAVE_S)
        for link in self._links:
            link.send(None)
        for link in self._links:
            link.end(until)


class Link:
    """A tracker, and the thread in which it runs."""

    def __init__(self, name: str, opens: Callable[[], Tracker], report: Callable[[str], None]):
        self._name, self._report, self._lost = name, report, False
        self._calls: queue.Queue[Call | None] = queue.Queue(QUEUED)
        self._thread = threading.Thread(
            target=self._run, args=(opens,), name=f"tracker {name}", daemon=True
        )
        self._thread.start()

    def send(self, call: Call | None) -> None:
        """Queue a call, None for the last one; after a warning nobody makes it."""
        if not self._lost:
            try:
                self._calls.put_nowait(call)
            except queue.Full:
                self._lose(f"{QUEUED:,} rows and tables wait for it")

    def end(self, until: float) -> None:
        """Wait until all is taken, or the clock's time is reached."""
        while self._thread.is_alive() and not self._lost:
            if time.monotonic() > until:
                self._lose("it had not taken everything when the run ended")
            heartbeat()
            self._thread.join(0.2)

    def _run(self, opens: Callable[[], Tracker]) -> None:
        try:
            tracker = opens()
            while call := self._calls.get():
                call(tracker)
            tracker.close()
        except Exception as error:  # whatever it is, the run goes on
            self._lose(f"{type(error).__name__}: {error}"[:500])

    def _lose(self, why: str) -> None:
        if not self._lost:
            self._lost = True
            self._report(
                f"warning: tracker {self._name} is lost, the run goes on without it: {why}"
            )


def run_name(folder: Path) -> str:
    """Return the path of a run below the folder `runs`, as "demo/train"; elsewhere its own name."""
    whole = folder.absolute()
    _, runs, below = whole.as_posix().rpartition("/runs/")
    return below if runs else whole.name


def _run_id(folder: Path) -> str:
    """Return the id of the run at its trackers, made at its first start; a copied folder goes on
    with the same one."""
    path = folder / IDS
    if not path.exists():
        write_atomic(path, json.dumps({"id": uuid.uuid4().hex}).encode() + b"\n")
    return read_file(path, lambda text: str(json.loads(text)["id"]))
