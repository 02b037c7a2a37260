"""Decision processes small enough to enumerate: every sequence, its probability and its reward, all
in float64.

Objectives are exact sums over sequences and autograd gives their gradients; `estimates` gives what
the functions under test would do to the parameters, for every group of episodes there is. Nothing
here imports tandem: what is tested comes in as arrays and functions.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

END = 0  # the token that ends a sequence
WIDTH = 4  # of the two-layer policy


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Process:
    """Every sequence over `vocabulary` tokens that ends with token 0 or at the horizon; their steps
    laid out flat.

    Example: vocabulary 2, horizon 2: sequences ((0,), (1, 0), (1, 1)), prefixes ((), (1,)), owner
    [0, 1, 1, 2, 2], place [0, 0, 1, 0, 1], token [0, 1, 0, 1, 1].
    """

    vocabulary: int
    horizon: int
    sequences: tuple[tuple[int, ...], ...]
    prefixes: tuple[tuple[int, ...], ...]  # where a token is chosen
    owner: Tensor  # int64 [T]: the sequence of each step
    place: Tensor  # int64 [T]: its prefix
    token: Tensor  # int64 [T]

    @property
    def lengths(self) -> np.ndarray:
        """int64 [S]: tokens of each sequence."""
        return np.array([len(sequence) for sequence in self.sequences])

    def spread(self, values: Tensor) -> Tensor:
        """[T] -> [S]: the sum over each sequence's steps."""
        return values.new_zeros(len(self.sequences)).index_add(0, self.owner, values)


def process(vocabulary: int, horizon: int) -> Process:
    def is_whole(s: tuple[int, ...]) -> bool:
        return END not in s[:-1] and (len(s) == horizon or s[-1] == END)

    words = [
        s for n in range(1, horizon + 1) for s in itertools.product(range(vocabulary), repeat=n)
    ]
    whole = tuple(s for s in words if is_whole(s))
    prefixes = ((), *(s for s in words if END not in s and len(s) < horizon))
    steps = [(i, prefixes.index(s[:t]), s[t]) for i, s in enumerate(whole) for t in range(len(s))]
    owner, place, token = torch.tensor(steps).T
    return Process(
        vocabulary=vocabulary,
        horizon=horizon,
        sequences=whole,
        prefixes=prefixes,
        owner=owner,
        place=place,
        token=token,
    )


Policy = Callable[[Process, Tensor], Tensor]  # parameters [D] -> log-probs [prefixes, V]


def table_policy(process: Process, parameters: Tensor) -> Tensor:
    """Logits of its own for every prefix."""
    return parameters.view(len(process.prefixes), process.vocabulary).log_softmax(-1)


def two_layer_policy(process: Process, parameters: Tensor) -> Tensor:
    """tanh(embedding of the last token + embedding of the position) -> logits: prefixes share
    parameters."""
    sizes = (process.vocabulary, process.horizon, process.vocabulary)
    token, position, out = parameters.view(-1, WIDTH).split(sizes)
    # no prefix holds the end token
    last = torch.tensor([prefix[-1] if prefix else END for prefix in process.prefixes])
    where = torch.tensor([len(prefix) for prefix in process.prefixes])
    return ((token[last] + position[where]).tanh() @ out.T).log_softmax(-1)


def num_parameters(process: Process, policy: Policy) -> int:
    tables = len(process.prefixes) * process.vocabulary
    return tables if policy is table_policy else (2 * process.vocabulary + process.horizon) * WIDTH


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class World:
    """A process, a policy with its parameters float64 [D], and the reward float64 [S] of every
    sequence."""

    process: Process
    policy: Policy
    parameters: Tensor
    rewards: Tensor

    def table(self, parameters: Tensor | None = None) -> Tensor:
        """Log-probs [prefixes, V]."""
        return self.policy(self.process, self.parameters if parameters is None else parameters)

    def logprobs(self, parameters: Tensor | None = None) -> Tensor:
        """[T]: of every step."""
        return self.steps(self.table(parameters))

    def steps(self, table: Tensor) -> Tensor:
        """[prefixes, V] -> [T]: what a table says of every step."""
        return table[self.process.place, self.process.token]

    def chances(self, parameters: Tensor | None = None) -> Tensor:
        """[S]: the probability of every sequence."""
        return self.process.spread(self.logprobs(parameters)).exp()

    def gradient(self, objective: Callable[[Tensor], Tensor]) -> Tensor:
        """[D]: of an objective of the parameters, at the world's own."""
        leaf = self.parameters.clone().requires_grad_()
        return torch.autograd.grad(objective(leaf), leaf)[0]


@cache
def jacobian(world: World) -> Tensor:
    """[T, D]: the gradient of every step's log-prob."""
    return torch.autograd.functional.jacobian(world.logprobs, world.parameters, vectorize=True)


def world(process: Process, policy: Policy, *, binary: bool, seed: int) -> World:
    """Normal parameters; rewards 0 or 1 (at least one of each), or normal around 1/2."""
    rng = np.random.default_rng(seed)
    count = len(process.sequences)
    rewards = (
        rng.permutation(np.arange(count) < 0.4 * count) if binary else rng.normal(0.5, 1.0, count)
    )
    return World(
        process=process,
        policy=policy,
        parameters=parameters(process, policy, seed=seed + 1000),
        rewards=torch.from_numpy(rewards.astype(np.float64)),
    )


def parameters(process: Process, policy: Policy, *, seed: int) -> Tensor:
    return torch.from_numpy(
        np.random.default_rng(seed).normal(0, 0.8, num_parameters(process, policy))
    )


# Objectives: functions of the parameters, to be differentiated by `World.gradient`.


