"""Contract D7: exactness is checked on the machine at hand, at the model's own shapes, before it is relied on.

Under a second for a small model; each check names itself, so that a report can say what is not exact here.
"""

import numpy as np
import torch
from torch import Tensor

from tandem.model.attention import CachePlan, PackedPlan
from tandem.model.linear import ExactLinear, ExactSiLU
from tandem.model.load import ExactModel
from tandem.model.logprobs import Filter, log_distribution

ROWS = (1, 2, 3, 5, 8, 13, 33)
LENGTH = 320  # past two key blocks, with a partial third


@torch.no_grad()
def what_is_not_exact(model: ExactModel) -> list[str]:
    """The names of the operators whose rows depend on their neighbours here; empty when P1 holds."""
    noise = torch.Generator().manual_seed(0)
    linears = {tuple(m.weight.shape): m for m in model.module.modules() if isinstance(m, ExactLinear)}
    failures = [
        f"linear {i} -> {o}" for (o, i), m in linears.items() if not _rows_agree(m, torch.randn(70, i, generator=noise))
    ]
    width = model.config.intermediate_size
    if not _rows_agree(ExactSiLU(), torch.randn(70, width, generator=noise)):
        failures.append("SiLU")
    if not _rows_agree(
        lambda x: log_distribution(x, Filter()), torch.randn(70, model.config.vocab_size, generator=noise)
    ):
        failures.append("log_softmax")
    if not _attention_agrees(model, noise):
        failures.append("attention")
    return failures if _layers_agree(model, noise) else [*failures, "the layers together"]


def _layers_agree(model: ExactModel, noise: torch.Generator) -> bool:
    """A short sequence alone and behind another one: norms, rotary embedding, experts and all."""
    heads, kv_heads, _ = model.heads
    tokens = torch.randint(0, model.config.vocab_size, (50,), generator=noise)

    def hidden(lengths: list[int]) -> Tensor:
        firsts = np.cumsum([0, *lengths[:-1]])
        segments = np.array([[first, length, 0, 0] for first, length in zip(firsts, lengths, strict=True)])
        positions = torch.cat([torch.arange(length) for length in lengths])
        plan = PackedPlan(segments, group=heads // kv_heads, kv_heads=kv_heads)
        return model.hidden(tokens[-sum(lengths) :], positions, plan)

    return torch.equal(hidden([13]), hidden([37, 13])[37:])


def _rows_agree(function, x: Tensor) -> bool:  # type: ignore[no-untyped-def]
    whole = function(x)
    return all(torch.equal(function(x[start : start + rows].contiguous()), whole[start : start + rows])
               for rows in ROWS for start in (0, 7))  # fmt: skip


def _attention_agrees(model: ExactModel, noise: torch.Generator) -> bool:
    """A packed pass against one-token decode, at a few positions, alone and beside another sequence."""
    heads, kv_heads, size = model.heads
    q = torch.randn(LENGTH, heads, size, generator=noise)
    k, v = (torch.randn(LENGTH, kv_heads, size, generator=noise) for _ in range(2))
    segments = np.array([[0, LENGTH, 0, 0]])
    packed = PackedPlan(segments, group=heads // kv_heads, kv_heads=kv_heads).attend(0, q, k, v, size**-0.5, None)
    for batch in (1, 3):
        keys, values = (t.transpose(0, 1)[None].repeat(batch, 1, 1, 1) for t in (k, v))
        for position in (0, 5, 100, 130, 257, LENGTH - 1):
            one_q, one_k, one_v = (t[position].expand(batch, -1, -1).contiguous() for t in (q, k, v))
            # the other sequences stand further on, so that this one's keys are padded by theirs
            places = torch.tensor([position, *[LENGTH - 1] * (batch - 1)])
            plan = CachePlan([keys.clone()], [values.clone()], places)
            if not torch.equal(plan.attend(0, one_q, one_k, one_v, size**-0.5, None)[0], packed[position]):
                return False
    return True
