"""A random model in a random schedule, as the trainer packs it and as the engine pages it.

Only the arithmetic is tested, without request or scheduler; those are checked in every step of a
run.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights

from tandem.model.attention import Plan, Scoring
from tandem.model.custom_code import from_config
from tandem.model.forward import head_of
from tandem.model.load import ExactModel
from tandem.model.logprobs import as_summed, log_distribution, token_logprobs
from tandem.model.paged_attention import PAGE, Runs, page_tensors
from tandem.model.paths import named_path
from tandem.types import SamplingDistribution

VOCABULARY = 512
# Tokens of a sequence behind its prefix.
SHORT, LONG = (*range(1, 9), 20, 28, 32, 64), range(255, 261)
CHUNKS = (1, 1, 2, 7, 33, 130, 400)  # new tokens of a sequence in a pass of the engine


def random_model(model: ExactModel, seed: int, dtype: torch.dtype | None = None) -> ExactModel:
    """Make a random model of one layer of each kind in `model`, with its shapes.

    Kinds are layers with and without a window, dense ones and mixtures of experts. The vocabulary
    is small, and experts are few. Of `model` only the config is read, so it may be divided. dtype:
    of the weights that run, if they are not those that it holds.
    """
    path = named_path(model.path)
    config = path.small(model.config, model.splits)
    small = path.build(random_module(config, seed, dtype or model.dtype, model.device))
    small.split(model.splits)
    return small


def random_module(
    config: Any, seed: int, dtype: torch.dtype = torch.float32, device: Any = "cpu"
) -> Any:
    """Make transformers' module of a config with random weights."""
    config.vocab_size = VOCABULARY
    if getattr(config, "vocab_size_per_layer_input", None):  # of embeddings of each layer
        config.vocab_size_per_layer_input = VOCABULARY
    if config.pad_token_id is not None:
        config.pad_token_id = 0  # among the few tokens
    noise = torch.Generator().manual_seed(seed)
    with no_init_weights():
        options = {"dtype": dtype, "experts_implementation": "eager"}
        module = from_config(AutoModelForCausalLM, config, **options).to(device)
    module.tie_weights()
    for weight in module.parameters():
        spread = torch.randn(weight.shape, generator=noise)
        weight.data.copy_(
            1.0 + 0.1 * spread if weight.dim() <= 1 else spread / weight.shape[-1] ** 0.5
        )
    for part in module.modules():
        norm = getattr(getattr(part, "q_norm", None), "weight", None)
        if norm is not None and getattr(part, "scaling", 0.0) == 1.0:
            # trained norms hold the scale; without one rounding grows from layer to layer
            norm.data.mul_(norm.shape[-1] ** -0.5)
    return module.eval()


def random_like(model: ExactModel, noise: torch.Generator, *shape: int) -> Tensor:
    """Draw a normal tensor of the model's type on its device."""
    return torch.randn(shape, generator=noise).to(model.device, model.dtype)


