"""Episodes as a person reads them, from the journal's files: a few lines while a run goes on, a
page afterwards.

    tandem show runs/demo/train --step 12 --worst

What a model wrote is text of a stranger: whatever a terminal could obey is written as an escape. It
does not know why an episode became what it is: that is audit/why.py.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.run_folder.episode_files import episode_file
from tandem.run_folder.past_run import read_columns
from tandem.types import Message

_COLUMNS = [
    "step",
    "group",
    "uid",
    "sample_index",
    "answer",
    "messages",
    "opening",
    "transcript",
    "loss_mask",
    "reward",
    "reward_parts",
    "given",
    "stop_reason",
    "reward_error",
    "env_error",
]
WIDTH = 66  # characters of a text on one line of `brief`


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What is shown of an episode."""

    name: str  # STEP:UID:SAMPLE, by which `tandem why` finds one that was trained
    held_out: bool  # of an evaluation
    group: int
    sample_index: int
    prompt: tuple[Message, ...]
    transcript: tuple[Message, ...]
    answer: str
    reward: float
    verdict: str  # "reward 1 (answer 1), ended by stop, 14 tokens"
    errors: tuple[str, ...]

    @property
    def completion(self) -> str:
        """The last text of the model."""
        return next(
            (m["content"] for m in reversed(self.transcript) if m["role"] == "assistant"), ""
        )


def sample_file(episodes: Path, step: int, *, held_out: bool) -> Path | None:
    """The file of the step's episodes, those of its evaluation first if held_out; None where it has
    none of both."""
    kinds = ("eval_sampled", "train") if held_out else ("train", "eval_sampled")
    return next(
        (path for kind in kinds if (path := episode_file(episodes, step, kind)).is_file()), None
    )


def read_samples(path: Path) -> list[Shown]:
    """Read the episodes of a file, one of each problem first, then the next of each. Raises
    UserError."""
    held_out = path.name.startswith("eval_")
    samples = [_shown(row, held_out) for row in read_columns(path, _COLUMNS)]
    return sorted(samples, key=lambda shown: (shown.sample_index, shown.group))


def _shown(row: dict[str, Any], held_out: bool) -> Shown:
    parts = dict(row["reward_parts"]) or dict(row["given"])
    told = ", ".join(f"{name} {value:g}" for name, value in parts.items())
    transcript = tuple(json.loads(row["transcript"]))
    turns = sum(message["role"] == "assistant" for message in transcript)
    verdict = (
        f"reward {row['reward']:g}{f' ({told})' if told else ''}, ended by {row['stop_reason']}, "
        f"{sum(row['loss_mask'])} tokens{f' in {turns} turns' if turns > 1 else ''}"
    )
    return Shown(
        name=f"{row['step']}:{row['uid']}:{row['sample_index']}",
        held_out=held_out,
        group=row["group"],
        sample_index=row["sample_index"],
        prompt=tuple(json.loads(row["opening"]) or json.loads(row["messages"])),
        transcript=transcript,
        answer=row["answer"],
        reward=row["reward"],
        verdict=verdict,
        errors=tuple(filter(None, (row["reward_error"], row["env_error"]))),
    )


def brief(shown: Shown) -> str:
    """Three lines: what became of it, the end of the prompt, begin and end of the completion."""
    asked, said = repr(shown.prompt[-1]["content"]), repr(shown.completion)
    if len(asked) > WIDTH:
        asked = f"... {asked[4 - WIDTH :]}"
    if len(said) > WIDTH:
        said = f"{said[: WIDTH // 2]} ... {said[5 - WIDTH // 2 :]}"
    kind = "held-out sample" if shown.held_out else "sample"
    return f"{kind} {shown.name}: {shown.verdict}\n  prompt  {asked}\n  said    {said}"


def page(shown: Shown) -> str:
    """The whole conversation."""
    chat = [
        f"{message['role']}: {printable(message['content'])}"
        for message in (*shown.prompt, *shown.transcript)
    ]
    expected = [f"expected answer: {printable(shown.answer)}"] if shown.answer else []
    errors = [f"error: {printable(error)}" for error in shown.errors]
    return "\n".join([f"{printable(shown.name)}: {shown.verdict}", *chat, *expected, *errors])


def printable(text: str) -> str:
    """The text with its lines, and every other character that is not printed as an escape."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


def as_markdown(pages: Sequence[str]) -> str:
    """Pages as blocks of code, in which no character is markup."""
    lines = ["", *(line for page in pages for line in [*page.splitlines(), ""])]
    return "\n".join(f"    {line}" for line in lines)
