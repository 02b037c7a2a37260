"""`tandem replay`: learn a step again from the run folder, and compare every number."""

from pathlib import Path

from tandem.cli.progress import console, print_lines
from tandem.plugins.audit.replay import ReplayReport, replay
from tandem.run_folder.read import entered

_SHOWN = ("reward", "policy_loss", "nll", "loss", "teacher_kl", "grad_norm", "critic/grad_norm")


def replay_step(folder: Path, step: int) -> int:
    """Print the report of a replay and return the exit code, 1 if something is not equal."""
    with entered(folder) as past:
        report = replay(past, step, console.print)
    print_lines(lines(report, str(folder)))
    return int(report.divergence is not None)


def lines(report: ReplayReport, folder: str) -> list[str]:
    """Describe the replay of a step of the run in `folder`."""
    title = f"step {report.step} of {folder}, from {report.start}"
    notes = [f"  note: {note}" for note in report.notes]
    if first := report.divergence:
        return [
            f"NOT equal: {title}",
            f"  first difference: {first.what}",
            f"    recorded  {first.a}",
            f"    replayed  {first.b}",
            *([f"  {first.also}"] if first.also else []),
            *notes,
        ]
    metrics = report.metrics
    shown = ", ".join(f"{name} {metrics[name]:.6g}" for name in _SHOWN if name in metrics)
    compared = {
        "rewards": f"{report.episodes} episodes scored again" if report.episodes else "",
        "log-probs": f"{report.tokens} tokens, by the weights that sampled them"
        if report.tokens
        else "",
        "metrics": f"{len(metrics)}, among them {shown}" if shown else f"{len(metrics)}",
        "weights": report.weights or "not compared: no row in the ledger",
        "checkpoint": report.checkpoint or "none of this step to compare with",
    }
    rows = [f"  {name:<11}{text}" for name, text in compared.items() if text]
    return [f"equal: {title}", *rows, *notes]
