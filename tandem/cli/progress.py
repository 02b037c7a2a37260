"""What a person sees of a run: a live line on a terminal, one line a step elsewhere, and warnings that matter."""

from collections import deque
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from tandem.types import Row

console = Console(highlight=False, soft_wrap=True)
WINDOW = 5  # steps that the moving average of the reward looks back


class StepProgress:
    """Call it with (steps done, metrics, timings) after each step."""

    def __init__(self, title: str, steps: int):
        self.steps = steps
        self.recent: deque[float] = deque(maxlen=WINDOW)
        self.best = float("-inf")
        self.warned: set[str] = set()
        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[text]}"), TimeRemainingColumn(), console=console, transient=True,
            disable=not console.is_terminal,
        )  # fmt: skip
        self.task = self.bar.add_task(title, total=steps, text="")

    def __enter__(self) -> "StepProgress":
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()
        if kind is KeyboardInterrupt:
            console.print("interrupted; the same command goes on")

    def __call__(self, done: int, metrics: Row, timings: Row) -> None:
        self.bar.update(self.task, completed=done, text=summary(metrics, timings))
        if text := evaluation(metrics):
            console.print(f"step {done:4d}  {text}")
        elif not console.is_terminal and (done % max(1, self.steps // 20) == 0):
            console.print(f"step {done:4d}  {summary(metrics, timings)}")
        for warning in self._warnings(metrics):
            if warning not in self.warned:
                self.warned.add(warning)
                console.print(f"warning at step {done}: {warning}", style="yellow")

    def _warnings(self, metrics: Row) -> list[str]:
        bad = sorted(name.removeprefix("bad/") for name in metrics if name.startswith("bad/"))
        broken = [(bool(bad), f"an update was skipped, not finite: {', '.join(bad)}")]
        if "reward" not in metrics:
            return [text for hit, text in broken if hit]
        self.recent.append(metrics["reward"])
        average = sum(self.recent) / len(self.recent)
        self.best = max(self.best, average) if len(self.recent) == WINDOW else self.best
        failed = metrics.get("env_errors", 0) + metrics.get("env_timeouts", 0)
        checks = [
            *broken,
            (metrics.get("logprob_gap", 0) != 0, "engine and trainer disagree: logprob_gap is not 0"),
            (
                average < self.best - 0.2,
                "the reward is falling: a lower train.learning_rate or more rl.prompts_per_step may help",
            ),
            (
                metrics["groups_without_signal"] > 0.9,
                "over 90% of the groups have equal rewards: nothing to learn from them",
            ),
            (metrics["truncated"] > 0.5, "over half of the completions hit rollout.max_new_tokens"),
            (
                metrics["reward_errors"] > 0,
                f"{metrics['reward_errors']:.0f} episodes could not be scored; see reward_error in episodes/",
            ),
            (
                failed > 0,
                f"{failed:.0f} episodes failed in their environment; see env_error in episodes/",
            ),
        ]
        return [text for hit, text in checks if hit]


def summary(metrics: Row, timings: Row) -> str:
    shown = [
        ("reward", "reward {:.3f}"),
        ("nll", "nll {:.3f}"),
        ("loss", "loss {:.3f}"),
        ("accuracy", "accuracy {:.3f}"),
        ("teacher_kl", "KL to the teacher {:.3f}"),
        ("entropy", "entropy {:.2f}"),
        ("logprob_gap", "gap {:.1e}"),
    ]
    parts = [text.format(metrics[name]) for name, text in shown if name in metrics]
    if "step_s" in timings:
        parts.append(f"{timings['step_s']:.2f} s/step")
    if timings.get("generated_tokens_per_s"):
        parts.append(f"{timings['generated_tokens_per_s']:,.0f} tok/s")
    return "  ".join(parts)


def evaluation(metrics: Row) -> str:
    """The held-out figures of a row in one line; empty where it has none."""
    parts = []
    if "eval/accuracy" in metrics:
        parts.append(f"held-out pairs: accuracy {metrics['eval/accuracy']:.3f}, loss {metrics['eval/loss']:.3f}")
    if "eval/sampled" in metrics:
        parts.append(f"held-out reward: sampled {metrics['eval/sampled']:.3f} ± {metrics['eval/sampled_interval']:.3f}")
    if "eval/greedy" in metrics:
        parts.append(f"greedy {metrics['eval/greedy']:.3f}")
    return ", ".join(parts)
