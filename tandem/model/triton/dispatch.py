"""Choice of kernels: oneDNN and blocked matmul for tensors on a CPU, Triton's for those on a GPU.

The arithmetic forks in `linear`, `layers`, `logprobs`, `inverse_cdf` and `forward`, and in `load`,
which makes the attention plans, and nowhere else; all ask `triton_for`. Triton is imported when a
tensor first needs it. It launches on the thread's current GPU, so whoever asks makes the tensor's
the current one: no engine, learner or thread has to think of it. Gradients have a thread of torch's
for each GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

_everywhere = False
_matmul = "plain"


def triton_for(t: Tensor) -> Any:
    """Return the module tandem.model.triton.plans if t is a GPU's tensor, None for the CPU. That
    GPU is the thread's current one from then on."""
    if t.is_cuda:
        if torch.cuda.current_device() != t.device.index:
            torch.cuda.set_device(t.device)
    elif not _everywhere:
        return None
    return import_module("tandem.model.triton.plans")


def matmul_kernel() -> str:
    """Name the kernel that multiplies on this process's GPU, one of plans.MATMULS."""
    return _matmul


def use_matmul(kernel: str) -> None:
    """Multiply by that kernel from now on. Other kernels may have other bits, so engine and trainer
    take the same."""
    global _matmul
    _matmul = kernel


@contextmanager
def triton_everywhere() -> Iterator[None]:
    """Use Triton on the CPU too, in its interpreter, to test the GPU's path without a GPU.

    TRITON_INTERPRET=1 must be set.
    """
    global _everywhere
    _everywhere = True
    try:
        yield
    finally:
        _everywhere = False
