"""Contract D7: exactness is tried on the machine at hand, at the model's own shapes, before it is relied on.

Two questions. *Parity*: has a token the same bits in the trainer's packed pass and in the engine's prefill and decode?
*Threads*: have forward and backward pass the same bits with one thread and with several? Tried are every linear, SwiGLU,
log-softmax and the attention of the model, at row counts that take different kernels somewhere, and a random model of
the same shapes in a random schedule (trial.py). Each finding names itself. Under a second for 135M parameters on two cores.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem import numerics
from tandem.model.attention import Plan
from tandem.model.layers import ExactLayer
from tandem.model.linear import ExactLinear, padded_rows, swiglu
from tandem.model.load import ExactModel
from tandem.model.logprobs import Filter, log_distribution
from tandem.model.trial import LONG, SHORT, Cache, Schedule, random_model, threads_of

ROWS = (*SHORT, *LONG)  # counts at which kernels were seen to change, and those about a block of queries
PACKED_ROWS = 640  # of a packed pass
HEAD_ROWS = (4, 32, 64)  # of the output projection, where each row costs as much as a layer
GRADIENT_ROWS = 37, 330  # of gradients: of the output projection's, a sum over the vocabulary, and of the others'
LENGTH = 400  # past three key blocks, with a partial fourth


@dataclass(frozen=True, slots=True, kw_only=True)
class Exactness:
    """What is not exact here, by name. Example: Exactness(parity=["attention, decode: 1 3"], threads=[])"""

    parity: list[str]  # between engine and trainer; empty: they agree to the last bit
    threads: list[str]  # between one thread and several; empty: the thread count changes no bit


def probe(model: ExactModel, seed: int = 0) -> Exactness:
    """Try the operators of the model, and a random model of its shapes in the random schedule of that seed."""
    noise, threads, unfit = (
        torch.Generator().manual_seed(seed),
        torch.get_num_threads(),
        numerics.why_not_reproducible(),
    )
    small = random_model(model.config, seed)
    schedule, parity, several = Schedule(small, seed), list(unfit), max(2, threads)
    with torch.no_grad():
        parity += _linears_differ(model, noise) + _rows_differ(model, noise) + _attention_differs(small, noise)
    passes = []
    for count in (several, 1):
        with threads_of(count):
            passes.append(schedule.packed())
    (logprobs, gradients), (of_one, gradients_of_one) = passes
    if not torch.equal(schedule.paged((1, several)), logprobs):
        parity.append("a random model in a random schedule")
    other = _gradients_differ(model, noise, several)
    other += ["log-probs of a random model"] * (not torch.equal(logprobs, of_one))
    other += [f"gradient of {name}" for name, g in gradients.items() if not torch.equal(g, gradients_of_one[name])]
    return Exactness(parity=parity, threads=unfit + other)


# The operators ------------------------------------------------------------------------------------------------------


def _linears_differ(model: ExactModel, noise: torch.Generator) -> list[str]:
    found = []
    for (outputs, inputs), linear in _linears(model).items():
        wanted = HEAD_ROWS if linear is model.head else (*ROWS, PACKED_ROWS)
        counts = sorted(set(map(padded_rows, wanted)))
        x = torch.randn(counts[-1], inputs, generator=noise)
        found += _told(f"linear {inputs} -> {outputs}", _rows_that_differ(linear, x, counts[:-1]))
    return found


def _rows_differ(model: ExactModel, noise: torch.Generator) -> list[str]:
    """SwiGLU and log-softmax."""
    operators: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
        "SwiGLU": (swiglu, 2 * model.config.intermediate_size),
        "log-softmax": (lambda x: log_distribution(x, Filter()), model.config.vocab_size),
    }
    found = []
    for name, (function, width) in operators.items():
        found += _told(name, _rows_that_differ(function, torch.randn(40, width, generator=noise), SHORT[:-1]))
    return found


def _rows_that_differ(function: Callable[[Tensor], Tensor], x: Tensor, counts: Sequence[int]) -> list[int]:
    """The counts at which rows of x alone, in turns its first and its last ones, have other bits than among all; the few rows
    with one thread, as a rollout worker has them."""
    whole, differing = function(x), []
    for number, rows in enumerate(counts):
        part = slice(len(x) - rows, None) if number % 2 else slice(rows)
        with threads_of(1 if rows <= 8 else torch.get_num_threads()):
            if not torch.equal(function(x[part].contiguous()), whole[part]):
                differing.append(rows)
    return differing


def _told(name: str, counts: Sequence[int]) -> list[str]:
    return [f"{name}: {' '.join(map(str, sorted(set(counts))))} rows"] if counts else []


def _linears(model: ExactModel) -> dict[tuple[int, int], Callable[[Tensor], Tensor]]:
    """One linear of each shape (outputs, inputs), as the layers run them."""
    found: list[tuple[Any, Sequence[ExactLinear]]] = []
    for layer in model.module.model.layers:
        assert isinstance(layer, ExactLayer)
        found += [(fused, fused.parts) for fused in (layer.qkv, layer.gate_up) if fused is not None]
        found += [(one, [one]) for one in [layer.self_attn.o_proj] + ([] if layer.sparse else [layer.mlp.down_proj])]
    found.append((model.head, [model.head]))
    return {(sum(len(p.weight) for p in parts), parts[0].weight.shape[1]): linear for linear, parts in found}


def _gradients_differ(model: ExactModel, noise: torch.Generator, threads: int) -> list[str]:
    """The long sums of a backward pass, with one thread and with several: over the vocabulary, and over the rows of a pass."""
    found = []
    for (outputs, inputs), linear in _linears(model).items():
        head = linear is model.head
        above = torch.randn(GRADIENT_ROWS[not head], outputs, generator=noise)
        other = model.head.weight.detach() if head else torch.randn(len(above), inputs, generator=noise)
        made = []
        for count in (1, threads):
            with threads_of(count):
                made.append((above if head else above.t()) @ other)
        if not torch.equal(*made):
            found += _told(f"gradient of a linear {inputs} -> {outputs}", [len(above)])
    return found


def _attention_differs(model: ExactModel, noise: torch.Generator) -> list[str]:
    """One packed segment against segments behind a prefix, prefills by pages, and decode alone and beside others."""
    heads, kv_heads, size = model.heads
    q, k, v = (torch.randn(LENGTH, count, size, generator=noise) for count in (heads, kv_heads, kv_heads))

    def attended(plan: Plan, rows: slice | list[int]) -> Tensor:
        return plan.attend(0, q[rows], k[rows], v[rows], size**-0.5, None)

    whole = attended(model.packed_plan(np.array([[0, LENGTH, 0, 0]])), slice(None))
    differing: dict[str, list[int]] = {"behind a prefix": [], "by pages": [], "decode beside others": []}
    cache = Cache(model, [LENGTH] * 8, np.random.default_rng(0))
    cache.fill(k, v)
    for rows in ROWS:
        start = int(torch.randint(LENGTH - rows, (), generator=noise))
        packed = attended(model.packed_plan(np.array([[start, rows, 0, start]])), slice(start + rows))
        plan, _ = cache.plan([0], np.array([start]), np.array([rows]))
        paged = attended(plan, slice(start, start + rows))
        for name, found in (("behind a prefix", packed[start:]), ("by pages", paged)):
            if not torch.equal(found, whole[start : start + rows]):
                differing[name].append(rows)
    for batch in (1, 3, 8):
        for position in (0, 100, 257, LENGTH - 1):
            places = np.array([LENGTH - 1] * (batch - 1) + [position])
            plan, _ = cache.plan(range(batch), places, np.ones(batch, np.int64))
            if not torch.equal(attended(plan, places.tolist())[-1], whole[position]):
                differing["decode beside others"].append(batch)
    return [line for name, counts in differing.items() for line in _told(f"attention {name}", counts)]
