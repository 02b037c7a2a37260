"""Contract D7: exactness is tried on the machine at hand, at the model's own shapes, before it is
relied on.

Two questions. *Parity*: has a token the same bits in the trainer's packed pass and in the engine's
prefill and decode? *Threads*: have forward and backward pass the same bits with one thread and with
several? Tried are every linear, SwiGLU, log-softmax and the attention of the model, at row counts
that take different kernels somewhere, and a random model of the same shapes in a random schedule
(trial.py). Each finding names itself. Under a second for 135M parameters on two cores.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.model.attention import Plan
from tandem.model.layers import ExactLayer
from tandem.model.linear import HAS_PREPACKED, ExactLinear, padded_rows, swiglu
from tandem.model.load import ExactModel
from tandem.model.logprobs import SamplingDistribution, chunks, log_distribution
from tandem.model.trial import LONG, SHORT, Cache, Schedule, random_model, threads_of
from tandem.runtime import numerics

# counts at which kernels were seen to change, and those about a block of queries
ROWS = (*SHORT, *LONG)
PACKED_ROWS = 640  # of a packed pass
# of the output projection, where a row costs as much as a layer; and as many as a chunk has
HEAD_ROWS = (4, 32)
GRADIENT_ROWS, HEAD_GRADIENT_ROWS = 330, 37
MANY_ROWS = 1100  # of the gradient of the smallest linear
LENGTH = 400  # past three key blocks, with a partial fourth


@dataclass(frozen=True, slots=True, kw_only=True)
class Exactness:
    """Result of a probe. Example: Exactness(parity=["attention by pages: 4 rows"],
    thread_dependent=[])"""

    # operators on which engine and trainer differ; empty: they agree to the last bit
    parity: list[str]
    thread_dependent: list[str]  # results whose bits change with the number of threads


def probe(model: ExactModel, seed: int = 0, threads: Sequence[int] = ()) -> Exactness:
    """Compare engine and trainer on the model's operators, and on a random model of its shapes in a
    random schedule.

    seed: of model and schedule; threads: thread counts to try besides 1 and the current one (2 at
    least).
    """
    noise, counts = (
        torch.Generator().manual_seed(seed),
        sorted({1, max(2, torch.get_num_threads()), *threads}),
    )
    unfit, small = numerics.why_not_reproducible(), random_model(model, seed)
    with torch.no_grad():
        parity = (
            _linears_differ(model, noise)
            + _rows_differ(model, noise)
            + _attention_differs(small, noise)
        )
    schedule, passes = Schedule(small, seed), []
    for count in counts:
        with threads_of(count):
            passes.append(schedule.packed())
    (logprobs, gradients), *others = passes
    if not torch.equal(schedule.paged(counts), logprobs):
        parity.append("a random model in a random schedule")
    found = _gradients_differ(model, noise, counts)
    for other, theirs in others:
        found += ["log-probs of a random model"] * (not torch.equal(logprobs, other))
        found += [
            f"gradient of {name}"
            for name, g in gradients.items()
            if not torch.equal(g, theirs[name])
        ]
    return Exactness(parity=unfit + parity, thread_dependent=unfit + found)


# The operators
# ------------------------------------------------------------------------------------------------------


def _linears_differ(model: ExactModel, noise: torch.Generator) -> list[str]:
    found = []
    for (outputs, inputs), linear in _linears(model).items():
        if linear is model.head:
            counts = [*HEAD_ROWS, min(chunks(PACKED_ROWS, outputs)[0].stop, PACKED_ROWS)]
        else:
            drawn = torch.randint(1, PACKED_ROWS, (3,), generator=noise).tolist()
            counts = [*ROWS, *drawn, PACKED_ROWS]
        if HAS_PREPACKED:  # what is rounded up to the same count is the same product
            counts = sorted({padded_rows(rows): rows for rows in counts}.values())
        x = torch.randn(counts[-1], inputs, generator=noise)
        found += _told(f"linear {inputs} -> {outputs}", _rows_that_differ(linear, x, counts[:-1]))
    return found


def _rows_differ(model: ExactModel, noise: torch.Generator) -> list[str]:
    """SwiGLU and log-softmax."""
    operators: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
        "SwiGLU": (swiglu, 2 * model.config.intermediate_size),
        "log-softmax": (
            lambda x: log_distribution(x, SamplingDistribution()),
            model.config.vocab_size,
        ),
    }
    found = []
    for name, (function, width) in operators.items():
        found += _told(
            name, _rows_that_differ(function, torch.randn(40, width, generator=noise), SHORT[:-1])
        )
    return found


def _rows_that_differ(
    function: Callable[[Tensor], Tensor], x: Tensor, counts: Sequence[int]
) -> list[int]:
    """The counts at which rows of x alone, its first or its last ones, have other bits than among
    all; few rows in turns with one thread, as a rollout worker has it, and with those at hand."""
    whole, differing = function(x), []
    for number, rows in enumerate(counts):
        part = slice(len(x) - rows, None) if number % 4 < 2 else slice(rows)
        with threads_of(1 if number % 2 and rows <= 64 else torch.get_num_threads()):
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
        found += [
            (one, [one])
            for one in [layer.self_attn.o_proj] + ([] if layer.sparse else [layer.mlp.down_proj])
        ]
    found.append((model.head, [model.head]))
    return {
        (sum(len(p.weight) for p in parts), parts[0].weight.shape[1]): linear
        for linear, parts in found
    }


def _gradients_differ(
    model: ExactModel, noise: torch.Generator, threads: Sequence[int]
) -> list[str]:
    """The long sums of a backward pass: over the vocabulary, and over the rows of a pass."""
    found, linears = [], _linears(model)
    for (outputs, inputs), linear in linears.items():
        if linear is model.head:
            left, right = (
                torch.randn(HEAD_GRADIENT_ROWS, outputs, generator=noise),
                model.head.weight.detach(),
            )
        else:
            rows = (
                MANY_ROWS if outputs * inputs == min(o * i for o, i in linears) else GRADIENT_ROWS
            )
            left, right = (torch.randn(rows, width, generator=noise) for width in (outputs, inputs))
            left = left.t()
        made = []
        for count in threads:
            with threads_of(count):
                made.append(left @ right)
        if not all(torch.equal(made[0], other) for other in made[1:]):
            found.append(f"gradient of a linear {inputs} -> {outputs}")
    return found


def _attention_differs(model: ExactModel, noise: torch.Generator) -> list[str]:
    """One packed segment against segments behind a prefix, prefills by pages, and decode alone and
    beside others."""
    heads, kv_heads, size = model.heads
    q, k, v = (
        torch.randn(LENGTH, count, size, generator=noise) for count in (heads, kv_heads, kv_heads)
    )

    def attended(plan: Plan, rows: slice | list[int]) -> Tensor:
        return plan.attend(0, q[rows], k[rows], v[rows], size**-0.5, None)

    whole = attended(model.packed_plan(np.array([[0, LENGTH, 0, 0]])), slice(None))
    differing: dict[str, list[int]] = {
        "behind a prefix": [],
        "by pages": [],
        "decode beside others": [],
    }
    cache = Cache(model, [LENGTH] * 8, np.random.default_rng(0))
    cache.fill(k, v)
    for rows in ROWS:
        start = int(torch.randint(LENGTH - rows, (), generator=noise))
        packed = attended(
            model.packed_plan(np.array([[start, rows, 0, start]])), slice(start + rows)
        )
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
    return [
        line for name, counts in differing.items() for line in _told(f"attention {name}", counts)
    ]
