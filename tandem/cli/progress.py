"""The terminal: lines and tables, and the progress of a run: a live line on a terminal, a line now
and then elsewhere and in log.txt, and warnings.

    step 12/100  reward 0.512 ↑  3.10 s/step  entropy 1.20  gap 0  left 4 min 31 s

A line fits into 80 columns; the arrow compares the last steps with those before them. The time left
is the median of recent steps times the steps to come. It does not know what a step does.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from tandem.run_folder.symptoms import EPISODE_ERRORS, HISTORY, symptoms
from tandem.types import Row

console = Console(highlight=False, soft_wrap=True)


def print_lines(lines: Iterable[str]) -> None:
    """Print lines as they are: nothing in them is markup."""
    for line in lines:
        console.print(line, markup=False)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> None:
    """Print a table with a frame."""
    table = Table(*columns, title=title or None)
    for row in rows:
        table.add_row(*map(escape, row))  # [parallel] is a section, no style
    console.print(table)


WIDTH = 80  # columns of a line
TREND, SAME = 5, 0.02  # steps whose mean reward is compared with as many before; less is no trend
RECENT = 9  # steps whose median is the time of the next one
LINES = 20  # step lines of a run of fast steps
LINE_S = 10.0  # seconds after which slower steps get a line each


class StepProgress:
    """The progress of a run. Call it with (steps done, metrics, timings) after each step. log gets
    every line, output shows them; first_error returns that of a step's episodes."""

    def __init__(
        self,
        title: str,
        steps: int,
        *,
        log: Callable[[str], None] = lambda line: None,
        output: Console = console,
        clock: Callable[[], float] = time.monotonic,
        first_error: Callable[[int], str] = lambda step: "",
    ):
        self.steps, self.log, self.output, self.clock = steps, log, output, clock
        self.first_error = first_error
        self.recent: deque[float] = deque(maxlen=RECENT)  # seconds of steps
        self.last_line = float("-inf")  # when the last step line was written
        self.rows: deque[Row] = deque(maxlen=HISTORY)  # metrics and timings
        self.warned: set[str] = set()
        width = 10 if output.width < 100 else 24
        self.room = output.width - len(f"{title}  {steps}/{steps}  left 59 min 59 s  ") - width
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=width),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.fields[text]}", markup=False),
            console=output,
            transient=True,
            disable=not output.is_terminal,
        )
        self.task = self.bar.add_task(title, total=steps, left="", text="")

    def __enter__(self) -> "StepProgress":
        self.bar.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.bar.stop()
        if isinstance(error, KeyboardInterrupt):
            lines = [*error.__dict__.get("__notes__", []), "interrupted; the same command resumes"]
            self.output.print("\n".join(lines), markup=False)

    def __call__(self, done: int, metrics: Row, timings: Row) -> None:
        if "step_s" in timings:
            self.rows.append({**metrics, **timings})
            self.recent.append(timings["step_s"] + timings.get("ledger_s", 0.0))
        step_s = median(self.recent) if self.recent else None
        left = "" if step_s is None else f"left {duration((self.steps - done) * step_s)}"
        parts, held_out = summary(metrics, timings, step_s), evaluation(metrics)
        if "reward" in metrics:
            parts[0] += trend([row["reward"] for row in self.rows if "reward" in row])
        self.bar.update(
            self.task, completed=done, left=left, text=fitting(parts, self.room), refresh=True
        )
        step = f"step {done:{len(str(self.steps))}d}/{self.steps}  "
        if parts and (held_out or self._is_due(done)):
            ending = f"  {left}" if left and done < self.steps else ""
            line = step + fitting(parts, WIDTH - len(step + ending)) + ending
            self._print(line, shown=bool(held_out) or not self.output.is_terminal)
        if held_out:
            self._print(step + held_out)
        for name, warning in symptoms(list(self.rows)).items():
            if name not in self.warned:
                self.warned.add(name)
                if name in EPISODE_ERRORS and (error := self.first_error(done)):
                    warning += f"; the first error: {error}"
                self._print(f"warning at step {done}: {warning}", style="yellow")

    def _is_due(self, done: int) -> bool:
        """Tell whether a step gets a line: the first one, 20 of a run, and all that end long after
        the line before."""
        every = max(1, self.steps // LINES)
        due = done % every == 0 or done == self.steps or self.clock() - self.last_line >= LINE_S
        self.last_line = self.clock() if due else self.last_line
        return due

    def _print(self, line: str, *, shown: bool = True, style: str | None = None) -> None:
        self.log(line)
        if shown:
            self.output.print(line, style=style, markup=False)


def duration(seconds: float) -> str:
    """Write the two largest units of a time: 271.4 -> "4 min 31 s"."""
    total = round(seconds)
    minutes, hours, days = total // 60, total // 3600, total // 86400
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min {total % 60} s" if minutes else f"{total} s"


def fitting(parts: Sequence[str], room: int) -> str:
    """Join the first parts, as many as there is room for."""
    text = ""
    for part in parts:
        longer = f"{text}  {part}" if text else part
        if len(longer) > room:
            break
        text = longer
    return text


def trend(rewards: Sequence[float]) -> str:
    """Return an arrow for the way that the newest rewards go; "" as long as there are few."""
    if len(rewards) < 2 * TREND:
        return ""
    change = fmean(rewards[-TREND:]) - fmean(rewards[-2 * TREND : -TREND])
    return " →" if abs(change) < SAME else " ↑" if change > 0 else " ↓"


def summary(metrics: Row, timings: Row, step_s: float | None) -> list[str]:
    """Write the figures of a step, the most wanted first; step_s: seconds of a step."""
    rewards = [("reward", "reward {:.3f}"), ("nll", "nll {:.3f}"), ("loss", "loss {:.3f}")]
    others = [
        ("accuracy", "accuracy {:.3f}"),
        ("teacher_kl", "KL to the teacher {:.3f}"),
        ("entropy", "entropy {:.2f}"),
        ("logprob_gap", "gap {:.1e}" if metrics.get("logprob_gap") else "gap {:.0f}"),
    ]
    speed = [f"{step_s:.2f} s/step"] if step_s is not None and "step_s" in timings else []
    tokens = timings.get("generated_tokens_per_s")
    first, rest = (
        [text.format(metrics[name]) for name, text in shown if name in metrics]
        for shown in (rewards, others)
    )
    return [*first, *speed, *rest, *([f"{tokens:,.0f} tok/s"] if tokens else [])]


def evaluation(metrics: Row) -> str:
    """Write the held-out figures of a row in a line; empty if it has none."""
    parts = []
    if "eval/accuracy" in metrics:
        accuracy, loss = metrics["eval/accuracy"], metrics["eval/loss"]
        parts.append(f"held-out pairs: accuracy {accuracy:.3f}, loss {loss:.3f}")
    if "eval/sampled" in metrics:
        reward, interval = metrics["eval/sampled"], metrics["eval/sampled_interval"]
        parts.append(f"held-out reward: sampled {reward:.3f} ± {interval:.3f}")
    if "eval/greedy" in metrics:
        parts.append(f"greedy {metrics['eval/greedy']:.3f}")
    return ", ".join(parts)
