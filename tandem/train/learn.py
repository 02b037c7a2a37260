"""LEARN and OPTIMIZE: groups of scored episodes -> updates of the policy, and of the critic where
there is one.

    pack -> columns (proximal, reference, values) -> advantages -> updates
            one forward pass each, where needed      rl/           rl/ losses, AdamW

With P1 the engine's log-probs are the behaviour policy's: no forward pass is made for them, and at
the first update the ratio of every fresh token is exactly 1, which is checked. Knows no environment
and no engine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from tandem.config.schema import RL, Config, Reward
from tandem.model.forward import batch_logprobs, batch_values, reference_logprobs
from tandem.model.load import ExactModel
from tandem.model.logprobs import SamplingDistribution
from tandem.rl.advantages import gdpo, group_advantages, penalize
from tandem.rl.aggregation import sequence_weights
from tandem.rl.corrections import correction, sequence_errors
from tandem.rl.kl import kl_estimate
from tandem.rl.losses import (
    Metrics,
    cispo,
    gspo,
    off_policy_mask,
    ppo_clip,
    reinforce,
    sequence_sums,
    total,
    value_clip,
)
from tandem.rl.returns import gae, returns_to_go, token_rewards, whiten
from tandem.runtime import watchdog
from tandem.runtime.errors import UserError
from tandem.train.checks import require_frozen, require_gradient
from tandem.train.learner import Learner
from tandem.train.pack import join, pack, split
from tandem.types import Array, Episode, Group, Microbatch, Row, Sample

Column = list[Array]  # one array a sample, one entry a loss token


@dataclass(frozen=True, kw_only=True)
class Models:
    """What learns, and what it is held against."""

    policy: Learner
    critic: Learner | None = None
    reference: ExactModel | None = None
    teacher: ExactModel | None = None

    @property
    def others(self) -> list[ExactModel]:
        """All but the policy."""
        critic = None if self.critic is None else self.critic.model
        return [model for model in (critic, self.reference, self.teacher) if model is not None]


@dataclass(frozen=True, kw_only=True)
class Columns:
    """What the policy loss needs of a microbatch besides the policy's own log-probs; tensors are
    [N]."""

    engine: Tensor  # float32, nats
    proximal: Tensor  # float32, nats
    advantages: Tensor  # float32
    weights: Tensor  # float32: what a token's loss weighs in the update
    corrections: Tensor  # float32: off-policy factor of the token's policy loss
    fresh: Tensor  # bool: sampled by the weights of this step
    sequences: Tensor  # int64
    reference: Tensor | None  # float32, nats


# a microbatch of an update, the policy's log-probs [N] in it
Observe = Callable[[Microbatch, Columns, Tensor], None]


@dataclass(kw_only=True)
class Step:
    """The episodes of a step that carry loss, packed for its updates, and what is known of their
    tokens so far."""

    groups: Sequence[Group]
    places: list[tuple[int, int]]  # (group, episode of it) of each sample
    updates: list[list[Microbatch]]
    engine: Column
    # the denominator of the ratio: the engine's log-probs, with a correction the recomputed ones
    proximal: Column
    # the policy's own at the start; empty where the engine's hold
    recomputed: Column = field(default_factory=list)
    reference: Column = field(default_factory=list)  # empty without a reference
    values: Column = field(default_factory=list)  # empty without a critic
    advantages: Column = field(default_factory=list)
    returns: Column = field(default_factory=list)
    corrections: Column = field(default_factory=list)
    # samples that carry no loss after all, by rl.max_logprob_error
    masked: set[int] = field(default_factory=set)

    @property
    def batches(self) -> list[Microbatch]:
        return list(chain.from_iterable(self.updates))

    def episode(self, sample: int) -> Episode:
        group, place = self.places[sample]
        return self.groups[group].episodes[place]

    def ask(self, model: Callable[[Microbatch], Tensor]) -> Column:
        """What a model says about every loss token, without gradients."""
        found = []
        with torch.no_grad():
            for batch in self.batches:
                watchdog.beat()
                found.append(model(batch).numpy())
        columns = split(self.batches, found)
        return [columns[sample] for sample in range(len(self.places))]


def learn(
    models: Models,
    groups: Sequence[Group],
    config: Config,
    how: SamplingDistribution,
    *,
    version: int,
    baseline: float = 0.0,
    exact: bool = True,
    train_policy: bool = True,
    observe: Observe | None = None,
) -> Row:
    """All updates of a step. version: of the weights now; baseline: of rl.advantage "ema"; exact:
    hold the policy to P1.

    What is not finite is named under "bad/" and never reaches a weight. Raises UserError where
    engine and policy disagree.
    """
    step = start(groups, config)
    if not step.places:
        return {"num_loss_tokens": 0.0, "skipped_updates": 1.0}
    annotate(step, models, config.rl, how)
    step.advantages, step.returns = token_advantages(step, config, baseline)
    step.advantages = penalized(step, config.env.penalty_mode)
    if bad := _not_finite(step):
        return {"num_loss_tokens": 0.0, "skipped_updates": 1.0, **bad}
    metrics = correct(step, config.rl)
    rows = []
    for number in range(config.rl.epochs * len(step.updates)):
        batches = step.updates[number % len(step.updates)]
        row: Row = {"num_loss_tokens": sum(len(batch.targets) for batch in batches)}
        if train_policy:
            row = update_policy(
                models.policy, batches, step, config, how, version, exact and number == 0, observe
            )
        if models.critic is not None:
            critic = update_critic(models.critic, batches, step, config.critic.value_clip)
            row |= {
                f"critic/{name}" if not name.startswith("bad/") else name: value
                for name, value in critic.items()
            }
        rows.append(row)
    return metrics | merge(rows)


def start(groups: Sequence[Group], config: Config) -> Step:
    """Pick the episodes that carry loss and pack them, update by update; groups stay whole."""
    places = [
        (row, column)
        for row, group in enumerate(groups)
        for column, episode in enumerate(group.episodes)
        if episode.trainable
        and not (config.rl.mask_truncated and episode.stop_reason in ("length", "tokens"))
    ]
    episodes = [groups[row].episodes[column] for row, column in places]
    samples = [
        Sample(tokens=e.tokens, loss_mask=e.loss_mask, prefix=e.num_prompt_tokens, group=row)
        for (row, _), e in zip(places, episodes, strict=True)
    ]
    per_update = -(-len(groups) // config.rl.minibatches)
    updates = []
    for first in range(0, len(groups), per_update):
        numbers = [i for i, (row, _) in enumerate(places) if first <= row < first + per_update]
        if numbers:
            packed = pack([samples[i] for i in numbers], config.train.tokens_per_microbatch)
            updates.append(
                [replace(batch, samples=np.array(numbers)[batch.samples]) for batch in packed]
            )
    engine = [e.engine_logprobs[e.loss_mask] for e in episodes]
    return Step(groups=groups, places=places, updates=updates, engine=engine, proximal=engine)


def annotate(step: Step, models: Models, rl: RL, how: SamplingDistribution) -> None:
    """One forward pass of each model whose word is needed before the first update."""
    if rl.correction != "none" or rl.max_logprob_error:
        step.recomputed = step.ask(
            lambda batch: batch_logprobs(models.policy.model, batch, how, entropy=False)[0]
        )
    if rl.correction != "none":
        step.proximal = step.recomputed
    if models.reference is not None:
        reference = models.reference
        require_frozen(reference, models.policy)
        step.reference = step.ask(lambda batch: reference_logprobs(reference, batch, how))
    if models.critic is not None:
        critic = models.critic.model
        step.values = step.ask(lambda batch: batch_values(critic, batch))


def token_advantages(step: Step, config: Config, baseline: float) -> tuple[Column, Column]:
    """(advantages, returns for the critic), float32; the returns are empty without one.

    A KL in the reward counts at its token for gae and reinforce_pp, and as the episode's sum for
    the others.
    """
    rl = config.rl
    kl = _kl_rewards(step, rl)
    rewards = np.array([group.rewards for group in step.groups])
    returns: Column = []
    match rl.advantage:
        case "gae" | "reinforce_pp":
            tokens = [
                token_rewards(rewards[at], k, rl.kl_coef)
                for at, k in zip(step.places, kl, strict=True)
            ]
            if rl.advantage == "gae":
                pairs = [
                    gae(r, v.astype(np.float64), rl.gamma, rl.gae_lambda)
                    for r, v in zip(tokens, step.values, strict=True)
                ]
                advantages, returns = (
                    [a for a, _ in pairs],
                    [r.astype(np.float32) for _, r in pairs],
                )
            else:
                advantages = [returns_to_go(r, rl.gamma) for r in tokens]
        case kind:
            for at, k in zip(step.places, kl, strict=True):
                rewards[at] -= rl.kl_coef * k.sum()
            if kind == "gdpo":
                table = gdpo(*_parts(step, config.reward))
            else:
                table = group_advantages(kind, rewards, k=rl.k, baseline=baseline)
            advantages = [
                np.full(len(e), table[at]) for at, e in zip(step.places, step.engine, strict=True)
            ]
    if rl.advantage in ("gae", "reinforce_pp", "reinforce_pp_baseline"):
        advantages = whiten(advantages)
    return [a.astype(np.float32) for a in advantages], returns


def _parts(step: Step, reward: Reward) -> tuple[Array, Array]:
    """(float64 [K, P, G], weights [K]) of each reward function by itself, and of the overlong
    penalty; 0 where one gave none."""
    weights = dict(zip(reward.names, reward.weights or [1.0] * len(reward.names), strict=True))
    if reward.overlong_penalty:
        weights["overlong"] = 1.0
    table = [
        [[e.reward_parts.get(name, 0.0) for e in group.episodes] for group in step.groups]
        for name in weights
    ]
    return np.array(table), np.array(list(weights.values()))


def penalized(step: Step, mode: Literal["lower", "set"]) -> Column:
    """The advantages after what environments found wrong with single turns."""
    episodes = map(step.episode, range(len(step.places)))
    return [
        penalize(a, e.penalties[e.loss_mask], mode)
        for a, e in zip(step.advantages, episodes, strict=True)
    ]


def _kl_rewards(step: Step, rl: RL) -> Column:
    if rl.kl_in == "loss" or not step.reference:
        return [np.zeros(len(column)) for column in step.engine]
    pairs = zip(step.proximal, step.reference, strict=True)
    return [
        kl_estimate(rl.kl_estimator, torch.from_numpy(p), torch.from_numpy(r)).numpy()
        for p, r in pairs
    ]


def _not_finite(step: Step) -> Metrics:
    """The quantities that hold a NaN or an infinity, under their names."""
    rewards = [group.rewards for group in step.groups]
    columns = {
        "reward": rewards,
        "advantage": step.advantages,
        "return": step.returns,
        "value": step.values,
        "reference_logprob": step.reference,
        "engine_logprob": step.engine,
    }
    return {
        f"bad/{name}": 1.0
        for name, parts in columns.items()
        if not all(np.isfinite(part).all() for part in parts)
    }


def correct(step: Step, rl: RL) -> Metrics:
    """Fill in the off-policy factor of every token; returns what the sequences' log-prob errors are
    like."""
    if not step.recomputed:
        step.corrections = [np.ones(len(column), np.float32) for column in step.engine]
        return {}
    errors = []
    for sample, (recomputed, engine) in enumerate(zip(step.recomputed, step.engine, strict=True)):
        policy, sampled = torch.from_numpy(recomputed), torch.from_numpy(engine)
        one = torch.zeros(len(policy), dtype=torch.int64)
        factor = correction(
            rl.correction, policy, sampled, one, low=rl.correction_floor, cap=rl.correction_cap
        )
        errors.append(float(sequence_errors(policy, sampled, one)[0]))
        step.corrections.append(factor.numpy())
        if rl.max_logprob_error and not errors[-1] <= rl.max_logprob_error:
            step.masked.add(sample)
    return {
        "logprob_error_mean": float(np.mean(errors)),
        "logprob_error_max": float(np.max(errors)),
        "masked_sequences": float(
            len(step.masked | {i for i, c in enumerate(step.corrections) if not c.any()})
        ),
        "correction": float(np.mean(np.concatenate(step.corrections))),
    }


def update_policy(
    policy: Learner,
    batches: Sequence[Microbatch],
    step: Step,
    config: Config,
    how: SamplingDistribution,
    version: int,
    exact: bool,
    observe: Observe | None = None,
) -> Row:
    """One optimizer step of the policy; with `exact`, only if it gives fresh tokens the very
    log-probs of the engine."""
    columns = policy_columns(step, batches, config, version)
    gaps = []  # between policy and engine, nats, of tokens that these very weights sampled

    def loss(index: int, batch: Microbatch) -> tuple[Tensor, Metrics]:
        expected = expected_gradient(config.rl, columns[index]) if exact else None
        logprobs, entropy = batch_logprobs(policy.model, batch, how, expected)
        gap = (logprobs.detach() - columns[index].engine)[columns[index].fresh].abs()
        gaps.append(gap)
        if observe is not None:
            observe(batch, columns[index], logprobs.detach())
        if exact and (gap > 0).any():
            raise UserError(
                "engine and policy do not agree on the tokens just sampled",
                where="log-prob gap of a first update",
                found=f"{float(gap.max()):.3g} nats",
                expected="exactly 0: one model code, one set of weights (P1)",
                next="tandem doctor; or set rl.correction=tis, and report this",
            )
        if expected is not None:
            logprobs.register_hook(
                partial(require_gradient, expected, on_policy(config.rl, columns[index]))
            )
        return policy_loss(config.rl, columns[index], logprobs, entropy)

    metrics = policy.update(batches, loss)
    compared = torch.cat(gaps).numpy()  # numpy, whose max lets a NaN show
    return {**metrics, **({"logprob_gap": float(compared.max())} if len(compared) else {})}


def token_weights(step: Step, batches: Sequence[Microbatch], config: Config) -> dict[int, Array]:
    """Weights of the loss tokens of an update, float32 [n] by sample, fixed by the whole update. A
    masked sample weighs 0 and is not counted."""
    samples = [sample for batch in batches for sample in batch.samples.tolist()]
    lengths = np.array([len(step.engine[sample]) for sample in samples])
    kept = np.array([sample not in step.masked for sample in samples])
    shares = np.zeros(len(samples))
    shares[kept] = sequence_weights(
        config.rl.aggregation, lengths[kept], config.rollout.max_new_tokens
    )
    return {i: np.full(n, w, np.float32) for i, n, w in zip(samples, lengths, shares, strict=True)}


def policy_columns(
    step: Step, batches: Sequence[Microbatch], config: Config, version: int
) -> list[Columns]:
    """The columns of one update's microbatches."""
    weights = token_weights(step, batches, config)
    fresh = [
        e.weight_versions[e.loss_mask] == version
        for e in map(step.episode, range(len(step.places)))
    ]

    def of(batch: Microbatch, column: Sequence[Array] | Mapping[int, Array]) -> Tensor:
        return torch.from_numpy(join([batch], column)[0])

    return [
        Columns(
            engine=of(batch, step.engine),
            proximal=of(batch, step.proximal),
            advantages=of(batch, step.advantages),
            weights=of(batch, weights),
            corrections=of(batch, step.corrections),
            fresh=of(batch, fresh),
            sequences=torch.from_numpy(batch.sequences),
            reference=of(batch, step.reference) if step.reference else None,
        )
        for batch in batches
    ]


