"""Megatron's models have the exact model's weights to the last bit, and its log-probs, gradients
and updates but for rounding.

They run on the CPU, over gloo, with tests/support/megatron_cpu.py. Where megatron-core is not
installed (`make megatron`) all but the error is skipped.
"""

from functools import cache
from importlib import metadata
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from tandem.config.parallel import Parallel
from tandem.config.schema import Config
from tandem.jobs.exactness import require_correction
from tandem.jobs.models import check_shape
from tandem.model.forward import batch_logprobs
from tandem.plugins.megatron.core import require_megatron, version
from tandem.plugins.megatron.trainer import check_megatron
from tandem.runtime.errors import UserError
from tandem.trainer.pack import pack
from tandem.trainer.ranks import ALONE
from tandem.types import SamplingDistribution
from tests.support import megatron_cpu
from tests.support.meshes import collected, on_mesh
from tests.support.tiny import exact_model, random_samples, tiny_config
from tests.support.updates import learner_of

INSTALLED = find_spec("megatron") is not None
installed = pytest.mark.skipif(not INSTALLED, reason="megatron-core is not installed")
SAMPLING = SamplingDistribution(temperature=0.7)
KINDS = ["qwen3", "llama", "qwen2", "mistral", "qwen3_moe"]
# Rounding in float32, of other sums and another SwiGLU, rotary embedding and norm. The largest
# differences that were measured: 3e-6, 1.4e-6, 5e-4, 1.5e-5.
NATS = 2e-5  # of a log-prob
RELATIVE = 1e-5  # of a gradient, in the L2 norm of a tensor
MOVED = 5e-3  # of two updates' change: AdamW divides by a gradient that may be rounding alone
METRICS = 1e-4  # of a metric, the second update's included
# Where the processes divide what is not rounded alike, relative to one process.
MESHES = [
    ("qwen3", {"tensor": 2}),
    ("qwen2", {"tensor": 2}),
    ("qwen3", {"data": 2}),
    ("qwen3_moe", {"expert": 2}),
    ("qwen3", {"pipeline": 2}),
    ("qwen2", {"pipeline": 2}),
    ("qwen3", {"context": 2}),
    ("qwen3", {"pipeline": 2, "tensor": 2}),
]


def model_of(kind, seed=0, checkpointing=False):
    # experts that two processes divide evenly
    model = exact_model(kind, seed, **({"num_experts": 6} if kind == "qwen3_moe" else {}))
    model.checkpointing = checkpointing
    return model


def microbatches():
    """Packed samples, every other group of which shares a prompt."""
    return pack(random_samples(np.random.default_rng(5), 6), 60, shares=2)


def policy_loss(model, batch):
    """A clipped policy loss with an entropy bonus, some of whose ratios are clipped."""
    logprobs, entropy = batch_logprobs(model, batch, SAMPLING)
    old = torch.linspace(-0.3, 0.3, len(logprobs)) + logprobs.detach()
    advantages = torch.linspace(-1.0, 2.0, len(logprobs))
    ratio = (logprobs - old).exp()
    terms = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return (terms - 0.01 * entropy).sum() / 50, {"entropy": float(entropy.detach().sum())}


def logprobs_of(model, ranks):
    with torch.no_grad():
        return ranks.forward(
            model, microbatches(), lambda batch: batch_logprobs(model, batch, SAMPLING)[0]
        )


def gradients_of(model, ranks):
    ranks.backward(model, microbatches(), lambda batch: policy_loss(model, batch))
    found = {name: p.grad for name, p in ranks.trainable(model).items()}
    for parameter in ranks.trainable(model).values():
        parameter.grad = None
    return found


def update_twice(model, ranks):
    learner = learner_of(model, ranks)
    return [
        learner.update(microbatches(), lambda batch: policy_loss(model, batch)) for _ in range(2)
    ]


def by_megatron(mesh, kinds, checkpointing=False):
    """Return for each kind: weights there and back, log-probs, gradients, metrics of two updates,
    and the weights after them."""
    megatron_cpu.prepare()
    from tandem.plugins.megatron.model import MegatronRanks

    def published():
        target = model_of(kind, seed=1) if mesh.rank == 0 else None
        ranks.publish(model, target)
        return None if target is None else target.named_weights()

    ranks, found = MegatronRanks(mesh), {}
    for kind in kinds:
        model = ranks.divide(model_of(kind, checkpointing=checkpointing), torch.float32)
        weights, logprobs = published(), logprobs_of(model, ranks)
        gradients = collected(ranks.pieces(model), gradients_of(model, ranks))
        found[kind] = weights, logprobs, gradients, update_twice(model, ranks), published()
    return found


