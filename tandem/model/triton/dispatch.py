"""Which kernels run: oneDNN and blocked matmul for tensors on a CPU, the Triton ones for tensors on
a GPU.

`linear` and `load` (which makes the attention plans) ask `triton_for` where the arithmetic forks,
and nowhere else does it fork. Triton is imported when a tensor first needs it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from torch import Tensor

_everywhere = False


def triton_for(t: Tensor) -> Any:
    """The module tandem.model.triton.plans where its kernels are to compute with t, None where the
    CPU's are."""
    return import_module("tandem.model.triton.plans") if _everywhere or t.is_cuda else None


@contextmanager
def triton_everywhere() -> Iterator[None]:
    """On the CPU too, in Triton's interpreter: how the GPU's path is tested without one.
    TRITON_INTERPRET=1 must be set."""
    global _everywhere
    _everywhere = True
    try:
        yield
    finally:
        _everywhere = False
