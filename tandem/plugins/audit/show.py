"""The texts of `tandem replay`, `why` and `diff`: a step compared with its record; the history of
an episode, and of each of its tokens; the first difference of two runs."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from tandem.cli.progress import console, print_lines
from tandem.plugins.audit.replay import ReplayReport, replay
from tandem.plugins.audit.why import (
    EpisodeRef,
    EpisodeUpdate,
    Token,
    find_episodes,
    tokens,
    trace_updates,
    why_not_learned,
    with_history,
)
from tandem.run_folder.diff import Comparison, compare_runs
from tandem.run_folder.read import PastRun, entered, open_past
from tandem.runtime.disk import disk_errors, write_atomic
from tandem.runtime.image_parts import message_text
from tandem.runtime.wording import counted

_SHOWN = ("reward", "policy_loss", "nll", "loss", "teacher_kl", "grad_norm", "critic/grad_norm")
_OUTCOMES = {
    "train": "trained",
    "carry": "carried on, as the step was full",
    "no_signal": "left out: no signal in its group",
    "unfinished": "not finished, goes on",
}
_TEXT = 40  # characters of a completion in a list
_COLUMNS = ("position", "token", "version", "log-prob", "advantage", "ratio", "weight")
_WIDTHS = (8, 7, 7, 10, 10, 9, 10)


def why(folder: Path, name: str, count: int, *, learning: bool, out: Path | None) -> None:
    """Explain the episode that a name means; if it means several, list count of them."""
    target = out and out.absolute()
    with entered(folder) as past:
        refs = find_episodes(past, name)
        if len(refs) == 1:
            ref = with_history(past, refs[0])
            replays = learning and past.command == "train"
            update = trace_updates(past, ref, console.print) if replays else None
            rows = tokens(past, ref, update)
            print_lines([*_account(past, ref, update), *table(rows)])
            if target is not None:
                text = json.dumps(_as_json(ref, update, rows), indent=1, default=str)
                with disk_errors(target):
                    target.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(target, text.encode() + b"\n")
                console.print(f"all of it in {target}")
            return
    times = Counter(ref.name for ref in refs)
    print_lines([f"{len(refs)} episodes; ask for one of them:"])
    for ref in refs[:count]:
        episode = ref.episode
        text = f"reward {episode.reward:g}, {episode.stop_reason}, {ref.group.outcome}"
        key = f"  key {episode.key}" * (times[ref.name] > 1)
        print_lines([f"  {ref.name}  {text}{key}  {episode.text!r:.{_TEXT}}"])
    if len(refs) > count:
        print_lines([f"  and {len(refs) - count} more: --count {len(refs)}"])


def _account(past: PastRun, ref: EpisodeRef, update: EpisodeUpdate | None) -> list[str]:
    episode, problem = ref.episode, ref.group.problem
    category = f" ({problem.category})" if problem.category else ""
    versions = sorted({int(v) for v in episode.weight_versions[episode.loss_mask]})
    parts = ", ".join(f"{name} {value:g}" for name, value in episode.reward_parts.items())
    group_mean = f"mean of its group {ref.group.rewards.mean():g}"
    penalties = [f"{value:g}" for value, _ in groupby(episode.penalties.tolist()) if value]
    not_learned = update is not None and update.columns is None
    turns = f" in {episode.num_turns} turns" if episode.num_turns > 1 else ""
    turns += " with a prompt each" if episode.starts else ""
    size = f"{int(episode.loss_mask.sum())} tokens sampled{turns}, {len(episode.tokens)} in all"
    rows = {
        "problem": f"{problem.uid}{category}: {message_text(problem.messages[-1])!r}",
        "answer": repr(problem.answer) if problem.answer else "",
        "sampled": f"{size}, by weights {', '.join(map(str, versions)) or 'none'}",
        "text": repr(episode.text),
        "ended": episode.stop_reason,
        "reward": f"{episode.reward!r}{f' of {parts}' if parts else ''}; {group_mean}",
        "env rewards": ", ".join(
            f"{name} {value:g}" for name, value in episode.env_rewards.items()
        ),
        "scoring": episode.reward_error,
        "failure": episode.env_error,
        "penalties": ", ".join(penalties),
        "history": "; ".join(f"step {step}: {_OUTCOMES[outcome]}" for step, outcome in ref.history),
        "no loss": why_not_learned(past, ref, update) if update and not_learned else "",
    }
    lines = [f"  {name:<10}{text}" for name, text in rows.items() if text]
    if update and update.divergence:
        lines.append(
            "  WARNING: the replay is not equal to the run, see tandem replay: "
            + update.divergence.what
        )
    return [f"episode {ref.name} of {past.folder}", *lines]


def table(rows: Sequence[Token]) -> list[str]:
    """Write a line for each sampled token, and one for each stretch of other tokens."""
    lines = [f"{_cells(_COLUMNS)}  text"]
    for sampled, stretch in groupby(rows, key=lambda row: row.sampled):
        part = list(stretch)
        if sampled:
            for token in part:
                numbers = (
                    *(token.version, token.engine_logprob),
                    *(token.advantage, token.ratio, token.weight),
                )
                texts = ["-" if number is None else f"{number:.5g}" for number in numbers]
                remarks = ["clipped"] * bool(token.clipped)
                remarks += [f"masked by {token.masked}"] * bool(token.masked)
                remarks += [f"penalty {token.penalty:g}"] * bool(token.penalty)
                cells = _cells([str(token.position), str(token.token), *texts])
                more = f"  {', '.join(remarks)}" * bool(remarks)
                lines.append(f"{cells}  {token.text!r}{more}")
        else:
            text = "".join(token.text for token in part)
            shown = text if len(text) <= 60 else f"{text[:28]} ... {text[-28:]}"
            lines.append(f"{part[0].position:>8} ... {part[-1].position}, read: {shown!r}")
    return lines


def _cells(texts: Sequence[str]) -> str:
    return " ".join(f"{text:>{width}}" for text, width in zip(texts, _WIDTHS, strict=True))


def _as_json(
    ref: EpisodeRef, update: EpisodeUpdate | None, rows: Sequence[Token]
) -> dict[str, Any]:
    """Collect the journal's record of the episode, and the tokens."""
    episode = ref.episode
    # the tokens say it
    arrays = ("tokens", "loss_mask", "engine_logprobs", "weight_versions", "penalties")
    replayed = update is not None and ref.trained_in is not None
    return {
        "episode": ref.name,
        "step": ref.step,
        "history": ref.history,
        "problem": asdict(ref.group.problem),
        **{
            name: getattr(episode, name)
            for name in episode.__dataclass_fields__
            if name not in arrays
        },
        "replay_is_equal": update.divergence is None if update and replayed else None,
        "tokens": [asdict(row) for row in rows],
    }


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


