"""The compiled kernels of kernels.cpp, called with tensors through ctypes.

The library has no Python and no torch in it, so one file is good for all versions of both.
"""

import ctypes
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

EDITION = 4  # of kernels.cpp
_TYPES: dict[type, Any] = {float: ctypes.c_float, int: ctypes.c_int64}  # all others are addresses


class Library:
    """Kernels by name, each for the type of a tensor; kernels.cpp says what they take."""

    def __init__(self, found: Any, wide: bool):
        self._find, self._wide = found.find_kernel, wide
        self._find.restype, self._find.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int)
        self._kernels: dict[Any, Callable[..., Any]] = {}

    def place(self, name: str) -> int:
        """Find a kernel's address, 0 for none here."""
        return self._find(name.encode(), self._wide) or 0

    def run(self, name: str, like: Tensor | None, *arguments: Any) -> None:
        """Run a kernel with torch's threads. Tensors are given by address, a float is float32, and
        an int is int64; like: a tensor of the type in question, None for a kernel of one type."""
        kernel = self._kernels.get(key := (name, None if like is None else like.dtype))
        if kernel is None:
            full = name if like is None else f"{name}.{str(like.dtype).removeprefix('torch.')}"
            types = [_TYPES.get(type(argument), ctypes.c_void_p) for argument in arguments]
            kernel = ctypes.CFUNCTYPE(None, *types, ctypes.c_int)(self.place(full))
            self._kernels[key] = kernel
        given = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
        tensors = [a for a in arguments if isinstance(a, Tensor)] if 0 in given else ()
        if any(t.numel() and not t.data_ptr() for t in tensors):
            raise TypeError(f"a tensor of {name} has no memory of its own")
        kernel(*given, torch.get_num_threads())


@cache
def load() -> Library | None:
    """Load the kernels for torch's instruction set; None if not compiled, or without AVX2."""
    capability = torch.backends.cpu.get_cpu_capability()
    for path in sorted(Path(__file__).parent.glob("compiled*.so")):
        try:
            found = ctypes.CDLL(str(path))
        except OSError:  # of another platform, or torch has no OpenMP of that kind
            continue
        if not hasattr(found, "edition") or found.edition() != EDITION:
            logger.warning("%s is of another revision: install Tandem again to build it", path)
            continue
        library = Library(found, capability.startswith("AVX512"))
        if capability != "DEFAULT" and library.place("inverse_cdf"):
            return library
    return None
