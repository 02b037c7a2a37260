"""Commands on a machine with GPUs, with a stand-in for them (tests/support/fake_cuda.py)."""

import sys
from types import SimpleNamespace

import pytest
import torch

from tandem.config.recipe import load_config
from tandem.jobs import engines
from tandem.jobs.models import placement, releases_cache
from tandem.model.placement import Placement, place_models
from tandem.model.probe import Exactness
from tandem.plugins.plan.footprint import model_sizes
from tandem.plugins.start import doctor
from tandem.runtime.disk import human_bytes
from tandem.runtime.errors import UserError
from tests.support.fake_cuda import MEMORY, FakeCuda
from tests.support.home import output_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")

SECOND = Placement(torch.device("cuda", 1), torch.bfloat16)


@pytest.fixture
def gpus():
    with FakeCuda() as gpus:
        yield gpus


def config_of(home, *settings):
    return load_config(home / "recipe.toml", list(settings))


def test_auto_is_the_first_gpu_and_bfloat16(gpus):
    assert place_models("auto", "auto") == Placement(torch.device("cuda", 0), torch.bfloat16)
    assert place_models("cuda:1", "auto") == SECOND
    assert place_models("cuda", "float32").dtype == torch.float32
    assert place_models("cpu", "auto").device.type == "cpu"
    assert SECOND.processor() == "Fake H100, sm_90, CUDA 13.0"
    with pytest.raises(UserError, match=r"2 that this PyTorch can use(.|\n)*a number below 2"):
        place_models("cuda:2", "auto")


def test_a_gpu_without_bfloat16_computes_in_float32():
    with FakeCuda(bfloat16=False):
        assert place_models("auto", "auto").dtype == torch.float32
        with pytest.raises(UserError, match=r"no bfloat16(.|\n)*Fake H100"):
            place_models("auto", "bfloat16")


def test_cache_leaves_a_gpu_for_an_update(gpus, home):
    assert releases_cache(config_of(home), SECOND)


def test_matmul_kernel_of_a_gpu_is_chosen_before_the_probe(gpus, home, monkeypatch):
    config, chosen = config_of(home, "model.device=cuda:1"), []
    monkeypatch.setattr(engines, "probe", lambda *_: Exactness(parity=[], thread_dependent=[]))
    monkeypatch.setattr(
        engines, "choose_matmul", lambda model, *_, alone, microbatch: chosen.append(alone)
    )
    model = SimpleNamespace(
        gap="",
        device=SECOND.device,
        heads=(2, 1, 8),
        config=model_sizes(config, "sft").policy.shape,
        kernels=SimpleNamespace(chosen="plain"),
    )
    engines.probe_exactness(config, model, print)
    engines.probe_exactness(config, model, print, alone=False)
    assert chosen == [True, False]
    assert placement(config).processor() == "Fake H100, sm_90, CUDA 13.0"


def test_plan_compares_a_run_with_the_memory_of_the_gpu(gpus, home):
    output = output_of("plan", home / "recipe.toml", "--values")
    assert "memory of the GPU" in output
    assert f"of {human_bytes(MEMORY)} of this GPU" in output
    for words in ("here cuda:0", "here bfloat16"):
        assert words in " ".join(output.split())


def test_doctor_names_the_gpus_and_what_is_missing_without_triton(gpus, monkeypatch):
    pytest.importorskip("triton")
    found = doctor._gpu()
    assert found.ok and "; driver " in found.detail
    assert "cuda:1 Fake H100, sm_90, CUDA 13.0, 40.0 GiB of 80.0 GiB free" in found.detail
    assert [name for name, _ in doctor._gpu_checks()] == ["gpu float32", "gpu bfloat16"]
    monkeypatch.setitem(sys.modules, "triton", None)
    found = doctor._gpu()
    assert not found.ok and found.detail.endswith("pip install triton")
    assert doctor._gpu_checks() == []
