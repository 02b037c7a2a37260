"""Updates of tiny models, by one process or by those of a mesh."""

from dataclasses import replace

import numpy as np

from tandem.model.expert_choices import replayed_experts
from tandem.model.forward import batch_logprobs
from tandem.trainer.learner import Learner
from tandem.trainer.optimizer import Optimizer, Settings
from tandem.trainer.pack import pack
from tandem.trainer.ranks import Ranks
from tandem.types import SamplingDistribution
from tests.support.tiny import random_samples

SAMPLING = SamplingDistribution()


def learner_of(model, ranks, *, kind=Optimizer, **changes):
    usual = Settings(learning_rate=0.01, total_steps=100, weight_decay=0.1, max_grad_norm=0.5)
    settings = replace(usual, **changes)
    optimizer = kind(ranks.trainable(model), settings, whole=ranks.pieces(model))
    return Learner(model, optimizer, ranks)


def microbatches(shares=1):
    return pack(random_samples(np.random.default_rng(5), 6), 60, shares=shares)


def updated(learner, batches, steps=2):
    def loss(batch):
        choices = replayed_experts(batch, learner.model.device)
        logprobs, _ = batch_logprobs(learner.model, batch, SAMPLING, choices=choices)
        return -logprobs.sum() / 50, {"nll": -float(logprobs.detach().sum())}

    return [learner.update(batches, loss) for _ in range(steps)]


def copied(model):
    return {name: weight.clone() for name, weight in model.named_weights().items()}


def require_same_change(found, expected, before):
    """A gradient is a sum of some hundred float32 products in another order, so it differs by about
    1e-6 of its size; where it nearly cancels, Adam makes a larger part of a step of that. Of what
    the steps change in a weight, all together differ by less than 1e-3, and so little of the weight
    that a lost or doubled summand would be a thousand times more."""
    for name, weight in expected.items():
        difference, change = (found[name] - weight).norm(), (weight - before[name]).norm()
        assert difference <= 1e-3 * change, (name, difference / change)


class Halves(Ranks):
    """One process that accumulates the shares of several, one after the other."""

    def __init__(self, shares):
        self.shares = shares

    def backward(self, model, microbatches, loss, frozen=()):
        grads, totals = {}, None
        for share in range(self.shares):
            part = super().backward(model, microbatches[share :: self.shares], loss)
            for name, parameter in model.trainable().items():
                if parameter.grad is not None:
                    grads[name] = grads[name] + parameter.grad if name in grads else parameter.grad
                    parameter.grad = None
            if totals is None:
                totals = part
            else:
                totals.add(part.num_loss_tokens, part.finite, part.metrics)
        for name, gradient in grads.items():
            model.trainable()[name].grad = gradient
        return totals
