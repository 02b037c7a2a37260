"""The history of an episode and of each of its tokens, from the run folder.

    episodes/train_step_*.parquet  --> the weights that sampled it, how it ended, its reward,
                                       the step that trained it, or the reason for none
    plugins/audit/replay.py, observed      --> advantage, ratio, clipping and weight of each token
                                       in the last update on it

An episode is named STEP:UID:SAMPLE, the columns `step`, `uid` and `sample_index` of the journal, or
by its `key` where a step has a problem twice. It does not check the run: that is `tandem replay`.

    tandem why runs/demo --episode 12:algebra/17:3      --episode 12 lists those of step 12
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from tandem.choices import Report
from tandem.config.algorithm import RL
from tandem.model.tokenizer import load_tokenizer
from tandem.plugins.audit.replay import replay
from tandem.run_folder.diff import Divergence
from tandem.run_folder.episode_files import read_groups, read_table
from tandem.run_folder.read import PastRun
from tandem.run_folder.samples import Sample
from tandem.runtime.errors import UserError
from tandem.runtime.image_tokens import IMAGE
from tandem.trainer.batch import TokenTensors, pack_batch
from tandem.trainer.learn import policy_loss
from tandem.types import Microbatch, Outcome

# the ways to name an episode, the narrower first; a uid may be a number, or hold colons
NAMES = (
    "{step}:{uid}:{sample_index}",
    "{step}:{uid}",
    "{uid}:{sample_index}",
    "{uid}",
    "{step}",
    "{key}",
)


@dataclass(frozen=True, kw_only=True)
class Token:
    """One token. The columns of learning are None if it was not sampled, or not learned from."""

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
    masked: str = ""  # the setting by which it carries no loss


@dataclass(frozen=True, kw_only=True)
class EpisodeRef(Sample):
    """An episode in the journal, and the steps that had it."""

    # (step, outcome) of each file that has it, ascending
    history: list[tuple[int, Outcome]] = field(default_factory=list)

    @property
    def trained_in(self) -> int | None:
        """The step that learned from it."""
        return next((step for step, outcome in self.history if outcome == "train"), None)


@dataclass(kw_only=True)
class EpisodeUpdate:
    """An episode's part of the last update of a step, with an entry for each loss token."""

    columns: TokenTensors | None = None
    logprobs: Tensor | None = None
    divergence: Divergence | None = None  # of the replay from the run


def find_episodes(past: PastRun, name: str) -> list[EpisodeRef]:
    """Find the episodes that a name means, each once: in the first of NAMES that some have.

    Raises UserError if there is none.
    """
    columns = ["step", "uid", "sample_index", "key"]
    steps = {step: read_table(past.journal(step), columns).to_pylist() for step in past.journaled()}
    for form in NAMES:
        refs = {
            ref.episode.key: ref
            for step, rows in steps.items()
            if any(meant := [form.format_map(row) == name for row in rows])
            for ref, is_meant in zip(_refs_of_step(past, step), meant, strict=True)
            if is_meant
        }
        if refs:
            return list(refs.values())
    last = [ref for step in [*steps][-1:] for ref in _refs_of_step(past, step)]
    raise UserError(
        "the journal has no such episode",
        where=str(past.episodes),
        found=name or "nothing; --episode names one",
        expected="STEP:UID:SAMPLE, UID:SAMPLE, UID, STEP or KEY, e.g. "
        f"{last[0].name if last else '12:algebra/17:3'}",
        next=f"tandem why {past.folder} --episode STEP lists those of a step",
    )


def _refs_of_step(past: PastRun, step: int) -> list[EpisodeRef]:
    return [
        EpisodeRef(step=step, row=row, place=place, group=group)
        for row, group in enumerate(read_groups(past.journal(step)))
        for place in range(len(group.episodes))
    ]


def with_history(past: PastRun, ref: EpisodeRef) -> EpisodeRef:
    """Add the history of an episode: each step whose file has it, before and after this one, until
    a step trained it or left it out."""
    history = [(ref.step, ref.group.outcome)]
    before = _same_episode(past, ref, ref.step - 1)
    while before and _goes_on(before):
        history.insert(0, (before.step, before.group.outcome))
        before = _same_episode(past, ref, before.step - 1)
    here: EpisodeRef | None = ref
    while here and _goes_on(here):
        here = _same_episode(past, ref, here.step + 1)
        if here:
            history.append((here.step, here.group.outcome))
    return replace(ref, history=history)


def _goes_on(ref: EpisodeRef) -> bool:
    return ref.group.outcome in ("carry", "unfinished")


def _same_episode(past: PastRun, ref: EpisodeRef, step: int) -> EpisodeRef | None:
    """Find the episode in the file of another step; a paused one has grown in between."""
    if not past.journal(step).is_file():
        return None
    refs = _refs_of_step(past, step)
    return next((other for other in refs if other.episode.key == ref.episode.key), None)


# The last update on it
# ------------------------------------------------------------------------------


