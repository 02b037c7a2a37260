"""The numbers of a run: one row a step in metrics.jsonl, times and memory in timings.jsonl, both in
TensorBoard; and hashes of the results of a step in ledger.jsonl.

metrics.jsonl is the same for two runs of one config, so a resumed run leaves the same bytes as one
that was never stopped; seconds and memory do differ, so they have their own file. It does not know
what a metric means.
"""

import hashlib
import json
import math
import numbers
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tandem.run_folder.files import RESTORE_OR_FRESH
from tandem.runtime.disk import append_line, disk_errors, write_atomic
from tandem.runtime.errors import UserError

Metrics = dict[str, Any]  # name -> float | int | None | Metrics


class MetricsWriter(AbstractContextManager["MetricsWriter"]):
    """The files of a run's numbers; a row is durable before write returns. The order at a step:
    write its row, then save its checkpoint.

    Opening them at resume_step removes the later rows, as those steps are run again. Raises
    UserError when the row of resume_step is not there, and when the disk is full.
    """

    def __init__(self, run_folder: Path, resume_step: int):
        paths = [run_folder / f"{name}.jsonl" for name in ("metrics", "timings", "ledger")]
        last_step = _truncate(paths[0], resume_step)
        if resume_step > 0 and last_step != resume_step:
            raise UserError(
                "the metrics end before the checkpoint",
                where=str(paths[0]),
                found="no row"
                if last_step is None
                else f"step {last_step} as the last row up to there",
                expected=f"the row of step {resume_step}, which the run resumes from",
                next=RESTORE_OR_FRESH,
            )
        for path in paths[1:]:
            _truncate(path, resume_step)
        self._metrics, self._timings, self._ledger = paths
        self.events = _EventFile(run_folder / "tensorboard", resume_step + 1)

    def write(
        self,
        step: int,
        metrics: Metrics,
        timings: dict[str, float],
        ledger: dict[str, str] | None = None,
    ) -> None:
        """Append the rows of a step. NaN and infinities are written as null and named under
        "non_finite". ledger: hashes by name."""
        row, timing_row = metrics_row(step, metrics), metrics_row(step, timings)
        append_line(self._timings, _line(timing_row))
        if ledger is not None:
            row_hash = hashlib.sha256(_line(row)).hexdigest()
            append_line(self._ledger, _line({"step": step, **ledger, "metrics": row_hash}))
        # last: after a kill before it, the next start removes the other rows
        append_line(self._metrics, _line(row))
        self.events.append(step, flatten(metrics) | flatten(timings, "timings/"))

    def __exit__(self, *_: object) -> None:
        self.events.close()


def read_metrics(run_folder: Path, name: str = "metrics.jsonl") -> list[Metrics]:
    """Read the rows in order of their steps; name="timings.jsonl" for the times. Reads the file of
    a run in progress as well."""
    return [row for _, row in read_rows(run_folder / name)]


def peak_rss_mb() -> float:
    """Return the most memory this process has held at once, MiB."""
    if sys.platform == "linux":  # getrusage's counts what the parent held when it forked
        lines = Path("/proc/self/status").read_text().splitlines()
        if peaks := [line.split()[1] for line in lines if line.startswith("VmHWM")]:
            return int(peaks[0]) / (1 << 10)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)  # bytes there, KiB here


def _line(row: Metrics) -> bytes:
    return json.dumps(row, allow_nan=False).encode() + b"\n"


def metrics_row(step: int, metrics: Metrics) -> Metrics:
    """Make the row of a step as it is written, and read back."""
    non_finite: dict[str, str] = {}
    row = {"step": step, **_value(metrics, "", non_finite)}
    return {**row, "non_finite": non_finite} if non_finite else row


def _value(value: Any, name: str, non_finite: dict[str, str]) -> Any:
    match value:
        case None | bool():
            return value
        case dict():
            prefix = name and f"{name}."
            return {key: _value(one, prefix + key, non_finite) for key, one in value.items()}
        case numbers.Integral():
            return int(value)
        case numbers.Real():
            if math.isfinite(value):
                return float(value)
            non_finite[name] = str(float(value))
            return None
    raise TypeError(
        f"metric {name} is a {type(value).__name__}; expected a number, None or a dict of them"
    )


def flatten(metrics: Metrics, prefix: str = "") -> dict[str, float]:
    """Flatten metrics: {"eval": {"algebra": 0.5}} -> {"eval/algebra": 0.5}; None is left out."""
    flat: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}/")
        elif value is not None:
            flat[prefix + name] = float(value)
    return flat


def _truncate(path: Path, last_step: int) -> int | None:
    """Keep the rows up to last_step, their bytes untouched; return the last step that is left."""
    rows = [(line, row["step"]) for line, row in read_rows(path) if row["step"] <= last_step]
    kept = b"".join(line for line, _ in rows)
    if path.exists() and path.stat().st_size != len(kept):
        write_atomic(path, kept)
    return rows[-1][1] if rows else None


def read_rows(path: Path) -> Iterator[tuple[bytes, Metrics]]:
    """Yield (line, row) of a file. Drops a torn last line, which a kill leaves; raises UserError
    for a broken one elsewhere."""
    with disk_errors(path):
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            row["step"] = int(row["step"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            if number == len(lines) and not line.endswith(b"\n"):
                return
            raise UserError(
                "a row of the metrics cannot be read",
                where=f"{path}:{number}",
                found=repr(line[:80]),
                expected="a JSON object with a step, as Tandem wrote it",
                next=RESTORE_OR_FRESH,
            ) from error
        if line.endswith(b"\n"):
            yield line, row


class _EventFile:
    """One TensorBoard file for each start, written at once: no thread whose errors come late.

    purge_step tells TensorBoard to forget the steps from there on in earlier files.
    """

    def __init__(self, folder: Path, purge_step: int):
        # Imported here because it takes several times as long as the other imports, torch among
        # its own.
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary
        from tensorboardX.record_writer import RecordWriter
        from tensorboardX.summary import text

        self._event, self._summary, self._text = Event, Summary, text
        self._folder = folder
        with disk_errors(folder):
            folder.mkdir(exist_ok=True)
            # TensorBoard reads the files by name: numbered, as a clock can step back.
            path = folder / f"events.out.tfevents.{len(list(folder.iterdir())):010d}"
            path.touch(exist_ok=False)
            self._records = RecordWriter(str(path))
        self._put(Event(file_version="brain.Event:2"))
        self._put(Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)))

    def append(self, step: int, scalars: dict[str, float]) -> None:
        values = [
            self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()
        ]
        self._put(self._event(step=step, summary=self._summary(value=values)))

    def append_text(self, step: int, tag: str, text: str) -> None:
        """Add a text, read as Markdown."""
        summary = self._text(tag, text)
        summary.value[0].tag = tag  # without the writer's suffix
        self._put(self._event(step=step, summary=summary))

    def _put(self, event: Any) -> None:
        event.wall_time = time.time()
        with disk_errors(self._folder):
            self._records.write(event.SerializeToString())
            self._records.flush()

    def close(self) -> None:
        self._records.close()