def on_policy(rl: RL, columns: Columns) -> Tensor:
    """bool [N]: the tokens whose ratio is 1 at a first update: the fresh ones, and where a loss
    looks at whole sequences, those of sequences without an older token."""
    if rl.loss != "gspo" and not rl.off_policy_mask:
        return columns.fresh
    older = sequence_sums((~columns.fresh).float(), columns.sequences)
    return older.index_select(0, columns.sequences) == 0


def expected_gradient(rl: RL, columns: Columns) -> Tensor | None:
    """[N]: what the log-probs receive from `policy_loss` while every ratio is 1; None where more
    than the ratio says it."""
    if rl.entropy_coef or (columns.reference is not None and rl.kl_in == "loss"):
        return None
    return -(columns.weights * columns.corrections * columns.advantages)


def policy_loss(
    rl: RL, columns: Columns, logprobs: Tensor, entropy: Tensor
) -> tuple[Tensor, Metrics]:
    """The configured loss of a microbatch, its entropy bonus and its KL to the reference: (scalar,
    sums over tokens)."""
    proximal, advantages = columns.proximal, columns.advantages
    match rl.loss:
        case "ppo_clip":
            terms, metrics = ppo_clip(
                logprobs,
                proximal,
                advantages,
                clip_low=rl.clip_low,
                clip_high=rl.clip_high,
                dual_clip=rl.dual_clip,
            )
        case "gspo":
            terms, metrics = gspo(
                logprobs,
                proximal,
                advantages,
                columns.sequences,
                clip_low=rl.clip_low,
                clip_high=rl.clip_high,
            )
        case "cispo":
            terms, metrics = cispo(
                logprobs, proximal, advantages, clip_low=rl.clip_low, clip_high=rl.clip_high
            )
        case "reinforce":
            terms, metrics = reinforce(logprobs, advantages)
    terms = terms * columns.corrections
    if rl.off_policy_mask:
        kept = off_policy_mask(
            logprobs, columns.engine, advantages, columns.sequences, most=rl.off_policy_mask
        )
        terms, metrics["off_policy_masked"] = terms * kept, total(1 - kept)
    if rl.entropy_coef:
        terms = terms - rl.entropy_coef * entropy
    metrics["entropy"] = total(entropy)
    if columns.reference is not None:
        kl = kl_estimate(rl.kl_estimator, logprobs, columns.reference)
        metrics["reference_kl"] = total(kl)
        terms = terms + rl.kl_coef * kl if rl.kl_in == "loss" else terms
    return (terms * columns.weights).sum(), metrics


