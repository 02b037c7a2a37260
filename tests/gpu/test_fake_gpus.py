"""Engine and learner on a GPU that is not there (tests/support/fake_cuda.py): where tensors are,
which GPU is the current one, and what is asked of streams. What only a GPU can show is the capture
of a graph, and time."""

from functools import partial

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from tandem.engine.engine import Engine
from tandem.engine.graphs import StepGraphs
from tandem.engine.lookahead import Lookahead
from tandem.model.load import make_exact
from tandem.plugins.optim.muon import orthogonalized
from tandem.plugins.optim.offload import OffloadedOptimizer
from tandem.plugins.triton.matmul import matmul
from tandem.trainer.optimizer import Optimizer
from tandem.trainer.pack import pack
from tandem.trainer.ranks import ALONE
from tests.support.engines import as_it_is, facts, request
from tests.support.fake_cuda import FakeCuda
from tests.support.kernels import BF16, FP32, ON_GPU, triton_everywhere
from tests.support.parity import words
from tests.support.tiny import random_samples, stock_model, tiny_config
from tests.support.updates import copied, learner_of, updated

pytestmark = pytest.mark.skipif(ON_GPU, reason="there is a GPU")

SHAPE = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 72, "num_attention_heads": 2}
SHAPE |= {"num_key_value_heads": 1, "num_hidden_layers": 1}
SECOND = torch.device("cuda", 1)


def model_on(device, dtype=FP32):
    stock = stock_model(tiny_config("qwen3", **SHAPE))
    for parameter in stock.parameters():
        parameter.data = parameter.data.to(dtype)
    return make_exact(stock.to(device))


def generated(device):
    """Completions of two requests, the engine that made them, and its gap to the packed pass."""
    model = model_on(device)
    engine = Engine(model, words, cache_bytes=1 << 18, max_batch=3)
    engine.lookahead = Lookahead(model, engine.cache, 3, as_it_is)
    done = engine.generate([request(n, [n, 5], max_new_tokens=4) for n in range(2)])
    return [facts(completion) for completion in done], engine.logprob_gap(), engine


def test_engine_computes_on_the_gpu_of_its_model_and_not_on_the_first():
    with triton_everywhere():
        expected, _, _ = generated("cpu")
    with FakeCuda() as gpus:
        found, gap, engine = generated(SECOND)
        engine.rest()
        assert engine.cache.keys == () and ("empty_cache",) in gpus.log
    assert found == expected and gap == 0.0
    used = {entry[1] for entry in gpus.log if entry[0] in ("launch", "record_event", "synchronize")}
    assert used == {1}
    assert ("pin", None) in gpus.log  # uploads are pinned


def test_decode_steps_are_captured_on_the_gpu_of_the_model():
    with FakeCuda() as gpus:
        engine = Engine(model_on(SECOND), words, cache_bytes=1 << 18, max_batch=3)
        graphs = StepGraphs(engine.lookahead._step.graphs._new_capture)
        torch.cuda.set_device(0)  # as another thread begins
        for _ in range(3):  # plain, captured and replayed, replayed
            graphs.run("a step", lambda: gpus.log.append(("step", gpus.current)))
    steps = [entry for entry in gpus.log if entry[0] in ("step", "capture", "replay")]
    inside = [("capture", 1, "thread_local"), ("step", 1)]
    assert steps == [("step", 0), *inside, ("replay", 0), ("replay", 0)]


def test_memory_of_descriptors_is_on_the_gpu_of_the_product():
    from triton.runtime._allocation import _allocator

    with FakeCuda():
        x = torch.ones(16, 32, device=SECOND)
        with torch.cuda.device(1):
            matmul(x, x, kernel="tma")
        assert _allocator.get()(128, 128, None).device == SECOND


def updated_on(device, dtype, kind=Optimizer):
    """Metrics of two updates of a model, its weights after them, and the learner."""
    batches = pack(random_samples(np.random.default_rng(5), 1), 60)
    learner = learner_of(model_on(device, dtype), ALONE, kind=kind)
    metrics = updated(learner, batches)
    assert {weight.device for weight in learner.model.parameters()} == {torch.device(device)}
    return metrics, {n: w.cpu().tolist() for n, w in copied(learner.model).items()}, learner


def test_update_on_the_second_gpu_has_the_bits_of_the_same_kernels_elsewhere():
    with triton_everywhere():
        expected = updated_on("cpu", FP32)[:2]
    with FakeCuda() as gpus:
        assert updated_on(SECOND, FP32)[:2] == expected
    assert set(gpus.log) == {("launch", 1)}


def test_state_of_an_update_leaves_the_gpu_through_pinned_memory():
    with FakeCuda():
        expected = updated_on(SECOND, BF16)[:2]
    with FakeCuda() as gpus:
        metrics, weights, learner = updated_on(
            SECOND, BF16, partial(OffloadedOptimizer, bucket=5000)
        )
        assert (metrics, weights) == expected
        optimizer = learner.optimizer
        kept = {**optimizer.weights(), **optimizer.state()}
        assert not any(t.is_cuda for name, t in kept.items() if not name.startswith("step."))
    assert {entry[0] for entry in gpus.log} == {"pin", "launch", "synchronize"}
    assert {entry[1] for entry in gpus.log if entry[0] != "pin"} == {1}


def test_muon_multiplies_in_bfloat16_on_a_gpu():
    matrix = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
    with FakeCuda():
        found = orthogonalized(matrix.to(SECOND))
        assert found.device == SECOND and found.dtype == torch.float32
        found = found.cpu()
    assert torch.equal(found, found.bfloat16().float())
    torch.testing.assert_close(found, orthogonalized(matrix), rtol=0.1, atol=0.05)
