"""The episodes of a step as a batch to train on: packed into microbatches, with the models' values
of their tokens.

A value per loss token is kept as `TokenArrays`, one array a sample; `token_tensors` makes the
tensors of a microbatch of it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tandem.config.algorithm import RL
from tandem.config.schema import Config
from tandem.model.expert_choices import replayed_experts
from tandem.model.forward import batch_logprobs, batch_values, reference_logprobs
from tandem.rl.filters import has_signal
from tandem.rl.losses import Metrics, sequence_weights
from tandem.trainer.checks import require_experts, require_frozen
from tandem.trainer.learner import Learner
from tandem.trainer.pack import join, pack, split
from tandem.trainer.ranks import ALONE, Compute, Ranks
from tandem.types import Array, Episode, Group, Microbatch, Row, Sample, SamplingDistribution

if TYPE_CHECKING:
    from tandem.model.load import ExactModel


TokenArrays = list[Array]  # one array a sample, one entry a loss token
Place = tuple[int, int]  # (group of a step, episode of the group)


@dataclass(frozen=True, kw_only=True)
class Models:
    """The models that learn, and those that they are compared with."""

    policy: Learner
    critic: Learner | None = None
    reference: "ExactModel | None" = None
    teacher: "ExactModel | None" = None
    # of a command that learns otherwise: (LearnStage, groups, step, observe) -> metrics
    own_update: Callable[..., Row] | None = None

    @property
    def learners(self) -> dict[str, Learner]:
        """The models that learn, by their names in checkpoints."""
        critic = {} if self.critic is None else {"critic": self.critic}
        return {"policy": self.policy, **critic}

    @property
    def others(self) -> "list[ExactModel]":
        """All but the policy."""
        critic = None if self.critic is None else self.critic.model
        return [model for model in (critic, self.reference, self.teacher) if model is not None]


@dataclass(frozen=True, kw_only=True)
class TokenTensors:
    """Inputs of the policy loss of a microbatch besides the policy's own log-probs, each [N]."""

    engine: Tensor  # float32, nats
    proximal: Tensor  # float32, nats
    advantages: Tensor  # float32
    weights: Tensor  # float32, weight of the token's loss in the update
    corrections: Tensor  # float32, off-policy factor of the token's policy loss
    fresh: Tensor  # bool, sampled by the weights of this step
    sequences: Tensor  # int64
    reference: Tensor | None  # float32, nats


@dataclass(kw_only=True)
class TrainBatch:
    """The episodes of a step that carry loss, packed for its updates."""

    groups: Sequence[Group]
    sample_index: list[tuple[int, int]]  # (group, episode of it) of each sample
    episodes: list[Episode]  # of each sample: Episode.sequences
    minibatches: list[list[Microbatch]]  # one of them an update
    engine: TokenArrays  # log-probs, nats
    # the denominator of the ratio: the engine's log-probs, with a correction the recomputed ones
    proximal: TokenArrays
    recomputed: TokenArrays = field(default_factory=list)  # the policy's own, if they are needed
    reference: TokenArrays = field(default_factory=list)  # empty without a reference
    values: TokenArrays = field(default_factory=list)  # empty without a critic
    advantages: TokenArrays = field(default_factory=list)
    returns: TokenArrays = field(default_factory=list)  # empty without a critic
    corrections: TokenArrays = field(default_factory=list)
    masked: set[int] = field(default_factory=set)  # samples without loss, by rl.max_logprob_error
    ranks: Ranks = ALONE  # the processes that train it

    def forward_all(self, model: "ExactModel", compute: Compute) -> TokenArrays:
        """Return the value that `compute` gives each loss token by the model, without gradients."""
        microbatches = list(chain.from_iterable(self.minibatches))
        by_sample = split(microbatches, self.ranks.forward(model, microbatches, compute))
        return [by_sample[sample] for sample in range(len(self.sample_index))]


