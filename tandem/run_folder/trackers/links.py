"""The trainer's links to its trackers, of which none can stop or slow a run.

    trainer                       thread "tracker NAME"            process (process.py)
    -------                       ---------------------            --------------------
    log, log_samples -> queue ->  send, wait for the answer, -->   the tracker's own package
    close: at most CLOSE_S        START_S or ANSWER_S at most

An error, a process that ends and an answer that is late become one warning; the process is then
killed, and the training goes on without that tracker. It does not know what a metric means.
"""

import json
import queue
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from tandem.config.schema import Config
from tandem.run_folder.metrics import Metrics, flatten
from tandem.run_folder.samples import Sample, printable
from tandem.run_folder.trackers.process import MAX_LINE_BYTES
from tandem.run_folder.trackers.tracker import SampleRow
from tandem.runtime.disk import read_regular_file, write_atomic
from tandem.runtime.errors import UserError
from tandem.runtime.image_parts import message_text
from tandem.runtime.watchdog import heartbeat
from tandem.runtime.worker_channel import Channel, Message, exit_reason, kill_group, spawn

START_S, ANSWER_S = 90.0, 30.0  # for an answer of a tracker: the first one, and all others
CLOSE_S, LEAVE_S = 30.0, 3.0  # for what is queued at the end of a run, and when it is interrupted
COMMAND = (sys.executable, "-m", "tandem.run_folder.trackers.process")
IDS = "trackers.json"
TEXT = 20_000  # characters of a prompt or a completion in a table


def require_trackers(names: Sequence[str]) -> None:
    """Raise UserError for a tracker whose package is not installed."""
    for name in names:
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # a folder ./wandb is no package
            raise UserError(
                "the package of a tracker is not installed",
                where=f"run.trackers = {list(names)}",
                found=f"no {name}",
                expected=f"the package {name}",
                next=f"pip install 'tandem-rl[{name}]', or leave it out of run.trackers",
            )


class Trackers:
    """The trackers of a run, each open until the context ends; none has an effect on the run."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        report: Callable[[str], None],
        answer_s: tuple[float, float] = (START_S, ANSWER_S),
    ):
        self._config, self._folder, self._report = config, folder, report
        self._answer_s = answer_s
        self._links: list[Link] = []
        for name in dict.fromkeys(config.run.trackers):
            self.add(name, [*COMMAND, name])

    def add(self, name: str, command: Sequence[str]) -> None:
        """Start a tracker. command: of its process."""
        config = self._config.model_dump()
        run = {"id": _run_id(self._folder), "name": run_name(self._folder), "config": config}
        link = Link(command, name, run, self._folder, self._report, self._answer_s)
        self._links.append(link)

    def log(self, step: int, metrics: Metrics, timings: Metrics) -> None:
        """Send the row of a step."""
        row = flatten(metrics) | flatten(timings, "timings/")
        self._send({"step": step, "metrics": row})

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Send episodes as a table."""
        self._send({"step": step, "samples": [_row(step, sample) for sample in samples]})

    def _send(self, message: Message) -> None:
        for link in self._links:
            link.send(message)

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        until = time.monotonic() + (CLOSE_S if error is None else LEAVE_S)
        for link in self._links:
            link.send({"close": True})
        for link in self._links:
            link.end(until)


class Link:
    """A tracker in a process of its own, and the thread that talks with it. command: of that
    process; answer_s: for the first answer, and for each other one."""

    def __init__(
        self,
        command: Sequence[str],
        name: str,
        run: Message,
        folder: Path,
        report: Callable[[str], None],
        answer_s: tuple[float, float],
    ):
        self._command, self._name, self._report, self._answer_s = command, name, report, answer_s
        self._output = folder / "trackers" / f"{name}.txt"
        self._queue: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None
        self._lost = self._closed = False  # closed: the time of `end` is up
        self.send(run)
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        """Queue a message; after a warning nobody reads it."""
        if not self._lost:
            self._queue.put(message)

    def end(self, until: float) -> None:
        """Close the tracker: wait for its last answer, or until the clock's time is reached."""
        while self._thread.is_alive() and time.monotonic() < until:
            heartbeat()
            self._thread.join(0.2)
        self._closed = True
        if self._process is not None:
            kill_group(self._process.pid)
        self._thread.join(LEAVE_S)

    def _run(self) -> None:
        try:
            self._output.parent.mkdir(exist_ok=True)
            with self._output.open("ab") as output:
                self._process, channel = spawn(
                    self._command, MAX_LINE_BYTES, stdout=output.fileno(), stderr=output
                )
            self._talk(self._process, channel)
        except Exception as error:  # whatever it is, the run goes on
            self._report(
                f"warning: tracker {self._name} is lost, the run goes on without it: {error} "
                f"(see {self._output})"
            )
        finally:
            self._lost = True
            if self._process is not None:
                kill_group(self._process.pid)
                self._process.wait()

    def _talk(self, process: subprocess.Popen[bytes], channel: Channel) -> None:
        """Send each message and wait for its answer. Raises _Lost."""
        message, (limit, later) = Message(), self._answer_s
        while "close" not in message:
            message = self._queue.get()
            try:
                answer = _ask(channel, message, limit)
            except EOFError:
                late = f"it had not taken everything after {CLOSE_S:.0f} s"
                raise _Lost(late if self._closed else _ended(process)) from None
            limit = later
            if "error" in answer or "close" in message:
                with suppress(subprocess.TimeoutExpired):  # it ends by itself, and tidies up
                    process.wait(LEAVE_S)
            if "error" in answer:
                raise _Lost(str(answer["error"])[:500])


class _Lost(Exception):
    """The end of a link before its time."""


def _ask(channel: Channel, message: Message, limit: float) -> Message:
    """Send a message and wait for the answer. Raises _Lost if it is late, and EOFError if none will
    come."""
    until = time.monotonic() + limit
    channel.socket.settimeout(limit)
    channel.send(message)
    channel.socket.setblocking(False)
    while (left := until - time.monotonic()) > 0:
        channel.wait(left)
        for answer in channel.receive():
            return answer
    raise _Lost(f"no answer within {limit:g} s")


def _ended(process: subprocess.Popen[bytes]) -> str:
    """Say how a process that has closed its channel ended."""
    try:
        return f"its process ended, {exit_reason(process.wait(LEAVE_S))}"
    except subprocess.TimeoutExpired:
        return "its process closed the connection"


def run_name(folder: Path) -> str:
    """Return the path of a run below the folder `runs`, as "demo/train"; elsewhere its own name, as
    every demo's would be "train"."""
    parts = folder.absolute().parts
    if "runs" not in parts[:-1]:
        return parts[-1]
    last = max(place for place, part in enumerate(parts[:-1]) if part == "runs")
    return "/".join(parts[last + 1 :])


def _run_id(folder: Path) -> str:
    """Return the id of the run at its trackers, made at its first start, or if its file is damaged;
    a copied folder goes on with the same one."""
    path = folder / IDS
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads(read_regular_file(path))["id"])
    made = uuid.uuid4().hex
    write_atomic(path, json.dumps({"id": made}).encode() + b"\n")
    return made


def _row(step: int, sample: Sample) -> SampleRow:
    prompt = "\n".join(f"{m['role']}: {printable(message_text(m))}" for m in sample.prompt)
    return {
        "step": step,
        "sample": sample.name,
        "prompt": prompt[:TEXT],
        "completion": printable(sample.completion)[:TEXT],
        "reward": sample.reward,
    }