@contextmanager
def threads_of(count: int) -> Iterator[None]:
    """Set torch's number of threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Cache:
    """Pages in random order for sequences of the given lengths, in every layer of a model."""

    def __init__(self, model: ExactModel, lengths: Sequence[int], random: np.random.Generator):
        self.model, self._ends = model, np.cumsum([-(-length // PAGE) for length in lengths])
        order = random.permutation(self._ends[-1])
        self.tables = [part.tolist() for part in np.split(order, self._ends[:-1])]
        zeros = partial(model.head.weight.new_zeros, requires_grad=False)
        self.keys, self.values = page_tensors(model.config, len(order), zeros)
        self.layer = min(n for n, values in enumerate(self.values) if len(values))

    def fill(self, k: Tensor, v: Tensor) -> None:
        """Have plans write keys and values [T, K, E] into the pages of every sequence, in the first
        layer that attends, `layer`."""
        q = k.new_zeros(len(k), self.model.heads[0], k.shape[2])
        for member in range(len(self.tables)):
            plan, _ = self.plan([member], np.array([0]), np.array([len(k)]))
            plan.attend(self.layer, q, k, v, Scoring(1.0))

    def plan(
        self, members: Sequence[int], starts: np.ndarray, counts: np.ndarray
    ) -> tuple[Plan, np.ndarray]:
        """Make (the engine's plan for new tokens of these sequences, their positions)."""
        runs = Runs([self.tables[member] for member in members], starts, counts)
        return self.model.paged_plan(self.keys, self.values, runs), runs.positions


class Schedule:
    """Random sequences with a common prefix, their targets and the gradients of their log-probs."""

    def __init__(self, model: ExactModel, seed: int):
        self.model, self.random = model, np.random.default_rng(seed)
        self.prefix = int(self.random.choice((*range(1, 140), *LONG)))
        self.own = self.random.permutation(SHORT)[:5].tolist()
        common = self.random.integers(0, VOCABULARY, self.prefix)
        self.sequences = [
            np.concatenate([common, self.random.integers(0, VOCABULARY, n)]) for n in self.own
        ]
        targets = self.random.integers(0, VOCABULARY, sum(self.own))
        above = self.random.standard_normal(sum(self.own), np.float32)
        self.targets, self.above = (
            torch.from_numpy(array).to(model.device) for array in (targets, above)
        )

    def packed(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the trainer's pass, the prefix once: (log-probs [N], gradients of all weights)."""
        model, prefix = self.model, self.prefix
        firsts = (prefix + np.cumsum([0, *self.own[:-1]])).tolist()
        segments = [(0, prefix, 0, 0)]
        segments += [(first, n, 0, prefix) for first, n in zip(firsts, self.own, strict=True)]
        tokens = np.concatenate(
            [self.sequences[0][:prefix], *(sequence[prefix:] for sequence in self.sequences)]
        )
        positions = np.concatenate(
            [np.arange(prefix), *(np.arange(prefix, prefix + n) for n in self.own)]
        )
        plan = model.packed_plan(np.array(segments))
        hidden = model.hidden(torch.from_numpy(tokens), torch.from_numpy(positions), plan)[prefix:]
        logprobs, _ = token_logprobs(head_of(model, hidden), self.targets, SamplingDistribution())
        logprobs.backward(self.above)  # type: ignore[no-untyped-call]
        gradients = {
            name: p.grad for name, p in model.module.named_parameters() if p.grad is not None
        }
        model.module.zero_grad(set_to_none=True)
        return logprobs.detach(), gradients

    @torch.no_grad()
    def paged(self, threads: Sequence[int]) -> Tensor:
        """Run the engine's passes over the same tokens: log-probs [N].

        Each pass draws its sequences, their order, chunk sizes and thread count.
        """
        lengths = np.array([len(sequence) for sequence in self.sequences])
        cache, done = Cache(self.model, lengths.tolist(), self.random), np.zeros_like(lengths)
        targets = self.targets.split(self.own)
        logprobs = [torch.zeros(n, device=self.model.device) for n in self.own]
        while (left := np.flatnonzero(done < lengths)).size:
            members = self.random.permutation(left)[: int(self.random.integers(1, len(left) + 1))]
            counts = np.minimum(self.random.choice(CHUNKS, len(members)), (lengths - done)[members])
            plan, positions = cache.plan(members.tolist(), done[members], counts)
            new = [
                self.sequences[m][done[m] : done[m] + n]
                for m, n in zip(members, counts, strict=True)
            ]
            with threads_of(int(self.random.choice(threads))):
                hidden = self.model.hidden(
                    torch.from_numpy(np.concatenate(new)), torch.from_numpy(positions), plan
                )
                plain = SamplingDistribution()
                table = log_distribution(as_summed(self.model.head(hidden), plain), plain)
            for member, rows, start in zip(
                members, table.split(counts.tolist()), done[members], strict=True
            ):
                part = rows[max(self.prefix - start, 0) :]  # the prefix has no targets
                first = max(int(start) - self.prefix, 0)
                own = slice(first, first + len(part))
                logprobs[member][own] = part.gather(1, targets[member][own, None])[:, 0]
            done[members] += counts
        return torch.cat(logprobs)
