"""Activations of transformers from plain arithmetic: their gradients are torch's, with one set of
bits at any number of threads."""

import pytest
import torch
import torch.nn.functional as F

from tandem.model.activations import QUICK, ExactActivation
from tandem.model.schedule import threads_of

STOCK = {
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "quick_gelu": lambda x: x * torch.sigmoid(QUICK * x),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def gradient(activation, x, above):
    x = x.clone().requires_grad_()
    activation(x).backward(above)
    return x.grad


@pytest.mark.parametrize("kind", STOCK)
def test_gradient_is_that_of_torch_with_one_set_of_bits(kind):
    noise = torch.Generator().manual_seed(0)
    x = torch.randn(1, 37, 1001, generator=noise) * 4
    x[0, 0, :5] = torch.tensor([0.0, -200.0, 200.0, -1e9, 1e9])
    above, found = torch.randn(x.shape, generator=noise), []
    for count in (1, 2, 3, 5, 6):
        with threads_of(count):
            found.append(gradient(ExactActivation(kind), x, above))
    assert all(torch.equal(found[0], other) for other in found)
    expected = gradient(STOCK[kind], x.double(), above.double())
    assert torch.allclose(found[0].double(), expected, rtol=1e-5, atol=1e-5)
