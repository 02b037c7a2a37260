"""Optimizers of small parameters, and gradients for them."""

import torch

from tandem.train.optimizer import Optimizer


def optimizer(weights, **changes):
    settings = {
        "learning_rate": 0.01,
        "schedule": "constant",
        "warmup_steps": 0,
        "total_steps": 10,
        "weight_decay": 0.1,
        "betas": (0.9, 0.95),
        "max_grad_norm": 1e9,
    }
    return Optimizer(weights, **{**settings, **changes})


def set_gradients(weights, step, scale=1.0):
    noise = torch.Generator().manual_seed(1000 + step)
    for parameter in weights.values():
        parameter.grad = torch.randn(parameter.shape, generator=noise) * scale


def bits(weights):
    return {name: p.detach().float().numpy().tobytes() for name, p in weights.items()}
