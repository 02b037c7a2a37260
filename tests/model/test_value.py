"""Value models: a head of one number a token, exactly zero at the start, and a directory that stock
transformers loads."""

import json

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification

from tandem.model.load import load_model
from tandem.plugins.commands.export import export_adapter
from tandem.run_folder.export import export
from tandem.runtime.errors import UserError
from tests.support.tiny import (
    LORA,
    exact_logits,
    moved,
    noise,
    random_documents,
    save_model,
    stock_model,
    tiny_config,
)

KINDS = ("llama", "qwen2", "qwen3", "qwen3_moe")


@pytest.fixture
def language_model(tmp_path):
    return save_model(stock_model(tiny_config("llama")), tmp_path / "language")


def values(model):
    """float32 [T, 1]"""
    return torch.cat(exact_logits(model, random_documents()))


def set_score(model):
    model.load_weights({"score.weight": noise(*model.head.weight.shape, seed=2)})


def stock_values(folder):
    """The value after each prefix: a classifier reads the last token only."""
    load = AutoModelForSequenceClassification.from_pretrained
    return last_values(load(folder, attn_implementation="eager").eval())


@torch.no_grad()
def last_values(stock):
    prefixes = [document[: n + 1] for document in random_documents() for n in range(len(document))]
    return torch.cat([stock(input_ids=torch.as_tensor(prefix)[None]).logits for prefix in prefixes])


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_model_of_a_language_model_starts_at_exactly_zero(kind, tmp_path):
    source = save_model(stock_model(tiny_config(kind)), tmp_path / "language")
    model, tokens = load_model(source, head="value"), load_model(source)
    assert model.head.weight.shape == (1, 96) and not model.head.weight.any()
    out = values(model)
    assert out.shape == (58, 1) and not out.any()
    own, named = model.named_weights(), tokens.named_weights()
    assert own.keys() == named.keys() - {"lm_head.weight"} | {"score.weight"}
    assert all(torch.equal(own[name], named[name]) for name in own.keys() - {"score.weight"})


def test_zero_score_gets_gradient_before_the_backbone(language_model):
    model = load_model(language_model, head="value")
    values(model).sum().backward()
    assert model.head.weight.grad.any()
    assert not any(p.grad.any() for name, p in model.trainable().items() if name != "score.weight")
    set_score(model)
    model.zero_grad()
    values(model).sum().backward()
    assert all(p.grad.any() for name, p in model.trainable().items())


@pytest.mark.parametrize("kind", KINDS)
def test_exported_value_model_is_a_stock_classifier(kind, tmp_path):
    source = save_model(stock_model(tiny_config(kind)), tmp_path / "language")
    model = load_model(source, head="value")
    set_score(model)
    folder = export(model, source, tmp_path / "out", "card")
    assert AutoModelForSequenceClassification.from_pretrained(folder).config.num_labels == 1
    assert json.loads((folder / "config.json").read_text())["id2label"] == {"0": "LABEL_0"}
    assert "local_files_only" not in (folder / "tokenizer_config.json").read_text()
    with torch.no_grad():
        torch.testing.assert_close(values(model), stock_values(folder), rtol=1e-5, atol=5e-5)
        assert torch.equal(values(load_model(str(folder), head="value")), values(model))


def test_a_value_does_not_depend_on_the_tokens_beside_it(language_model):
    model = load_model(language_model, head="value")
    set_score(model)
    with torch.no_grad():
        alone = torch.cat([exact_logits(model, [document])[0] for document in random_documents()])
        assert torch.equal(alone, values(model))
        x = noise(70, 96)
        assert all(torch.equal(model.head(x[:rows]), model.head(x)[:rows]) for rows in range(1, 71))


def test_value_model_from_language_model_not_many_labels(language_model, tmp_path):
    model = load_model(language_model, head="value")
    folder = export(model, language_model, tmp_path / "value", "card")
    with pytest.raises(UserError, match="a reward model") as error:
        load_model(str(folder))
    assert "ForSequenceClassification" in error.value.found
    many = AutoModelForSequenceClassification.from_config(tiny_config(num_labels=3))
    many.save_pretrained(tmp_path / "many")
    with pytest.raises(UserError, match="cannot be loaded"):
        load_model(str(tmp_path / "many"), head="value")


def test_adapter_trains_and_exports_the_score_too(language_model, tmp_path):
    model = load_model(language_model, LORA, head="value")
    assert model.trainable().keys() == model.adapter_weights().keys() | {"score.weight"}
    moved(model)
    folder = export_adapter(model, language_model, tmp_path / "adapter", "card")
    load = AutoModelForSequenceClassification.from_pretrained
    base = load(language_model, num_labels=1, attn_implementation="eager")
    with torch.no_grad():
        found = last_values(PeftModel.from_pretrained(base, folder).eval())
        torch.testing.assert_close(values(model), found, rtol=1e-5, atol=5e-5)
        merged = export(model, language_model, tmp_path / "merged", "card")
        torch.testing.assert_close(values(model), stock_values(merged), rtol=1e-5, atol=5e-5)
        with model.adapter_off():
            assert not torch.equal(values(model), found)
