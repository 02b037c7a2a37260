"""`tandem why`: what happened to an episode, and to each of its tokens."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from tandem.audit.why import Found, Learned, Token, find, follow, not_learned, tokens, watch
from tandem.cli.progress import console
from tandem.run_folder.past_run import PastRun, entered
from tandem.runtime.disk import write_atomic

_OUTCOMES = {
    "train": "trained",
    "carry": "carried on, as the step was full",
    "no_signal": "left out: no signal in its group",
    "unfinished": "not finished, goes on",
}
_LISTED = 40


def why(folder: Path, name: str, *, learning: bool, out: Path | None) -> None:
    """Explain the episode that a name means; where it means several, list them."""
    target = out and out.absolute()
    with entered(folder) as past:
        _explain(past, name, learning, target)


def _explain(past: PastRun, name: str, learning: bool, out: Path | None) -> None:
    found = find(past, name)
    if len(found) > 1:
        # those of a step are all to choose from
        listed = found if name == str(found[0].step) else found[:_LISTED]
        _print([f"{len(found)} episodes; ask for one of them:", *map(_line, listed)])
        _print([f"  and {len(found) - len(listed)} more"] * (len(found) > len(listed)))
        return
    it = follow(past, found[0])
    learned = watch(past, it, console.print) if learning and past.command == "train" else None
    rows = tokens(past, it, learned)
    _print([*_account(past, it, learned), *table(rows)])
    if out is not None:
        write_atomic(
            out, json.dumps(_everything(it, learned, rows), indent=1, default=str).encode() + b"\n"
        )
        console.print(f"all of it in {out}")


def _print(lines: Sequence[str]) -> None:
    for line in lines:
        console.print(line, markup=False)


def _line(found: Found) -> str:
    episode = found.episode
    told = (
        f"reward {episode.reward:g}, {_size(found)}, {episode.stop_reason}, {found.group.outcome}"
    )
    return f"  {found.name}  {told}; key {episode.key}"


def _size(found: Found) -> str:
    episode = found.episode
    turns = f" in {episode.num_turns} turns" if episode.num_turns > 1 else ""
    return f"{int(episode.loss_mask.sum())} tokens sampled{turns}, {len(episode.tokens)} in all"


def _account(past: PastRun, found: Found, learned: Learned | None) -> list[str]:
    episode, problem = found.episode, found.group.problem
    versions = sorted({int(v) for v in episode.weight_versions[episode.loss_mask]})
    parts = ", ".join(f"{name} {value:g}" for name, value in episode.reward_parts.items())
    rows = {
        "problem": f"{problem.uid}{f' ({problem.category})' if problem.category else ''}: {problem.messages[-1]['content']!r}",
        "answer": repr(problem.answer) if problem.answer else "",
        "sampled": f"{_size(found)}, by weights {', '.join(map(str, versions)) or 'none'}",
        "text": repr(episode.text),
        "ended": episode.stop_reason,
        "reward": f"{episode.reward!r}{f' of {parts}' if parts else ''}; mean of its group {found.group.rewards.mean():g}",
        "given": ", ".join(f"{name} {value:g}" for name, value in episode.given.items()),
        "scoring": episode.reward_error,
        "failure": episode.env_error,
        "penalties": ", ".join(
            f"{value:g}" for value, _ in groupby(episode.penalties.tolist()) if value
        ),
        "fate": "; ".join(f"step {step}: {_OUTCOMES[outcome]}" for step, outcome in found.fate),
        "no loss": not_learned(past, found, learned) if learned and learned.columns is None else "",
    }
    lines = [
        f"episode {found.name} of {past.folder}",
        *(f"  {name:<10}{text}" for name, text in rows.items() if text),
    ]
    if learned and (wrong := learned.difference):
        lines.append(
            f"  WARNING: the replay is not equal to the run, see tandem replay: {wrong.what}"
        )
    return lines


def table(rows: Sequence[Token]) -> list[str]:
    """A line a sampled token, and one for each stretch that was read."""
    lines = [
        f"{'position':>8} {'token':>7} {'version':>7} {'log-prob':>10} {'advantage':>10} {'ratio':>9} {'weight':>10}  text"
    ]
    for sampled, stretch in groupby(rows, key=lambda row: row.sampled):
        part = list(stretch)
        if sampled:
            lines += [_row(token) for token in part]
        else:
            text = "".join(token.text for token in part)
            shown = text if len(text) <= 60 else f"{text[:28]} ... {text[-28:]}"
            lines.append(f"{part[0].position:>8} ... {part[-1].position}, read: {shown!r}")
    return lines


def _row(token: Token) -> str:
    said = [
        name
        for name, is_so in (("clipped", token.clipped), (f"masked by {token.masked}", token.masked))
        if is_so
    ]
    said += [f"penalty {token.penalty:g}"] * bool(token.penalty)
    return (
        f"{token.position:>8} {token.token:>7} {_number(token.version):>7} {_number(token.engine_logprob):>10} "
        f"{_number(token.advantage):>10} {_number(token.ratio):>9} {_number(token.weight):>10}  {token.text!r}"
        f"{'  ' + ', '.join(said) if said else ''}"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"


def _everything(found: Found, learned: Learned | None, rows: Sequence[Token]) -> dict[str, Any]:
    """As JSON: what the journal has of the episode, and the tokens."""
    episode = found.episode
    arrays = ("tokens", "loss_mask", "engine_logprobs", "weight_versions", "penalties")
    plain = {
        name: getattr(episode, name) for name in episode.__dataclass_fields__ if name not in arrays
    }  # the tokens say it
    return {
        "episode": found.name,
        "step": found.step,
        "fate": found.fate,
        "problem": asdict(found.group.problem),
        **plain,
        "replay_is_equal": None
        if learned is None or found.trained_in is None
        else learned.difference is None,
        "tokens": [asdict(row) for row in rows],
    }
