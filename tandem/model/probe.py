"""Contract D7: exactness is checked on the machine at hand, at the model's own shapes, before it is relied on.

Under a second for a small model; each check names itself, so that a report can say what is not exact here.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from tandem.model.layers import ExactLayer
from tandem.model.linear import swiglu
from tandem.model.load import ExactModel
from tandem.model.logprobs import Filter, log_distribution
from tandem.model.paged import PAGE, Runs

ROWS = (1, 2, 3, 5, 8, 13, 33)
LENGTH = 320  # past two key blocks, with a partial third


@torch.no_grad()
def what_is_not_exact(model: ExactModel) -> list[str]:
    """The names of the operators whose rows depend on their neighbours here; empty when P1 holds."""
    noise = torch.Generator().manual_seed(0)
    failures = [
        f"linear {inputs} -> {outputs}"
        for (outputs, inputs), linear in _linears(model).items()
        if not _rows_agree(linear, torch.randn(70, inputs, generator=noise))
    ]
    width = model.config.intermediate_size
    if not _rows_agree(swiglu, torch.randn(70, 2 * width, generator=noise)):
        failures.append("SwiGLU")
    if not _rows_agree(
        lambda x: log_distribution(x, Filter()), torch.randn(70, model.config.vocab_size, generator=noise)
    ):
        failures.append("log_softmax")
    if not _attention_agrees(model, noise):
        failures.append("attention")
    return failures if _layers_agree(model, noise) else [*failures, "the layers together"]


def _linears(model: ExactModel) -> dict[tuple[int, ...], Callable[[Tensor], Tensor]]:
    """One linear of each shape (outputs, inputs), as the layers run them: fused ones are told by their sum."""
    found: dict[tuple[int, ...], Callable[[Tensor], Tensor]] = {tuple(model.head.weight.shape): model.head}
    for layer in model.module.model.layers:
        assert isinstance(layer, ExactLayer)
        for fused in (layer.qkv, layer.gate_up):
            if fused is not None:
                weights = [part.weight for part in fused.parts]
                found[sum(len(weight) for weight in weights), weights[0].shape[1]] = fused
        single = [layer.self_attn.o_proj] + ([] if layer.sparse else [layer.mlp.down_proj])
        found |= {tuple(linear.weight.shape): linear for linear in single}
    return found


def _layers_agree(model: ExactModel, noise: torch.Generator) -> bool:
    """A short sequence alone and behind another one: norms, rotary embedding, experts and all."""
    tokens = torch.randint(0, model.config.vocab_size, (50,), generator=noise)

    def hidden(lengths: list[int]) -> Tensor:
        firsts = np.cumsum([0, *lengths[:-1]])
        segments = np.array([[first, length, 0, 0] for first, length in zip(firsts, lengths, strict=True)])
        positions = torch.cat([torch.arange(length) for length in lengths])
        return model.hidden(tokens[-sum(lengths) :], positions, model.packed_plan(segments))

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
    packed = model.packed_plan(segments).attend(0, q, k, v, size**-0.5, None)
    for batch in (1, 3):
        # of the other sequences, each in pages of its own, the keys reach further
        pages = torch.arange(batch * -(-LENGTH // PAGE)).view(batch, -1)
        keys, values = (_in_pages(t, batch) for t in (k, v))
        for position in (0, 5, 100, 130, 257, LENGTH - 1):
            starts = np.array([position, *[LENGTH - 1] * (batch - 1)])
            runs = Runs(pages.tolist(), starts, np.ones_like(starts))
            plan = model.paged_plan([keys.transpose(2, 3).contiguous()], [values], runs)
            one_q, one_k, one_v = (t[starts] for t in (q, k, v))
            if not torch.equal(plan.attend(0, one_q, one_k, one_v, size**-0.5, None)[0], packed[position]):
                return False
    return True


def _in_pages(t: Tensor, copies: int) -> Tensor:
    """[T, K, E] -> [pages, K, PAGE, E], the same sequence several times."""
    padded = torch.nn.functional.pad(t, (0, 0, 0, 0, 0, -len(t) % PAGE))
    return padded.view(-1, PAGE, *t.shape[1:]).transpose(1, 2).repeat(copies, 1, 1, 1)