def diff(a: Path, b: Path) -> int:
    """Print where two runs differ and return the exit code, 0 if all their common steps are
    equal."""
    comparison = compare_runs(open_past(a), open_past(b))
    print_lines(difference(comparison, str(a), str(b)))
    return int(comparison.divergence is not None or bool(comparison.altered))


def difference(comparison: Comparison, a: str, b: str) -> list[str]:
    """Describe a comparison of the run folders a and b."""
    text = [f"A {a}: step {comparison.last[0]}    B {b}: step {comparison.last[1]}"]
    for title, differences in (("config", comparison.config), ("input", comparison.inputs)):
        text += [f"  {title} {one.what}: A {one.a}, B {one.b}" for one in differences]
    if comparison.other_bytes:
        steps = counted(len(comparison.other_bytes), "steps")
        text.append(f"  note: journal files of {steps} hold equal episodes in different bytes")
    text += [f"{name} is not as it was written: {one}" for name, one in comparison.altered]
    if comparison.divergence is not None:
        place = f"at step {comparison.step}" if comparison.step else "before the first step"
        text.append(f"they part {place}: {comparison.divergence.what}")
        return [*text, f"    A  {comparison.divergence.a}", f"    B  {comparison.divergence.b}"]
    if comparison.altered:
        doubt = f"NOT known to be equal over {counted(comparison.steps, 'steps')}: "
        return [*text, doubt + "restore what is not as it was written"]
    longer = "" if comparison.last[0] == comparison.last[1] else ", all that both have"
    return [*text, f"equal to the last bit over {counted(comparison.steps, 'steps')}{longer}"]