def mean_of(world: World, values: Tensor) -> Callable[[Tensor], Tensor]:
    """E[value of the sequence], values [S]."""
    return lambda p: (world.chances(p) * values).sum()


def expected_reward(world: World) -> Callable[[Tensor], Tensor]:
    return mean_of(world, world.rewards)


def best_of(world: World, k: int) -> Callable[[Tensor], Tensor]:
    """E[largest reward of k episodes] = sum over the values v of the reward of v (F(v)^k -
    F(v-)^k), F their CDF."""
    values, index = world.rewards.unique(return_inverse=True)

    def objective(p: Tensor) -> Tensor:
        cdf = p.new_zeros(len(values)).index_add(0, index, world.chances(p)).cumsum(0)
        return (values * (cdf**k).diff(prepend=cdf.new_zeros(1))).sum()

    return objective


def reverse_kl(world: World, other: Tensor) -> Callable[[Tensor], Tensor]:
    """KL(policy || other) of whole sequences; other: log-probs [prefixes, V]."""
    theirs = world.process.spread(world.steps(other))
    return lambda p: (world.chances(p) * (world.chances(p).log() - theirs)).sum()


def own_terms(world: World, term: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Sum over prefixes of (how often the policy comes there, held fixed) x term; term: table ->
    [prefixes]."""
    return lambda p: (visits(world, p).detach() * term(world.table(p))).sum()


def own_reverse_kl(world: World, other: Tensor) -> Callable[[Tensor], Tensor]:
    """sum_t KL(policy || other) at the policy's prefixes: each token answers for its own term
    only."""
    return own_terms(world, lambda ours: (ours.exp() * (ours - other)).sum(-1))


def own_forward_kl(world: World, other: Tensor) -> Callable[[Tensor], Tensor]:
    """sum_t KL(other || policy) at the policy's prefixes."""
    return own_terms(world, lambda ours: (other.exp() * (other - ours)).sum(-1))


def visits(world: World, parameters: Tensor | None = None) -> Tensor:
    """[prefixes]: the probability that an episode comes there."""
    chances = world.chances(parameters)[world.process.owner]
    return chances.new_zeros(len(world.process.prefixes)).index_add(0, world.process.place, chances)


def state_values(world: World, scores: Tensor) -> Tensor:
    """[prefixes]: the mean of scores [T] (e.g. what is still to come) over the episodes that come
    to each prefix."""
    weighted = world.chances()[world.process.owner] * scores
    return weighted.new_zeros(len(world.process.prefixes)).index_add(
        0, world.process.place, weighted
    ) / visits(world)


def action_values(world: World, parameters: Tensor) -> Tensor:
    """[prefixes, V]: the expected reward after each choice, for episodes of other parameters."""
    at = (world.process.place, world.process.token)
    chances = world.chances(parameters)[world.process.owner]
    zeros = chances.new_zeros(len(world.process.prefixes), world.process.vocabulary)
    seen = zeros.index_put(at, chances, accumulate=True)
    return zeros.index_put(at, chances * world.rewards[world.process.owner], accumulate=True) / seen


# Episodes: updates of G of them, all there are.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Batch:
    """M updates of G episodes each, laid out flat as tandem.rl wants it."""

    picks: Tensor  # int64 [M, G]: the sequence of each episode
    rows: Tensor  # int64 [N]: the step of the process of each token
    episodes: Tensor  # int64 [N]: 0 .. M G - 1
    updates: Tensor  # int64 [N]: 0 .. M - 1
    lengths: np.ndarray  # int64 [M, G]

    def per_token(self, table: np.ndarray | Tensor) -> Tensor:
        """[M, G] -> [N]."""
        return torch.as_tensor(table, dtype=torch.float64).reshape(-1)[self.episodes]


def all_groups(world: World, size: int) -> Batch:
    """Every group of that size, in every order."""
    indices = [torch.arange(len(world.process.sequences))] * size
    return lay_out(world, torch.cartesian_prod(*indices).view(-1, size))


def lay_out(world: World, picks: Tensor) -> Batch:
    lengths = world.process.lengths
    first = lengths.cumsum() - lengths
    flat = picks.numpy().reshape(-1)
    episodes = np.arange(len(flat)).repeat(lengths[flat])
    starts = (lengths[flat].cumsum() - lengths[flat])[episodes]
    rows = first[flat][episodes] + np.arange(len(episodes)) - starts
    return Batch(
        picks=picks,
        rows=torch.from_numpy(rows),
        episodes=torch.from_numpy(episodes),
        updates=torch.from_numpy(episodes // picks.shape[1]),
        lengths=lengths[flat].reshape(picks.shape),
    )


def estimates(
    world: World, batch: Batch, losses: Callable[[Tensor], Tensor], weights: Tensor
) -> Tensor:
    """[M, D]: minus the gradient of each update's sum of weight x loss, i.e. where it moves the
    parameters.

    losses: log-probs [N] -> losses [N]; the rest of the way, log-probs -> parameters, is the exact
    Jacobian.
    """
    leaf = world.logprobs()[batch.rows].requires_grad_()
    [slope] = torch.autograd.grad((weights * losses(leaf)).sum(), leaf)
    steps = len(world.process.token)
    slopes = slope.new_zeros(len(batch.picks) * steps).index_add(
        0, batch.updates * steps + batch.rows, -slope
    )
    return slopes.view(-1, steps) @ jacobian(world)


def expectation(
    world: World, batch: Batch, values: Tensor, behaviour: Tensor | None = None
) -> Tensor:
    """[D]: the mean of values [M, D] over all groups, of episodes sampled with the behaviour's
    parameters."""
    return world.chances(behaviour)[batch.picks].prod(1) @ values