def update_critic(
    critic: Learner, batches: Sequence[Microbatch], step: Step, clip: float
) -> Metrics:
    """One optimizer step of the critic towards the returns, token mean."""
    tokens = sum(len(batch.targets) for batch in batches)
    before, returns = (
        list(map(torch.from_numpy, join(batches, column))) for column in (step.values, step.returns)
    )

    def loss(index: int, batch: Microbatch) -> tuple[Tensor, Metrics]:
        terms, metrics = value_clip(
            batch_values(critic.model, batch), before[index], returns[index], clip
        )
        return terms.sum() / tokens, metrics

    return critic.update(batches, loss)


def merge(rows: Sequence[Row]) -> Row:
    """One row of a step's updates: means over loss tokens, sums of counts. The gap is the first
    update's, before any weight has moved, and is left out where that one had no fresh token."""
    if not rows:
        return {}
    tokens = np.array([row["num_loss_tokens"] for row in rows])
    names = sorted({name for row in rows for name in row} - {"logprob_gap"})
    merged: Row = {}
    for name in names:
        values = np.array([row.get(name, 0.0) for row in rows])
        counted = name.startswith("bad/") or name.endswith(("num_loss_tokens", "skipped_updates"))
        merged[name] = float(values.sum() if counted else np.average(values, weights=tokens))
    return merged | {name: rows[0][name] for name in ("logprob_gap",) if name in rows[0]}