def pack_batch(
    groups: Sequence[Group], config: Config, ranks: Ranks = ALONE, *, learns_rewards: bool = True
) -> TrainBatch:
    """Pick the episodes that carry loss and pack them for `ranks`, minibatch by minibatch; groups
    stay whole. Where the loss is the advantage alone, groups of equal rewards come last, in
    microbatches of their own, which need no backward pass."""
    trained = [
        ((row, number), sequence)
        for row, group in enumerate(groups)
        for number, episode in enumerate(group.episodes)
        if episode.trainable
        and not (config.rl.mask_truncated and episode.stop_reason in ("length", "tokens"))
        for sequence in episode.sequences
    ]
    sample_index, episodes = [at for at, _ in trained], [sequence for _, sequence in trained]
    shared: dict[int, int] = {}  # tokens that all sequences of a group begin with
    for (row, _), e in trained:
        shared[row] = min(shared.get(row, e.num_prompt_tokens), e.num_prompt_tokens)
    samples = [
        Sample(
            tokens=e.tokens,
            loss_mask=e.loss_mask,
            prefix=shared[row],
            group=row,
            **({"experts": require_experts(e)} if config.rl.router_replay else {}),
        )
        for (row, _), e in trained
    ]
    rl = config.rl
    still = rl.estimator.equal_is_zero and rl.policy_loss.starts_at_advantage
    apart = bool(still and learns_rewards) and not (rl.entropy_coef or rl.kl_coef)
    flat = [apart and ranks.shares == 1 and not has_signal(group.rewards) for group in groups]
    size = -(-len(groups) // rl.minibatches)
    part = [(row // size, flat[row]) for row, _ in sample_index].__getitem__
    minibatches: list[list[Microbatch]] = [[] for _ in range(rl.minibatches)]
    for (number, _), found in groupby(sorted(range(len(samples)), key=part), part):
        members, budget = np.array([*found]), config.train.tokens_per_microbatch
        packed = pack([samples[i] for i in members], budget, shares=ranks.shares)
        minibatches[number] += [replace(b, samples=members[b.samples]) for b in packed]
    engine = [e.engine_logprobs[e.loss_mask] for e in episodes]
    return TrainBatch(
        groups=groups,
        sample_index=sample_index,
        episodes=episodes,
        minibatches=[minibatch for minibatch in minibatches if minibatch],
        engine=engine,
        proximal=engine,
        ranks=ranks,
    )


def plan_share(groups: Sequence[Group], config: Config, models: Models) -> set[Place]:
    """Return which episodes this process needs: those that it trains, or all, if quantities of the
    whole step are made of them (off-policy weights, a KL in the reward, a teacher's divergences).

    It plans by lengths and rewards, as `pack_batch` does, and reads no array.
    """
    policy, rl = models.policy, config.rl
    trained = [row for row, group in enumerate(groups) if group.outcome == "train"]
    batch = pack_batch([groups[row] for row in trained], config, policy.ranks)
    places = [(trained[row], number) for row, number in batch.sample_index]
    if (
        rl.correction != "none"
        or rl.max_logprob_error
        or (models.reference is not None and rl.kl_in == "reward")
        or models.teacher is not None
    ):
        return set(places)
    # a pass of all microbatches may divide them in another way than those of single updates
    passes = [list(chain(*batch.minibatches)), *batch.minibatches] if places else []
    return {
        places[sample]
        for microbatches in passes
        for microbatch in policy.ranks.own(microbatches)
        for sample in microbatch.samples.tolist()
    }


def compute_logprobs(
    batch: TrainBatch, models: Models, rl: RL, sampling: SamplingDistribution
) -> None:
    """Run the models before the first update: the policy, if a correction or a model that is not
    exact asks for recomputed log-probs, the reference, and the critic for its values."""
    policy = models.policy.model
    if rl.correction != "none" or rl.max_logprob_error or policy.gap:

        def recompute(b: Microbatch) -> Tensor:
            choices = replayed_experts(b, policy.device)
            return batch_logprobs(policy, b, sampling, entropy=False, choices=choices)[0]

        batch.recomputed = batch.forward_all(policy, recompute)
    if rl.correction != "none":
        batch.proximal = batch.recomputed
    if (reference := models.reference) is not None:
        require_frozen(reference, models.policy)
        with reference.adapter_off():  # also in processes that do not run the lambda
            batch.reference = batch.forward_all(
                reference, lambda b: reference_logprobs(reference, b, sampling)
            )
    if models.critic is not None:
        critic = models.critic.model
        batch.values = batch.forward_all(critic, lambda b: batch_values(critic, b))


def not_finite(batch: TrainBatch) -> Metrics:
    """Return a "bad/NAME" for each quantity that holds a NaN or an infinity."""
    quantities = {
        "reward": [group.rewards for group in batch.groups],
        "advantage": batch.advantages,
        "return": batch.returns,
        "value": batch.values,
        "reference_logprob": batch.reference,
        "engine_logprob": batch.engine,
    }
    return {
        f"bad/{name}": 1.0
        for name, arrays in quantities.items()
        if not all(np.isfinite(array).all() for array in arrays)
    }


def token_weights(
    batch: TrainBatch, minibatch: Sequence[Microbatch], config: Config
) -> dict[int, Array]:
    """Return the weights of a minibatch's loss tokens, float32 [n] by sample.

    They depend on the whole minibatch, not on its microbatches. The samples of an episode count as
    one sequence. A masked sample weighs 0 and is not counted.
    """
    samples = [sample for b in minibatch for sample in b.samples.tolist()]
    lengths: dict[Place, int] = {}
    for sample in samples:
        if sample not in batch.masked:
            at = batch.sample_index[sample]
            lengths[at] = lengths.get(at, 0) + len(batch.engine[sample])
    sizes, most = np.array([*lengths.values()], np.int64), config.rollout.max_new_tokens
    weights = dict(zip(lengths, sequence_weights(config.rl.aggregation, sizes, most), strict=True))
    own = {i: 0.0 if i in batch.masked else weights[batch.sample_index[i]] for i in samples}
    return {i: np.full(len(batch.engine[i]), weight, np.float32) for i, weight in own.items()}


def token_tensors(
    batch: TrainBatch, microbatch: Microbatch, weights: Mapping[int, Array], version: int
) -> TokenTensors:
    """Return the tensors of a microbatch. weights: of the loss tokens, by sample; version: of the
    weights that train."""
    fresh = [e.weight_versions[e.loss_mask] == version for e in batch.episodes]

    def tensor(arrays: Sequence[Array] | Mapping[int, Array]) -> Tensor:
        return torch.from_numpy(join([microbatch], arrays)[0])

    return TokenTensors(
        engine=tensor(batch.engine),
        proximal=tensor(batch.proximal),
        advantages=tensor(batch.advantages),
        weights=tensor(weights),
        corrections=tensor(batch.corrections),
        fresh=tensor(fresh),
        sequences=torch.from_numpy(microbatch.sequences),
        reference=tensor(batch.reference) if batch.reference else None,
    )
