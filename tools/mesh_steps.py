"""Two optimizer steps of three models by the processes of many meshes, and by one process."""

import tempfile
from dataclasses import replace

import numpy as np
import torch

from tandem.config.parallel import Parallel
from tandem.model.forward import batch_logprobs
from tandem.model.load import load_model
from tandem.model.schedule import threads_of
from tandem.model.tiny import make_tiny
from tandem.runtime.errors import UserError
from tandem.trainer.parallel.checks import check_mesh
from tandem.trainer.parallel.ranks import ParallelRanks
from tests.support.meshes import on_mesh
from tests.support.tiny import exact_model
from tests.support.updates import SAMPLING, Halves, learner_of, microbatches, updated

MODELS = ("the demo's", "Qwen3 of 4 layers", "Qwen3-MoE of 4 layers")
MESHES = [
    {"data": 2},
    {"data": 4},
    {"data": 4, "shard": 2},
    {"tensor": 2},
    {"context": 2},
    {"pipeline": 2},
    {"pipeline": 4},
    {"expert": 2},
    {"expert": 4},
    {"data": 2, "tensor": 2},
    {"data": 2, "context": 2},
    {"data": 2, "pipeline": 2},
    {"data": 2, "expert": 2},
]


def model_of(name, folder, seed=0):
    """Make a model; folder: with the demo's."""
    if name == MODELS[0]:
        return load_model(str(folder))
    kind, own = ("qwen3", {}) if name == MODELS[1] else ("qwen3_moe", {"num_experts": 8})
    return exact_model(kind, seed, num_hidden_layers=4, **own)


def stepped(model, ranks, shares):
    """Return the log-probs of all targets, then make two steps; shares: processes that train
    different microbatches."""
    size = model.config.vocab_size
    batches = [
        replace(batch, tokens=batch.tokens % size, targets=batch.targets % size)
        for batch in microbatches(shares)
    ]
    found = ranks.forward(
        model, batches, lambda batch: batch_logprobs(model, batch, SAMPLING)[0].detach()
    )
    updated(learner_of(model, ranks), batches)
    return np.concatenate(found)


def steps_on(mesh, names, folder):
    """Return (log-probs, weights) of each model, the weights on rank 0."""
    results = []
    for name in names:
        model, ranks = model_of(name, folder), ParallelRanks(mesh)
        ranks.divide(model, torch.float32)
        logprobs = stepped(model, ranks, ranks.shares)
        whole = model_of(name, folder, seed=1) if mesh.rank == 0 else None
        ranks.publish(model, whole)
        results.append((logprobs, None if whole is None else whole.named_weights()))
    return results


def compare(sizes):
    """Return for each model whether the log-probs have the bits of one process, and by how much
    the weights differ after the steps, relative to what those have changed; None where the mesh
    does not divide it."""
    with tempfile.TemporaryDirectory() as folder:
        make_tiny(folder)
        return _compare(Parallel(**sizes), sizes, folder)


def _compare(config, sizes, folder):
    names = [name for name in MODELS if _divides(config, model_of(name, folder))]
    found = on_mesh(steps_on, names, folder, **sizes)[0]
    results = dict.fromkeys(MODELS)
    for name, (logprobs, weights) in zip(names, found, strict=True):
        model, shares = model_of(name, folder), config.data * config.expert
        before = {key: weight.clone() for key, weight in model.named_weights().items()}
        model.split(config.tensor)
        with threads_of(1):
            expected = stepped(model, Halves(shares), shares)
        changes = [
            float((weights[key] - after).norm() / (after - before[key]).norm())
            for key, after in model.named_weights().items()
        ]
        results[name] = bool(np.array_equal(logprobs, expected)), max(changes)
    return results


def _divides(config, model):
    try:
        check_mesh(config, model.config)
    except UserError:
        return False
    return True
