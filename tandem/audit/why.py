"""What happened to an episode and to each of its tokens, from the run folder.

    episodes/train_step_*.parquet --> who sampled it, how it ended, what it was paid, which step trained it or why none did
    audit/replay.py, watching            --> advantage, ratio, clipping and weight of each token in the last update on it

An episode is named STEP:UID:SAMPLE, the columns `step`, `uid` and `sample_index` of the journal, or
by its `key` where a step has a problem twice. It does not judge: that is `tandem replay`.

    tandem why runs/demo --episode 12:algebra/17:3      --episode 12 lists those of step 12
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tandem.audit.replay import replay
from tandem.audit.rescore import Difference
from tandem.config.schema import RL
from tandem.jobs.engines import Report
from tandem.model.tokenizer import load_tokenizer
from tandem.run_folder.past_run import PastRun, holds, read_step
from tandem.runtime.errors import UserError
from tandem.train.batch import TokenTensors, pack_batch
from tandem.train.learn import policy_loss
from tandem.types import Array, Episode, Group, Microbatch, Outcome


@dataclass(frozen=True, kw_only=True)
class Token:
    """One token; what learning made of it is None where it was read, or was not learned from."""

    position: int
    token: int
    text: str
    sampled: bool
    version: int | None = None  # of the weights that sampled it
    engine_logprob: float | None = None  # nats
    penalty: float = 0.0
    advantage: float | None = None
    ratio: float | None = None  # policy / proximal in the last update
    clipped: bool | None = None  # in the last update
    # of its loss in the last update, the off-policy correction included
    weight: float | None = None
    masked: str = ""  # by what it carries no loss


@dataclass(kw_only=True)
class Found:
    """An episode in the journal file of a step: the `place`-th of group `row`."""

    step: int
    row: int
    place: int
    group: Group
    # (step, outcome) of each file that has it, ascending
    fate: list[tuple[int, Outcome]] = field(default_factory=list)

    @property
    def episode(self) -> Episode:
        return self.group.episodes[self.place]

    @property
    def name(self) -> str:
        return f"{self.step}:{self.episode.uid}:{self.episode.sample_index}"

    @property
    def trained_in(self) -> int | None:
        """The step that had it among those to learn from."""
        return next((step for step, outcome in self.fate if outcome == "train"), None)


@dataclass(kw_only=True)
class Learned:
    """What the last update of a step had of one episode, an entry a loss token."""

    columns: TokenTensors | None = None
    logprobs: Tensor | None = None
    difference: Difference | None = None  # of the replay from the run


def find(past: PastRun, name: str) -> list[Found]:
    """The episodes that a name means, each once: STEP:UID:SAMPLE, or less of it, the journal's key,
    or a step's number for all that it had. A number is read as a uid first. Raises UserError where
    there is none."""
    for step, uid, sample in _readings(name):
        steps = [
            s for s in past.journaled() if step in (None, s) and holds(past.journal(s), "uid", uid)
        ]
        found = [f for s in steps for f in _of_file(past, s) if f.episode.uid == uid]
        if found := [f for f in found if sample is None or f.episode.sample_index == sample]:
            return list({f.episode.key: f for f in found}.values())
    if name.isdecimal() and int(name) in past.journaled():
        return _of_file(past, int(name))
    if name.isdecimal():
        steps = [s for s in past.journaled() if holds(past.journal(s), "key", int(name))]
        if found := [
            f for s in steps[-1:] for f in _of_file(past, s) if f.episode.key == int(name)
        ]:
            return found
    last = past.journaled()[-1:]
    example = next((f.name for s in last for f in _of_file(past, s)), "12:algebra/17:3")
    raise UserError(
        "the journal has no such episode",
        where=str(past.episodes),
        found=name or "nothing",
        expected=f"STEP:UID:SAMPLE, UID:SAMPLE, UID, STEP or KEY, e.g. {example}",
        next=f"tandem why {past.folder} --episode STEP lists those of a step",
    )


def _readings(name: str) -> Iterator[tuple[int | None, str, int | None]]:
    """(step, uid, sample) in the ways that a name can be read: a uid may hold colons."""
    if match := re.fullmatch(r"(\d+):(.+):(\d+)", name):
        yield int(match[1]), match[2], int(match[3])
    if match := re.fullmatch(r"(\d+):(.+)", name):
        yield int(match[1]), match[2], None
    if match := re.fullmatch(r"(.+):(\d+)", name):
        yield None, match[1], int(match[2])
    yield None, name, None


def _of_file(past: PastRun, step: int) -> list[Found]:
    return [
        Found(step=step, row=row, place=place, group=group)
        for row, group in enumerate(read_step(past.journal(step)))
        for place in range(len(group.episodes))
    ]


def follow(past: PastRun, found: Found) -> Found:
    """The same with its fate: the file of each step that had it, before and after, until one
    trained it or left it out."""
    fate = [(found.step, found.group.outcome)]
    here = found
    while before := [
        f for f in _around(past, here, -1) if f.group.outcome in ("carry", "unfinished")
    ]:
        here = before[0]
        fate.insert(0, (here.step, here.group.outcome))
    here = found
    while here.group.outcome in ("carry", "unfinished") and (after := _around(past, here, 1)):
        here = after[0]
        fate.append((here.step, here.group.outcome))
    return replace(found, fate=fate)


def _around(past: PastRun, found: Found, way: int) -> list[Found]:
    """The same episode in the next file, or the one before; a paused one has grown in between."""
    step = found.step + way
    if not past.journal(step).is_file():
        return []
    return [f for f in _of_file(past, step) if f.episode.key == found.episode.key]


# What learning made of it
# ---------------------------------------------------------------------------------------------


def watch(past: PastRun, found: Found, report: Report) -> Learned:
    """Replay the step that trained it and keep what its last update had of the episode; empty where
    none had."""
    seen = Learned()
    step = found.trained_in
    if step is None or step not in past.metrics:
        return seen
    at = (
        found
        if step == found.step
        else next(f for f in _of_file(past, step) if f.episode.key == found.episode.key)
    )
    groups = [
        (row, group)
        for row, group in enumerate(read_step(past.journal(step)))
        if group.outcome == "train"
    ]
    number = [row for row, _ in groups].index(at.row)
    places = pack_batch([group for _, group in groups], past.config).sample_index
    sample = places.index((number, at.place)) if (number, at.place) in places else None

    def observe(batch: Microbatch, columns: TokenTensors, logprobs: Tensor) -> None:
        if sample is not None and sample in batch.samples:
            own = columns.sequences == int((batch.samples == sample).argmax())
            seen.columns, seen.logprobs = _part(columns, own), logprobs[own]

    seen.difference = replay(past, step, report, observe, score=False).difference
    return seen


def _part(columns: TokenTensors, which: Tensor | slice) -> TokenTensors:
    """Of some tokens, as those of one sequence."""
    reference = columns.reference
    return TokenTensors(
        engine=columns.engine[which],
        proximal=columns.proximal[which],
        advantages=columns.advantages[which],
        weights=columns.weights[which],
        corrections=columns.corrections[which],
        fresh=columns.fresh[which],
        sequences=torch.zeros_like(columns.sequences[which]),
        reference=None if reference is None else reference[which],
    )


def tokens(past: PastRun, found: Found, learned: Learned | None) -> list[Token]:
    """Every token of the episode; learned: None where that was not asked for."""
    episode = found.episode
    pieces = _pieces(past.kept_model, episode.tokens)
    made = _made_of(past, found, learned)
    rows = []
    for at in range(len(episode.tokens)):
        sampled = bool(episode.loss_mask[at])
        plain = Token(position=at, token=int(episode.tokens[at]), text=pieces[at], sampled=sampled)
        if sampled:
            plain = replace(
                plain,
                version=int(episode.weight_versions[at]),
                engine_logprob=float(episode.engine_logprobs[at]),
                penalty=float(episode.penalties[at]),
                **next(made),
            )
        rows.append(plain)
    return rows


def _made_of(past: PastRun, found: Found, learned: Learned | None) -> Iterator[dict[str, Any]]:
    """The learning columns of each loss token."""
    count = int(found.episode.loss_mask.sum())
    if learned is None or learned.columns is None or learned.logprobs is None:
        reason = "" if learned is None else not_learned(past, found, learned)
        yield from ({"masked": reason} for _ in range(count))
        return
    columns, rl = learned.columns, past.config.rl
    weights = columns.weights * columns.corrections
    for n in range(count):
        ratio, clipped = _ratio(rl, columns, learned.logprobs, n)
        masked = (
            ""
            if weights[n]
            else "rl.max_logprob_error"
            if not columns.weights[n]
            else f"rl.correction={rl.correction}"
        )
        yield {
            "advantage": float(columns.advantages[n]),
            "ratio": ratio,
            "clipped": clipped,
            "weight": float(weights[n]),
            "masked": masked,
        }


def not_learned(past: PastRun, found: Found, learned: Learned) -> str:
    """Why no update had the episode."""
    config, episode, step = past.config, found.episode, found.trained_in
    if step is None:
        return {"no_signal": "no signal", "carry": "waits for a step", "unfinished": "goes on"}[
            found.fate[-1][1]
        ]
    if step not in past.metrics:
        return "the step that trains it is not made yet"
    if episode.masked:
        return f"env.on_error={config.env.on_error}"
    if not episode.loss_mask.any():
        return "nothing sampled"
    if config.rl.mask_truncated and episode.stop_reason in ("length", "tokens"):
        return "rl.mask_truncated"
    if config.rl.advantage == "gae" and step <= config.critic.warmup_steps:
        return "critic.warmup_steps"
    return "the replay stopped before" if learned.difference else "no policy loss of single tokens"


def _ratio(
    rl: RL, columns: TokenTensors, logprobs: Tensor, n: int
) -> tuple[float | None, bool | None]:
    """Of one token, by the loss itself; gspo's ratio is that of the sequence, so there the others
    stand beside it."""
    which = slice(None) if rl.loss == "gspo" else slice(n, n + 1)
    part = _part(columns, which)
    alone = replace(part, advantages=torch.full_like(part.advantages, float(columns.advantages[n])))
    _, sums = policy_loss(rl, alone, logprobs[which], torch.zeros_like(part.engine))
    size = len(part.engine)
    return (sums["ratio"] / size, sums["clip_share"] == size) if "ratio" in sums else (None, None)


def _pieces(model: str, ids: Array) -> Sequence[str]:
    tokenizer = load_tokenizer(model)
    return [str(tokenizer.decode([i], clean_up_tokenization_spaces=False)) for i in ids.tolist()]
