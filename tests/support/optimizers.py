"""Optimizers of small parameters, and gradients for them."""

from dataclasses import replace

import torch

from tandem.trainer.optimizer import Optimizer, Settings


def optimizer(weights, kind=Optimizer, **changes):
    usual = Settings(learning_rate=0.01, total_steps=10, weight_decay=0.1, max_grad_norm=1e9)
    return kind(weights, replace(usual, **changes))


def set_gradients(weights, step, scale=1.0):
    noise = torch.Generator().manual_seed(1000 + step)
    for parameter in weights.values():
        parameter.grad = torch.randn(parameter.shape, generator=noise) * scale


def bits(weights):
    return {name: p.detach().float().numpy().tobytes() for name, p in weights.items()}
