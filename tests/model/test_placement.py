"""Devices and types of weights by name."""

import pytest
import torch

from tandem.model.placement import CPU_FLOAT32, Placement, place_models
from tandem.runtime.errors import UserError


def test_a_cpu_computes_in_float32_unless_told():
    assert place_models("cpu", "auto") == CPU_FLOAT32
    assert place_models("cpu", "bfloat16") == Placement(torch.device("cpu"), torch.bfloat16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_that_is_not_there_is_named_and_auto_is_the_cpu(device):
    assert place_models("auto", "auto") == CPU_FLOAT32
    with pytest.raises(UserError, match=rf"no such GPU\n.*model.device = {device}"):
        place_models(device, "auto")


def test_other_words_are_refused():
    for device, dtype in (("gpu", "auto"), ("cuda:-1", "auto"), ("cpu", "float8")):
        with pytest.raises(UserError, match=rf"{device}, {dtype}"):
            place_models(device, dtype)
