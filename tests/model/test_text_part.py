"""The language model of a checkpoint that also reads images or sound runs alone: with transformers'
logits of the whole, and exported as a model of its own."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

from tandem.config.schema import Config
from tandem.jobs.models import check_models
from tandem.model.config_file import check_model
from tandem.model.load import load_model
from tandem.model.stock import WEIGHTS
from tandem.run_folder.export import export
from tandem.runtime.errors import UserError
from tests.support.architectures import INEXACT
from tests.support.parity import gap_of
from tests.support.part_models import PARTS, save_whole
from tests.support.tiny import (
    change_json,
    exact_logits,
    moved,
    random_tokens,
    same_weights,
    stock_logits,
)

CANNOT_RUN, UNREADABLE = "this model cannot run", r"config\.json cannot be read"
FP8 = {"quantization_config": {"quant_method": "fp8"}}


@pytest.fixture(
    scope="module",
    params=[
        kind
        if kind in ("gemma3", "llava", "llama4")
        else pytest.param(kind, marks=pytest.mark.nightly)
        for kind in PARTS
    ],
)
def saved(request, tmp_path_factory):
    """(kind of the whole, its directory)"""
    return request.param, save_whole(request.param, tmp_path_factory.mktemp(request.param))


def test_text_has_the_logits_of_the_whole_model(saved):
    kind, path = saved
    whole = AutoModelForMultimodalLM.from_pretrained(path, attn_implementation="eager").eval()
    model, tokens = load_model(path), random_tokens(np.random.default_rng(0), 90)
    assert model.config.model_type == PARTS[kind]
    assert bool(model.gap) == (PARTS[kind] in (*INEXACT, "llama4_text"))
    expected, found = stock_logits(whole, tokens), logits_of(model, tokens)
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_export_is_the_language_model_alone(saved, tmp_path):
    kind, path = saved
    model = moved(load_model(path))
    export(model, path, tmp_path / "out", "# A model\n")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == PARTS[kind]
    names = load_file(tmp_path / "out" / WEIGHTS)
    assert not [name for name in names if "language_model" in name or "vision" in name]
    tokens = random_tokens(np.random.default_rng(0), 50)
    again = logits_of(load_model(str(tmp_path / "out")), tokens)
    assert torch.equal(again, logits_of(model, tokens))
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    expected = stock_logits(stock.eval(), tokens)
    assert (again - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_engine_and_policy_agree(tmp_path):
    assert gap_of(load_model(save_whole("gemma3", tmp_path)), prompts=3, longest=120) == 0.0


def test_names_of_transformers_before_version_5(tmp_path):
    path = save_whole("llava", tmp_path)
    expected, file = load_model(path), tmp_path / WEIGHTS
    older = {
        name.replace("language_model.model.", "model.language_model.").replace(
            "language_model.lm_head.", "lm_head."
        ): weight
        for name, weight in load_file(file).items()
    }
    assert older.keys() != load_file(file).keys()
    save_file(older, file, metadata={"format": "pt"})
    assert same_weights(load_model(path), expected)


@pytest.mark.parametrize("tied", [False, True])
def test_an_output_projection_is_tied_unless_the_files_have_one(tied, tmp_path):
    path = save_whole("llava", tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    tie = {"tie_word_embeddings": True}
    change_json(tmp_path / "config.json", text_config=text | tie, **tie)
    if tied:
        weights = load_file(tmp_path / WEIGHTS)
        del weights["language_model.lm_head.weight"]
        save_file(weights, tmp_path / WEIGHTS, metadata={"format": "pt"})
    model = load_model(path)
    assert (model.head.weight is model.module.get_input_embeddings().weight) == tied
    assert model.module.config.tie_word_embeddings == tied


def test_vllm_is_refused(tmp_path):
    path = save_whole("gemma3", tmp_path)
    with pytest.raises(UserError, match="vLLM would load") as error:
        check_models(Config(model={"path": path}, rollout={"engine": "vllm", "workers": 1}))
    assert "gemma3_text" in error.value.found


@pytest.mark.parametrize(
    ("values", "wrong", "reason"),
    [
        (
            {"model_type": "clip", "text_config": {}},
            CANNOT_RUN,
            "transformers cannot run by itself",
        ),
        ({"model_type": "gemma3", "text_config": {"per_layer_config": [1]}}, UNREADABLE, "Error"),
        ({"model_type": "llava", "text_config": "llama"}, CANNOT_RUN, "architecture llava"),
        ({"model_type": ["llava"], "text_config": {}}, UNREADABLE, "unhashable"),
        ({"model_type": "gemma3", "text_config": {}, **FP8}, CANNOT_RUN, "quantized weights"),
        ({"model_type": "gemma3", "text_config": FP8}, CANNOT_RUN, "quantized weights"),
        ({"model_type": "t5"}, CANNOT_RUN, "architecture t5"),
    ],
)
def test_a_model_that_cannot_run_is_refused_by_its_config(values, wrong, reason, tmp_path):
    # no weights: had they been looked for, the error would be another
    (tmp_path / "config.json").write_text(json.dumps(values))
    for load in (check_model, load_model):
        with pytest.raises(UserError, match=wrong) as error:
            load(str(tmp_path))
        assert reason in error.value.found and str(tmp_path) in error.value.where


@torch.no_grad()
def logits_of(model, tokens):
    return exact_logits(model, [tokens])[0]
