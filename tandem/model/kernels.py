"""The operators whose arithmetic depends on the device: oneDNN and blocked matmul for tensors on a
CPU (cpu_kernels.py), Triton's for those on a GPU (triton/plans.py).

registry.py names the kernels of a device, which are imported when a tensor first needs them.
Triton's launch on the thread's current GPU, so whoever asks makes the tensor's the current one: no
engine, learner or thread has to think of it. Gradients have a thread of torch's for each GPU.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tandem.registry import find

if TYPE_CHECKING:
    from tandem.model.attention import Plan
    from tandem.model.paged_attention import DecodeRows, Runs

Rotation = tuple[Tensor, Tensor]  # cosine and signed sine, each [T, 1, E]


class Kernels(Protocol):
    """The operators of one kind of device. A row has the same bits beside any other rows."""

    # those of a linear, which the probe tries; the default comes first
    matmuls: Sequence[str] = ("plain",)
    own_matmuls: Sequence[str] = ("plain",)  # of one order of additions: the same bits
    chosen: str = "plain"  # the one that multiplies in this process
    fused: bool = False  # whether log-probs and their slopes are made of logits, without a table
    runs_ahead: bool = False  # whether decode steps may run ahead of the host (engine/lookahead.py)
    head_rows: Sequence[int] = ()  # of an output projection that the probe tries; (): all
    most_ranked: int = 1 << 62  # tokens that the probe sorts

    def on(self, device: torch.device) -> "Kernels":
        """Return the kernels for tensors of a device, which is the thread's current one from then
        on."""

    def use_matmul(self, kernel: str) -> None:
        """Multiply by one of `matmuls` from now on. Others may have other bits, so engine and
        trainer take the same."""
        self.chosen = kernel

    # ---- linears

    def pack(self, weight: Tensor) -> Tensor:
        """Reorder the weight [O, I] for `matmul`, if it wants another order."""

    def matmul(self, x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply x [N, I] with a packed weight, without gradients, to [N, O]."""

    def time_ms(self, work: Callable[[], Any]) -> float:
        """Time some work as a decode step runs it, where there are several `matmuls`."""
        raise AssertionError("there is one kernel")

    # ---- attention

    def packed_plan(
        self, segments: np.ndarray, device: torch.device, heads: int, kv_heads: int
    ) -> "Plan":
        """Plan the attention of packed segments, int64 [S, 4] as in types.Microbatch."""

    def paged_plan(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], runs: "Runs", heads: int
    ) -> "Plan":
        """Plan the attention of new tokens over a paged cache, as paged_attention.PagedPlan."""

    def decode_plan(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], rows: "DecodeRows", heads: int
    ) -> "Plan":
        """Plan as `paged_plan` for a decode step over static tensors."""

    def shared_tiles(self, runs: "Runs", group: int) -> np.ndarray | None:
        """Plan which pages the sequences of a decode step read together, int32 [4, splits, S]; None
        if they share none, or if the plan sees to it. group: query heads of a key/value head."""

    # ---- rows

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Compute the RMS norm of x [..., D], in float32."""

    def add_rms_norm(
        self, x: Tensor, change: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """Compute x + change and its RMS norm."""

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Apply the rotary embedding to x [T, n, E]: the bits of x * cos + rotate_half(x) * sin."""

    def swiglu(self, x: Tensor) -> Tensor:
        """Compute silu(gate) * up [N, I] of x [N, 2I] = (gate, up)."""

    def rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """Pick rows int64 [n] of x [T, D], one of them several times, with a gradient that is
        summed in a fixed order."""

    def distinct(self, counts: Iterable[int], dtype: torch.dtype) -> list[int]:
        """List those of some row counts that are different products."""
        return list(counts)

    # ---- the vocabulary

    def log_softmax(self, logits: Tensor, temperature: float) -> Tensor:
        """Compute the log-probs [N, V] of tempered logits."""

    def top_p_edge(self, logprobs: Tensor, top_p: float) -> Tensor:
        """Find the smallest log-prob [N, 1] in the least set of likeliest tokens that reaches
        top_p."""

    def likeliest(self, table: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Find the likeliest tokens of log-probs [N, V]: theirs float32 [N, count], tokens
        int64."""

    def inverse_cdf(self, table: Tensor, uniform: Tensor) -> Tensor:
        """Find tokens int64 [B] in log-probs [B, V], -inf where filtered, by uniform float32 [B] in
        [0, 1); they have positive probability."""

    def target_logprobs(
        self, logits: Tensor, targets: Tensor, temperature: float, *, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Compute (log-probs of targets, entropies) [n] from logits [n, V], where `fused`."""
        raise AssertionError("not fused")

    def logprob_slope(
        self,
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        above: Tensor | None,
        above_entropy: Tensor | None,
    ) -> Tensor:
        """Compute d loss / d tempered logits [n, V] from logits, where `fused`."""
        raise AssertionError("not fused")


# Kernels in use by the type of a device, e.g. "cpu"
in_use: dict[str, Kernels] = {}


def kernels_of(t: Tensor) -> Kernels:
    """Return the kernels for a tensor's device, which is the thread's current one from then on."""
    kind = t.device.type
    if (found := in_use.get(kind)) is None:
        found = in_use[kind] = find("kernels", kind, key="model.device")
    return found.on(t.device)


@contextmanager
def kernels_for(kind: str, kernels: Kernels) -> Iterator[None]:
    """Use other kernels for a type of device for a while, as Triton's on a CPU, where its
    interpreter runs them."""
    before = in_use.pop(kind, None)
    in_use[kind] = kernels
    try:
        yield
    finally:
        del in_use[kind]
        if before is not None:
            in_use[kind] = before
