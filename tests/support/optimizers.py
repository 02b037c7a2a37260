"""Optimizers of small parameters, and gradients for them."""

from dataclasses import replace

import torch
from torch import nn

from tandem.trainer.optimizer import Optimizer, Settings


def random_parameters(shapes, dtype=torch.float32):
    """Parameters of these shapes, by name."""
    noise = torch.Generator().manual_seed(0)
    return {
        name: nn.Parameter(torch.randn(shape, generator=noise).to(dtype))
        for name, shape in shapes.items()
    }


def optimizer(weights, kind=Optimizer, **changes):
    usual = Settings(learning_rate=0.01, total_steps=10, weight_decay=0.1, max_grad_norm=1e9)
    return kind(weights, replace(usual, **changes))


def set_gradients(step, *parts, scale=1.0):
    """The same for each of the sets of parameters."""
    for weights in parts:
        noise = torch.Generator().manual_seed(1000 + step)
        for parameter in weights.values():
            parameter.grad = torch.randn(parameter.shape, generator=noise) * scale


def check_reload(make, kind=Optimizer, other=None, **changes):
    """Check that an optimizer of another set of parameters, given weights and state, goes on with
    the same bits; return the state that it was given. other: its kind, if it is another one."""
    weights, copies = make(), make()
    ours = optimizer(weights, kind, schedule="cosine", **changes)
    again = optimizer(copies, other or kind, schedule="cosine", **changes)
    for step in range(3):
        set_gradients(step, weights)
        ours.update()
    saved = {name: tensor.clone() for name, tensor in ours.state().items()}
    again.load_weights({name: w.clone() for name, w in ours.weights().items()})
    again.load_state(saved, ours.step)
    for step in range(3, 6):
        set_gradients(step, weights, copies)
        assert ours.update() == again.update()
        assert bits(weights) == bits(copies) and bits(ours.weights()) == bits(again.weights())
    assert all(torch.equal(again.state()[name], t) for name, t in ours.state().items())
    return saved


def bits(weights):
    return {name: p.detach().float().numpy().tobytes() for name, p in weights.items()}
