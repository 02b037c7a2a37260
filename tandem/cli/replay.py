"""`tandem replay`: a step learned again from the run folder, and whether every number comes out as
it was."""

from pathlib import Path

from tandem.audit.replay import Verdict, replay
from tandem.cli.progress import console
from tandem.run_folder.past_run import entered

_SHOWN = ("reward", "policy_loss", "nll", "loss", "teacher_kl", "grad_norm", "critic/grad_norm")


def replay_step(folder: Path, step: int) -> int:
    """Print the verdict; returns the exit code, 1 where something is not equal."""
    with entered(folder) as past:
        verdict = replay(past, step, console.print)
    for line in lines(verdict, str(folder)):
        console.print(line, markup=False)
    return int(verdict.difference is not None)


def lines(verdict: Verdict, folder: str) -> list[str]:
    """What a person reads."""
    title = f"step {verdict.step} of {folder}, from {verdict.begun}"
    notes = [f"  note: {note}" for note in verdict.notes]
    if found := verdict.difference:
        also = [f"  {found.also}"] if found.also else []
        return [
            f"NOT equal: {title}",
            f"  first difference: {found.what}",
            f"    recorded  {found.recorded}",
            f"    replayed  {found.found}",
            *also,
            *notes,
        ]
    named = ", ".join(
        f"{name} {verdict.metrics[name]:.6g}" for name in _SHOWN if name in verdict.metrics
    )
    rows = {
        "rewards": f"{verdict.episodes} episodes scored again" if verdict.episodes else "",
        "log-probs": f"{verdict.tokens} tokens, by the weights that sampled them"
        if verdict.tokens
        else "",
        "metrics": f"{len(verdict.metrics)}, among them {named}"
        if named
        else f"{len(verdict.metrics)}",
        "weights": f"{verdict.weights}"
        if verdict.weights
        else "not compared: no row in the ledger",
        "checkpoint": verdict.checkpoint or "none of this step to compare with",
    }
    return [
        f"equal: {title}",
        *(f"  {name:<11}{text}" for name, text in rows.items() if text),
        *notes,
    ]