def trace_updates(past: PastRun, ref: EpisodeRef, report: Report) -> EpisodeUpdate:
    """Replay the step that trained an episode and keep its part of the last update; empty if no
    step trained it."""
    traced = EpisodeUpdate()
    step = ref.trained_in
    if step is None or step not in past.metrics:
        return traced
    trained = ref if step == ref.step else _same_episode(past, ref, step)
    assert trained is not None  # its history has it there
    groups = [
        (row, group)
        for row, group in enumerate(read_groups(past.journal(step)))
        if group.outcome == "train"
    ]
    number = [row for row, _ in groups].index(trained.row)
    places = pack_batch([group for _, group in groups], past.config).sample_index
    samples = [n for n, place in enumerate(places) if place == (number, trained.place)]
    parts: dict[int, tuple[TokenTensors, Tensor]] = {}

    def observe(batch: Microbatch, columns: TokenTensors, logprobs: Tensor) -> None:
        for sample in {*samples}.intersection(batch.samples.tolist()):
            own = columns.sequences == int((batch.samples == sample).argmax())
            parts[sample] = _part(columns, own, sample), logprobs[own]

    traced.divergence = replay(past, step, report, observe, score=False).divergence
    if found := [parts[sample] for sample in samples if sample in parts]:
        values = {
            one.name: [getattr(part, one.name) for part, _ in found] for one in fields(TokenTensors)
        }
        joined: dict[str, Any] = {
            n: None if v[0] is None else torch.cat(v) for n, v in values.items()
        }
        traced.columns = TokenTensors(**joined)
        traced.logprobs = torch.cat([logprobs for _, logprobs in found])
    return traced


def _part(columns: TokenTensors, which: Tensor | slice, sequence: int = 0) -> TokenTensors:
    """Select some of the tokens, as those of one sequence."""
    values = {one.name: getattr(columns, one.name) for one in fields(columns)}
    picked: dict[str, Any] = {
        name: None if value is None else value[which] for name, value in values.items()
    }
    own = torch.full_like(columns.sequences[which], sequence)
    return TokenTensors(**picked | {"sequences": own})


def tokens(past: PastRun, ref: EpisodeRef, update: EpisodeUpdate | None) -> list[Token]:
    """List every token of the episode; update: None to leave learning out."""
    episode = ref.episode
    tokenizer = load_tokenizer(past.kept_model)
    learned = _learned(past, ref, update)
    rows = []
    for place, token in enumerate(episode.tokens.tolist()):
        is_image, read = token >= IMAGE, tokenizer.decode
        text = "[image]" if is_image else str(read([token], clean_up_tokenization_spaces=False))
        row = Token(position=place, token=token, text=text, sampled=bool(episode.loss_mask[place]))
        if row.sampled:
            row = replace(
                row,
                version=int(episode.weight_versions[place]),
                engine_logprob=float(episode.engine_logprobs[place]),
                penalty=float(episode.penalties[place]),
                **next(learned),
            )
        rows.append(row)
    return rows


def _learned(
    past: PastRun, ref: EpisodeRef, update: EpisodeUpdate | None
) -> Iterator[dict[str, Any]]:
    """Yield the fields of learning of each loss token."""
    if update is None or update.columns is None or update.logprobs is None:
        reason = "" if update is None else why_not_learned(past, ref, update)
        yield from repeat({"masked": reason})
        return
    columns, rl = update.columns, past.config.rl
    weights = columns.weights * columns.corrections
    for n in range(len(weights)):
        masked = ""
        if not weights[n]:
            masked = f"rl.correction={rl.correction}"
            if not columns.weights[n]:
                masked = "rl.max_logprob_error"
        ratio, clipped = _ratio(rl, columns, update.logprobs, n)
        yield {
            "advantage": float(columns.advantages[n]),
            "ratio": ratio,
            "clipped": clipped,
            "weight": float(weights[n]),
            "masked": masked,
        }


def why_not_learned(past: PastRun, ref: EpisodeRef, update: EpisodeUpdate) -> str:
    """Give the reason why no update had the episode."""
    config, episode, step = past.config, ref.episode, ref.trained_in
    if step is None:
        outcome = ref.history[-1][1]
        no_signal = "rl.filter" if config.rl.filter else "no signal"
        return {"no_signal": no_signal, "carry": "waits for a step", "unfinished": "goes on"}[
            outcome
        ]
    if step not in past.metrics:
        return "the step that trains it is not made yet"
    if episode.masked:
        return f"env.on_error={config.env.on_error}"
    if not episode.loss_mask.any():
        return "nothing sampled"
    if config.rl.mask_truncated and episode.stop_reason in ("length", "tokens"):
        return "rl.mask_truncated"
    if config.rl.estimator.needs_critic and step <= config.critic.warmup_steps:
        return "critic.warmup_steps"
    return "the replay stopped before" if update.divergence else "no policy loss of single tokens"


def _ratio(
    rl: RL, columns: TokenTensors, logprobs: Tensor, n: int
) -> tuple[float | None, bool | None]:
    """Compute (ratio, clipped) of one token by the loss itself. A ratio of sequences also needs the
    other tokens; a loss of which nothing is known does not say what it clips."""
    if not rl.policy_loss.starts_at_advantage:
        return float((logprobs[n] - columns.proximal[n]).exp()), None
    own = columns.sequences == columns.sequences[n]
    which = own if rl.policy_loss.of_sequences else slice(n, n + 1)
    part = _part(columns, which)
    alone = replace(part, advantages=torch.full_like(part.advantages, float(columns.advantages[n])))
    _, sums = policy_loss(rl, alone, logprobs[which], torch.zeros_like(part.engine))
    size = len(part.engine)
    return (sums["ratio"] / size, sums["clip_share"] == size) if "ratio" in sums else (None, None)
