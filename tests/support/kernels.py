"""Tensors, tolerances and bits for the tests of the GPU kernels.

A test file that imports this is skipped where Triton was imported before its interpreter was asked
for.
"""

from contextlib import contextmanager

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import JITFunction

from tandem.model.kernels import in_use

ON_GPU = torch.cuda.is_available()
if not ON_GPU and isinstance(tl.cdiv, JITFunction):
    pytest.skip(
        "triton was imported before TRITON_INTERPRET was set; next: pytest tests/gpu",
        allow_module_level=True,
    )

triton._utils.TRITON_MAX_TENSOR_NUMEL = 1 << 21  # the interpreter's product of the largest tile
DEVICE = "cuda" if ON_GPU else "cpu"
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
TOLERANCE = {FP32: (1e-5, 1e-5), BF16: (1e-2, 1e-2), FP16: (2e-3, 2e-3)}
BITS = {FP32: torch.int32, BF16: torch.int16, FP16: torch.int16}


def random(seed, *shape, dtype=FP32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def same_bits(a, b):
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(BITS[a.dtype]), b.contiguous().view(BITS[b.dtype])
    )


def assert_near(found, expected, dtype):
    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=atol)


def assert_gradient_near(found, expected, dtype):
    """Compare with the largest element: a gradient's rounding errors are those of its terms."""
    assert found.dtype == dtype and expected.abs().max() > 0
    bound = {FP32: 1e-5, BF16: 1.5e-2, FP16: 2e-3}[dtype]
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error < bound, f"{error:.1e} of the largest element"


def int32(*rows):
    return torch.tensor(rows, dtype=torch.int32, device=DEVICE)


def gradients(function, *inputs, above):
    """Gradients of the inputs, given those of the function's results; the results come first."""
    inputs = [t.detach().requires_grad_() for t in inputs]
    results = function(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    above = above if isinstance(above, tuple) else (above,)
    return [t.detach() for t in results], torch.autograd.grad(results, inputs, above)


@contextmanager
def triton_everywhere():
    """Use Triton's kernels on the CPU too, in its interpreter."""
    from tandem.plugins.triton.plans import TRITON

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(in_use, "cpu", TRITON)
        yield
