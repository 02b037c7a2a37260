"""Episodes as text, from the journal's files: a few lines while a run goes on, a page afterwards.

    tandem show runs/demo/train --step 12 --worst

The text of a model is not trusted: every character that a terminal could obey is written as an
escape. It does not know why an episode became what it is: that is audit/why.py.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.run_folder.episode_files import episode_file, read_columns
from tandem.runtime.image_parts import message_text
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
    "env_rewards",
    "stop_reason",
    "reward_error",
    "env_error",
]
WIDTH = 66  # characters of a text on one line of `brief`


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The texts of an episode."""

    name: str  # STEP:UID:SAMPLE, by which `tandem why` finds one that was trained
    held_out: bool  # of an evaluation
    group: int
    sample_index: int
    prompt: tuple[Message, ...]
    transcript: tuple[Message, ...]
    answer: str
    reward: float
    summary: str  # "reward 1 (answer 1), ended by stop, 14 tokens"
    errors: tuple[str, ...]

    @property
    def completion(self) -> str:
        """The last message of the model."""
        return next(
            (m["content"] for m in reversed(self.transcript) if m["role"] == "assistant"), ""
        )


def sample_file(episodes: Path, step: int, *, held_out: bool) -> Path | None:
    """Find the file of the step's episodes, or of its evaluation, which comes first if held_out;
    None if it has neither."""
    kinds = ("eval_sampled", "train") if held_out else ("train", "eval_sampled")
    return next(
        (path for kind in kinds if (path := episode_file(episodes, step, kind)).is_file()), None
    )


def read_samples(path: Path) -> list[Sample]:
    """Read the episodes of a file, one of each problem first, then the next of each. Raises
    UserError."""
    held_out = path.name.startswith("eval_")
    samples = [_sample(row, held_out) for row in read_columns(path, _COLUMNS)]
    return sorted(samples, key=lambda sample: (sample.sample_index, sample.group))


def _sample(row: dict[str, Any], held_out: bool) -> Sample:
    parts = dict(row["reward_parts"]) or dict(row["env_rewards"])
    named = ", ".join(f"{name} {value:g}" for name, value in parts.items())
    transcript = tuple(json.loads(row["transcript"]))
    turns = sum(message["role"] == "assistant" for message in transcript)
    summary = (
        f"reward {row['reward']:g}{f' ({named})' if named else ''}, ended by {row['stop_reason']}, "
        f"{sum(row['loss_mask'])} tokens{f' in {turns} turns' if turns > 1 else ''}"
    )
    return Sample(
        name=f"{row['step']}:{row['uid']}:{row['sample_index']}",
        held_out=held_out,
        group=row["group"],
        sample_index=row["sample_index"],
        prompt=tuple(json.loads(row["opening"]) or json.loads(row["messages"])),
        transcript=transcript,
        answer=row["answer"],
        reward=row["reward"],
        summary=summary,
        errors=tuple(filter(None, (row["reward_error"], row["env_error"]))),
    )


def brief(sample: Sample) -> str:
    """Write three lines: the summary, the end of the prompt, begin and end of the completion."""
    prompt, completion = repr(message_text(sample.prompt[-1])), repr(sample.completion)
    if len(prompt) > WIDTH:
        prompt = f"... {prompt[4 - WIDTH :]}"
    if len(completion) > WIDTH:
        completion = f"{completion[: WIDTH // 2]} ... {completion[5 - WIDTH // 2 :]}"
    kind = "held-out sample" if sample.held_out else "sample"
    name = printable(sample.name)
    return f"{kind} {name}: {sample.summary}\n  prompt  {prompt}\n  said    {completion}"


def page(sample: Sample) -> str:
    """Write the whole conversation."""
    chat = [
        f"{message['role']}: {printable(message_text(message))}"
        for message in (*sample.prompt, *sample.transcript)
    ]
    expected = [f"expected answer: {printable(sample.answer)}"] if sample.answer else []
    errors = [f"error: {printable(error)}" for error in sample.errors]
    return "\n".join([f"{printable(sample.name)}: {sample.summary}", *chat, *expected, *errors])


def printable(text: str) -> str:
    """Keep the lines of a text, and write other characters that are not printed as escapes."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


def as_markdown(pages: Sequence[str]) -> str:
    """Write pages as blocks of code, in which no character is markup."""
    lines = ["", *(line for page in pages for line in [*page.splitlines(), ""])]
    return "\n".join(f"    {line}" for line in lines)