@cache
def run(kinds, **sizes):
    return on_mesh(by_megatron, kinds, **sizes)


@cache
def expected(kind):
    model = model_of(kind)
    start = {name: weight.clone() for name, weight in model.named_weights().items()}
    logprobs, gradients = logprobs_of(model, ALONE), gradients_of(model, ALONE)
    return start, logprobs, gradients, update_twice(model, ALONE), model.named_weights()


def far(found, wanted):
    """The largest distance of a tensor, relative to its norm."""
    assert found.keys() == wanted.keys()
    return max(float((found[n] - w).norm() / w.norm()) for n, w in wanted.items())


def require_equal(found, kind):
    weights, logprobs, gradients, rows, after = found
    start, wanted_logprobs, wanted_gradients, wanted_rows, wanted_after = expected(kind)
    assert weights.keys() == start.keys()
    assert all(torch.equal(weights[name], weight) for name, weight in start.items())
    assert max(np.abs(a - b).max() for a, b in zip(logprobs, wanted_logprobs, strict=True)) < NATS
    assert far(gradients, wanted_gradients) < RELATIVE
    moved = {name: after[name] - weight for name, weight in start.items()}
    assert far(moved, {n: wanted_after[n] - weight for n, weight in start.items()}) < MOVED
    for row, wanted in zip(rows, wanted_rows, strict=True):
        # Megatron's routers are not observed
        wanted = {n: value for n, value in wanted.items() if not n.startswith("router/")}
        assert row == pytest.approx(wanted, rel=METRICS)


def _skip_old(kind):
    if kind == "qwen3_moe" and version(metadata.version("megatron-core")) < (0, 19):
        pytest.skip("before 0.19 the router of experts needs Transformer Engine")


@installed
@pytest.mark.parametrize("kind", KINDS)
def test_one_process_trains_as_the_exact_model_but_for_rounding(kind):
    """Its weights come back to the last bit."""
    _skip_old(kind)
    together = (kind,) if kind == "qwen3_moe" else tuple(KINDS[:-1])
    require_equal(run(together)[0][kind], kind)


@installed
@pytest.mark.parametrize(("kind", "sizes"), MESHES)
def test_several_processes_train_as_one_but_for_rounding(kind, sizes):
    _skip_old(kind)
    kinds = tuple(k for k, of in MESHES if of == sizes)
    found = run(kinds, **sizes)
    require_equal(found[0][kind], kind)
    assert found[1][kind][3] == found[0][kind][3]  # metrics are those of all processes


@installed
def test_stages_that_recompute_their_layers_have_the_same_bits():
    plain = run(tuple(k for k, of in MESHES if of == {"pipeline": 2}), pipeline=2)[0]["qwen2"]
    recomputed = on_mesh(by_megatron, ("qwen2",), True, pipeline=2)[0]["qwen2"]
    for found, wanted in zip(recomputed[2:5:2], plain[2:5:2], strict=True):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.mark.skipif(INSTALLED, reason="megatron-core is installed")
def test_a_missing_package_is_an_error_that_names_the_extra():
    with pytest.raises(UserError, match=r"pip install 'tandem-rl\[megatron\]'"):
        require_megatron()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@installed
def test_without_a_gpu_megatron_is_refused():
    with pytest.raises(UserError, match="no GPU"):
        require_megatron()


def test_rl_with_megatron_needs_a_correction():
    with pytest.raises(UserError, match=r"rl\.correction"):
        require_correction(Config(train={"backend": "megatron"}))
    require_correction(Config(train={"backend": "megatron"}, rl={"correction": "tis"}))
    require_correction(Config())


def test_models_that_megatron_does_not_train_are_refused_by_name():
    with pytest.raises(UserError, match="a value or reward model"):
        check_megatron(tiny_config(), Parallel(), "value")
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    with pytest.raises(UserError, match="yarn"):
        check_megatron(tiny_config(rope_parameters=rope), Parallel())
    with pytest.raises(UserError, match="experts"):
        check_megatron(tiny_config("qwen3_moe"), Parallel(tensor=2))
    with pytest.raises(UserError, match="2 layers in 3 equal stages"):
        check_megatron(tiny_config(), Parallel(pipeline=3))
    check_megatron(tiny_config(), Parallel(tensor=2))


def test_such_a_model_is_refused_before_processes_start():
    config = tiny_config("qwen3_moe", attention_bias=True, num_experts=8)
    with pytest.raises(UserError, match=r"a bias in attention_bias; experts with parallel\.tensor"):
        check_shape(
            Config(train={"backend": "megatron"}, parallel={"tensor": 2}), config, "model.path"
        )
