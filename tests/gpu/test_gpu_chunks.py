"""Chunks of logits and the gradient of the output projection on a GPU: their sizes and types on
tensors without memory (fake ones of a GPU, where there is none), their values on a GPU."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tandem.model.logprobs import CHUNK_BYTES, GPU_CHUNK_BYTES, chunks
from tandem.model.onednn import GPU_OUTPUTS, weight_gradient
from tests.support.operators import Operators

MANY, WIDTH = 151_936, 8


@pytest.mark.parametrize(
    "device, most, least", [("cpu", CHUNK_BYTES, 16), ("cuda", GPU_CHUNK_BYTES, 1024)]
)
def test_a_chunk_of_logits_has_the_size_of_its_device(device, most, least):
    with FakeTensorMode():
        parts = chunks(5000, torch.empty(MANY, WIDTH, device=device, dtype=torch.bfloat16))
    row, rows = 4 * MANY, parts[0].stop  # the logits may be float32 on either
    assert rows >= least and row * rows <= most < row * (rows + 1)
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
    assert parts[-1].stop == 5000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_adds_products_in_float32_in_few_parts(dtype):
    """Witness that none is rounded first: their type is asked for."""
    with FakeTensorMode(), Operators() as operators:
        slope = torch.empty(40, MANY, device="cuda")
        hidden = torch.empty(40, WIDTH, dtype=dtype, device="cuda")
        total = torch.empty(MANY, WIDTH, device="cuda")
        assert weight_gradient(slope, hidden, total) is total
    assert operators.counts["aten.mm.dtype"] == -(-MANY // GPU_OUTPUTS)
    assert operators.counts["aten.mm.default"] == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_the_output_projection_is_near_float64_on_a_gpu(dtype):
    slope = torch.randn(300, GPU_OUTPUTS + 77, device="cuda").to(dtype).float()
    hidden = torch.randn(300, 64, device="cuda", dtype=dtype)
    total = torch.ones(GPU_OUTPUTS + 77, 64, device="cuda")
    found = weight_gradient(slope, hidden, total)
    expected = slope.double().t() @ hidden.double() + 1.0
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
