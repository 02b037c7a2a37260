"""Episodes as text, from the journal's files: a few lines while a run goes on, a page afterwards.

    tandem show runs/demo/train --step 12 --worst

The text of a model is not trusted: every character that a terminal could obey is written as an
escape. It does not know why an episode became what it is: that is plugins/audit/why.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.run_folder.episode_files import episode_file, read_groups
from tandem.runtime.image_parts import message_text
from tandem.runtime.wording import counted
from tandem.types import Episode, Group, Message

WIDTH = 66  # characters of a text on one line of `brief`


@dataclass(frozen=True, kw_only=True)
class Sample:
    """An episode in the file of a step: number `place` of group `row`."""

    step: int
    row: int
    place: int
    group: Group
    held_out: bool = False  # of an evaluation

    @property
    def episode(self) -> Episode:
        return self.group.episodes[self.place]

    @property
    def name(self) -> str:
        """STEP:UID:SAMPLE, by which `tandem why` finds one that was trained."""
        return f"{self.step}:{self.episode.uid}:{self.episode.sample_index}"

    @property
    def prompt(self) -> tuple[Message, ...]:
        return self.episode.opening or self.group.problem.messages

    @property
    def errors(self) -> list[str]:
        return [*filter(None, (self.episode.reward_error, self.episode.env_error))]

    @property
    def summary(self) -> str:
        """Example: "reward 1.5 (answer 1, format 0.5), ended by stop, 14 tokens"."""
        episode = self.episode
        parts = episode.reward_parts or episode.env_rewards
        named = ", ".join(f"{name} {value:g}" for name, value in parts.items() if len(parts) > 1)
        turns = f" in {episode.num_turns} turns" if episode.num_turns > 1 else ""
        return (
            f"reward {episode.reward:g}{f' ({named})' if named else ''}, "
            f"ended by {episode.stop_reason}, {counted(episode.loss_mask.sum(), 'tokens')}{turns}"
        )


def sample_file(episodes: Path, step: int, *, held_out: bool) -> Path | None:
    """Find the file of the step's episodes, or of its evaluation, which comes first if held_out;
    None if it has neither."""
    kinds = ("eval_sampled", "train") if held_out else ("train", "eval_sampled")
    paths = (episode_file(episodes, step, kind) for kind in kinds)
    return next(filter(Path.is_file, paths), None)


def read_samples(path: Path) -> list[Sample]:
    """Read the episodes of a file, one of each problem first, then the next of each. Raises
    UserError."""
    kind, _, step = path.stem.partition("_step_")
    samples = [
        Sample(step=int(step), row=row, place=place, group=group, held_out=kind.startswith("eval"))
        for row, group in enumerate(read_groups(path))
        for place in range(len(group.episodes))
    ]
    return sorted(samples, key=lambda sample: (sample.episode.sample_index, sample.row))


def first_error(episodes: Path, step: int) -> str:
    """Return the error of the step's first episode that has one; "" if none has."""
    path = sample_file(episodes, step, held_out=False)
    return next((error for one in read_samples(path) for error in one.errors), "") if path else ""


def brief(sample: Sample) -> str:
    """Write three lines: the summary, the end of the prompt, begin and end of the completion."""
    prompt, completion = repr(message_text(sample.prompt[-1])), repr(sample.episode.text)
    if len(prompt) > WIDTH:
        prompt = f"... {prompt[4 - WIDTH :]}"
    if len(completion) > WIDTH:
        completion = f"{completion[: WIDTH // 2]} ... {completion[5 - WIDTH // 2 :]}"
    episode, kind = sample.episode, "held-out problem" if sample.held_out else "problem"
    name = f"step {sample.step}, {kind} {printable(episode.uid)}, sample {episode.sample_index}"
    return f"{name}: {sample.summary}\n  prompt  {prompt}\n  said    {completion}"


def page(sample: Sample) -> str:
    """Write the whole conversation, behind the names of its tools."""
    tools = ", ".join(tool["function"]["name"] for tool in sample.episode.tools)
    offered: list[Message] = [{"role": "tools", "content": tools}] * bool(tools)
    chat = [
        f"{message['role']}: {printable(message_text(message))}"
        for message in (*offered, *sample.episode.chat(sample.group.problem))
    ]
    answer = sample.group.problem.answer
    expected = [f"expected answer: {printable(answer)}"] if answer else []
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
