"""The parts of a training step: advantages, off-policy weights, the loss, and updates of policy and
critic. `learn_step` in step.py puts them together.

With P1 the engine's log-probs are the behaviour policy's: no forward pass is made for them, and at
the first update the ratio of every fresh token is exactly 1, which is checked. Knows no environment
and no engine.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from tandem.config.algorithm import RL
from tandem.config.episodes import Reward
from tandem.config.schema import Config
from tandem.model.expert_choices import replayed_experts
from tandem.model.forward import batch_logprobs, batch_values
from tandem.rl.advantages import penalize, sampled_lengths
from tandem.rl.losses import Metrics, kl_estimate, off_policy_mask, sequence_sums, total, value_clip
from tandem.rl.returns import token_rewards, whiten
from tandem.runtime.errors import UserError
from tandem.trainer.batch import (
    Models,
    Place,
    TokenArrays,
    TokenTensors,
    TrainBatch,
    plan_share,
    token_tensors,
    token_weights,
)
from tandem.trainer.checks import require_gradient, require_own_experts
from tandem.trainer.learner import Learner
from tandem.trainer.pack import join
from tandem.types import Array, Episode, Group, Microbatch, ParityCheck, Row, SamplingParams

# Called with each microbatch of an update and the policy's log-probs [N] in it.
Observe = Callable[[Microbatch, TokenTensors, Tensor], None]

SKIPPED = {"num_loss_tokens": 0.0, "skipped_updates": 1.0}  # metrics of a step without an update


@dataclass(frozen=True, kw_only=True)
class LearnStage:
    """Inputs of training on collected groups; `tandem replay` builds it without an engine."""

    config: Config
    models: Models
    sampling: SamplingParams  # of training rollouts
    parity: ParityCheck

    def plan_share(self, groups: Sequence[Group]) -> set[Place]:
        """Return `batch.plan_share` of these models."""
        return plan_share(groups, self.config, self.models)


def token_advantages(
    batch: TrainBatch, config: Config, baseline: float
) -> tuple[TokenArrays, TokenArrays]:
    """Return (advantages, returns for the critic), float32; the returns are empty without one.

    A KL in the reward counts at its token for advantages of single tokens, and as the episode's
    sum for the others. Samples of one episode follow each other, and share its reward. Penalties of
    single turns come last.
    """
    rl, kl, estimator = config.rl, _kl_rewards(batch, config.rl), config.rl.estimator
    rewards = np.array([group.rewards for group in batch.groups])
    if estimator.by_token:
        values, found = batch.values or [np.empty(0, np.float32)] * len(kl), []
        for at, members in groupby(range(len(kl)), key=batch.sample_index.__getitem__):
            of = list(members)
            own_kl = np.concatenate([kl[i] for i in of])
            whole = estimator.bind(
                rewards=token_rewards(rewards[at], own_kl, rl.kl_coef),
                values=np.concatenate([values[i] for i in of]).astype(np.float64),
                gamma=rl.gamma,
                lam=rl.gae_lambda,
            )()
            ends = np.cumsum([len(kl[i]) for i in of])[:-1]
            found += np.split(np.array(whole), ends, axis=-1)
    else:
        for at, k in zip(batch.sample_index, kl, strict=True):
            rewards[at] -= rl.kl_coef * k.sum()
        parts, weights = _reward_parts(batch, config.reward)
        table = estimator.bind(
            rewards=rewards,
            lengths=sampled_lengths(batch.groups),
            k=rl.k,
            baseline=baseline,
            parts=parts,
            weights=weights,
        )()
        found = [
            np.full(len(e), table[at])
            for at, e in zip(batch.sample_index, batch.engine, strict=True)
        ]
    advantages, returns = found, list[Array]()
    if estimator.needs_critic:
        advantages, returns = [a for a, _ in found], [r.astype(np.float32) for _, r in found]
    if estimator.whitens:
        advantages = whiten(advantages)
    advantages = [
        penalize(a.astype(np.float32), e.penalties[e.loss_mask], config.env.penalty_mode)
        for a, e in zip(advantages, batch.episodes, strict=True)
    ]
    return advantages, returns


def _kl_rewards(batch: TrainBatch, rl: RL) -> TokenArrays:
    """Return the part of the reward that is KL, nats a token; zeros without one."""
    if rl.kl_in == "loss" or not batch.reference:
        return [np.zeros(len(logprobs)) for logprobs in batch.engine]
    return [
        kl_estimate(rl.kl_estimator, torch.from_numpy(p), torch.from_numpy(r)).numpy()
        for p, r in zip(batch.proximal, batch.reference, strict=True)
    ]


def _reward_parts(batch: TrainBatch, reward: Reward) -> tuple[Array, Array]:
    """Return (float64 [K, P, G], weights [K]) of each reward function by itself, and of the
    overlong penalty; NaN if a function does not apply, 0 if no reward could be found."""
    weights = dict(zip(reward.names, reward.weights or [1.0] * len(reward.names), strict=True))
    if reward.overlong_penalty:
        weights["overlong"] = 1.0

    def part(name: str, e: Episode) -> float:
        absent = 0.0 if name == "overlong" or e.env_error or e.reward_error else math.nan
        return e.reward_parts.get(name, absent)

    table = [[[part(n, e) for e in group.episodes] for group in batch.groups] for n in weights]
    return np.array(table), np.array(list(weights.values()))


def off_policy_weights(batch: TrainBatch, rl: RL) -> Metrics:
    """Fill in the off-policy factor of every token; return metrics of the sequences' log-prob
    errors."""
    if not batch.recomputed:
        batch.corrections = [np.ones(len(logprobs), np.float32) for logprobs in batch.engine]
        return {}
    from tandem.rl.corrections import correction, sequence_errors

    errors = []
    for sample, (recomputed, engine) in enumerate(zip(batch.recomputed, batch.engine, strict=True)):
        policy, sampled = torch.from_numpy(recomputed), torch.from_numpy(engine)
        one = torch.zeros(len(policy), dtype=torch.int64)  # all of one sequence
        factor = correction(
            rl.correction, policy, sampled, one, low=rl.correction_floor, cap=rl.correction_cap
        )
        errors.append(float(sequence_errors(policy, sampled, one)[0]))
        batch.corrections.append(factor.numpy())
        if rl.max_logprob_error and not errors[-1] <= rl.max_logprob_error:
            batch.masked.add(sample)
    zeroed = {i for i, factor in enumerate(batch.corrections) if not factor.any()}
    return {
        "logprob_error_mean": float(np.mean(errors)),
        "logprob_error_max": float(np.max(errors)),
        "masked_sequences": float(len(batch.masked | zeroed)),
        "correction": float(np.mean(np.concatenate(batch.corrections))),
    }


def update_policy(
    stage: LearnStage,
    batch: TrainBatch,
    minibatch: Sequence[Microbatch],
    version: int,
    *,
    first: bool,
    observe: Observe | None = None,
) -> Row:
    """Make one optimizer step of the policy. version: of the weights before the step's updates;
    first: the step's first update.

    In the first update of an exact stage fresh tokens must have the very log-probs of the engine,
    and the experts that it chose, if they came with the tokens; their gradient must be advantage
    times weight. Otherwise it raises and changes no weight.
    """
    rl, policy, exact = stage.config.rl, stage.models.policy, stage.parity.exact and first
    weights, gaps = token_weights(batch, minibatch, stage.config), []
    always = policy.ranks.lockstep or bool(policy.model.gap)  # its vision tower may not run

    def loss(microbatch: Microbatch) -> tuple[Tensor, Metrics]:
        tokens = token_tensors(batch, microbatch, weights, version)
        gradient = None if policy.ranks.idle else expected_gradient(rl, tokens)
        # the first microbatch is always passed back: it gives each weight a gradient, if only of 0
        needed = gradient is None or bool(gradient.any()) or always or microbatch is minibatch[0]
        expected = gradient if exact and needed else None
        choices = replayed_experts(microbatch, policy.model.device)
        logprobs, entropy = batch_logprobs(
            policy.model, microbatch, stage.sampling, expected, choices=choices
        )
        replayed: Metrics = {}
        if choices is not None:
            changed = choices.changed(microbatch.rows)
            if exact:
                require_own_experts(changed[tokens.fresh])
            replayed["router/replay_changed"] = total(changed)
        gap = (logprobs.detach() - tokens.engine)[tokens.fresh].abs()
        gaps.append(gap.numpy())
        if observe is not None:
            observe(microbatch, tokens, logprobs.detach())
        if exact and (gap > 0).any():
            raise UserError(
                "engine and policy do not agree on the tokens just sampled",
                where="log-prob gap of a first update",
                found=f"{float(gap.max()):.3g} nats",
                expected="exactly 0: one model code, one set of weights (P1)",
                next="tandem doctor; or set rl.correction=tis, and report this",
            )
        if expected is not None:
            logprobs.register_hook(partial(require_gradient, expected, on_policy(rl, tokens)))
        value, metrics = policy_loss(rl, tokens, logprobs, entropy)
        return value if needed else value.detach().requires_grad_(), {**metrics, **replayed}

    metrics = policy.update(minibatch, loss)
    # numpy, whose max lets a NaN show
    compared = np.concatenate([gap for part in policy.ranks.gather(gaps) for gap in part])
    return {**metrics, **({"logprob_gap": float(compared.max())} if len(compared) else {})}


def on_policy(rl: RL, tokens: TokenTensors) -> Tensor:
    """Return bool [N]: tokens whose ratio is 1 at a first update. Those are the fresh ones; if the
    loss looks at whole sequences, those of sequences without an older token."""
    if not rl.policy_loss.of_sequences and not rl.off_policy_mask:
        return tokens.fresh
    older = sequence_sums((~tokens.fresh).float(), tokens.sequences)
    return older.index_select(0, tokens.sequences) == 0


def expected_gradient(rl: RL, tokens: TokenTensors) -> Tensor | None:
    """Return float32 [N]: the gradient of the log-probs while every ratio is 1; None if it is not
    known of the loss, or there are terms beside it (an entropy bonus, a KL in the loss)."""
    has_kl = tokens.reference is not None and rl.kl_in == "loss"
    if rl.entropy_coef or has_kl or not rl.policy_loss.starts_at_advantage:
        return None
    return -(tokens.weights * tokens.corrections * tokens.advantages)


def policy_loss(
    rl: RL, tokens: TokenTensors, logprobs: Tensor, entropy: Tensor
) -> tuple[Tensor, Metrics]:
    """Return the configured loss of a microbatch (scalar), with entropy bonus and KL to the
    reference, and its metrics as sums over tokens."""
    terms, metrics = rl.policy_loss.bind(
        policy_logprobs=logprobs,
        proximal_logprobs=tokens.proximal,
        engine_logprobs=tokens.engine,
        reference_logprobs=tokens.reference,
        entropy=entropy,
        advantages=tokens.advantages,
        sequences=tokens.sequences,
        clip_low=rl.clip_low,
        clip_high=rl.clip_high,
        dual_clip=rl.dual_clip,
    )()
    terms = terms * tokens.corrections
    if rl.off_policy_mask:
        kept = off_policy_mask(
            logprobs, tokens.engine, tokens.advantages, tokens.sequences, most=rl.off_policy_mask
        )
        terms, metrics["off_policy_masked"] = terms * kept, total(1 - kept)
    if rl.entropy_coef:
        terms = terms - rl.entropy_coef * entropy
    metrics["entropy"] = total(entropy)
    if tokens.reference is not None:
        kl = kl_estimate(rl.kl_estimator, logprobs, tokens.reference)
        metrics["reference_kl"] = total(kl)
        terms = terms + rl.kl_coef * kl if rl.kl_in == "loss" else terms
    return (terms * tokens.weights).sum(), metrics


def update_critic(
    critic: Learner, batch: TrainBatch, minibatch: Sequence[Microbatch], clip: float
) -> Metrics:
    """Make one optimizer step of the critic towards the returns, token mean; clip: of the change of
    a value (PPO2)."""
    num_tokens = sum(len(microbatch.targets) for microbatch in minibatch)

    def loss(microbatch: Microbatch) -> tuple[Tensor, Metrics]:
        old, targets = (
            torch.from_numpy(join([microbatch], arrays)[0])
            for arrays in (batch.values, batch.returns)
        )
        terms, metrics = value_clip(batch_values(critic.model, microbatch), old, targets, clip)
        return terms.sum() / num_tokens, metrics

    return critic.update(minibatch, loss)


def reduce_metrics(rows: Sequence[Row]) -> Row:
    """Reduce the rows of a step's updates to one: means over loss tokens, sums of counts. The
    log-prob gap is the first update's, before any weight has moved."""
    if not rows:
        return {}
    num_tokens = np.array([row["num_loss_tokens"] for row in rows])
    names = sorted({name for row in rows for name in row} - {"logprob_gap"})
    reduced: Row = {}
    for name in names:
        values = np.array([row.get(name, 0.0) for row in rows])
        counted = name.startswith("bad/") or name.endswith(("num_loss_tokens", "skipped_updates"))
        reduced[name] = float(values.sum() if counted else np.average(values, weights=num_tokens))
    return reduced | {name: rows[0][name] for name in ("logprob_gap",) if name in rows[0]}
