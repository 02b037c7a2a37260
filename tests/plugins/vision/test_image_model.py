"""Models that read images: features, positions and log-probs are stock transformers' own; an image
is part of the prompt."""

import json

import numpy as np
import pytest
import torch
from peft import PeftModel

from tandem.engine.engine import make_engine
from tandem.model.config_file import check_model
from tandem.model.load import load_model
from tandem.model.lora import Lora
from tandem.model.tokenizer import load_tokenizer
from tandem.plugins.commands.export import export_adapter
from tandem.plugins.vision import store
from tandem.plugins.vision.images import load_image_reader
from tandem.runtime.image_tokens import IMAGE, image_run, name_of
from tandem.trainer.pack import pack
from tandem.types import Request, Sample, SamplingParams
from tests.support.image_models import (
    KINDS,
    picture,
    prompts_of,
    save_image_model,
    stock_image_model,
    stock_logits,
)
from tests.support.parity import words

GAP = 1e-4  # nats
LORA = Lora(rank=2, alpha=4.0, targets=("all-linear",), seed=0)


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    return save_image_model(request.param, tmp_path_factory.mktemp(request.param))


def chat(*names, text="How many?"):
    parts = [{"type": "image", "image": name} for name in names]
    return ({"role": "user", "content": [*parts, {"type": "text", "text": text}]},)


def requests_of(prompts, count=3, new=9):
    params = SamplingParams(max_new_tokens=new)
    return [
        Request(key=7 * n + row, prompt=prompt, params=params)
        for row, prompt in enumerate(prompts)
        for n in range(count)
    ]


def test_tokens_name_the_image_and_its_place():
    name = name_of(b"some file")
    run = image_run(name, 5)
    assert run.dtype == np.int64 and (run >= IMAGE).all() and len(set(run.tolist())) == 5
    assert ((run - IMAGE) >> 16 == int(name, 16)).all() and (run & 0xFFFF).tolist() == [*range(5)]


def test_log_probs_are_those_of_a_stock_pass(folder):
    """Two images in a prompt, one wider than high; samples of a group share the prompt's pass."""
    names = [store.put(picture(1)), store.put(picture(2, width=56))]
    prompts = prompts_of(folder, chat(*names), chat(names[1]))
    engine = make_engine(load_model(folder), words, cache_bytes=64 << 20, max_batch=8)
    requests, compared = requests_of(prompts), 0
    placeholder = load_image_reader(folder, load_tokenizer(folder)).token_id
    for request, completion in zip(requests, engine.generate(requests), strict=True):
        if placeholder in completion.tokens:  # stock would look for its image
            continue
        compared += 1
        shown = names if request.prompt is prompts[0] else names[1:]
        tokens = np.concatenate([request.prompt, completion.tokens])
        table = stock_logits(folder, shown, tokens[:-1]).log_softmax(-1).numpy()
        expected = table[range(len(request.prompt) - 1, len(tokens) - 1), completion.tokens]
        np.testing.assert_allclose(completion.logprobs, expected, atol=GAP)
    assert compared >= 4 and 0 <= engine.logprob_gap() <= GAP


def test_packed_pass_agrees_with_whole_sequences(folder):
    """Samples that share a prompt, beside one of another image and one of text."""
    names = [store.put(picture(n)) for n in (1, 2)]
    text = ({"role": "user", "content": "No image."},)
    first, second, third = prompts_of(folder, chat(names[0]), chat(names[1]), text)
    answers = [np.arange(20, 20 + n) for n in (6, 3, 5, 4)]
    groups = ((0, first), (0, first), (1, second), (2, third))
    samples = [
        Sample(
            tokens=np.concatenate([prompt, answer]),
            loss_mask=np.arange(len(prompt) + len(answer)) >= len(prompt),
            prefix=len(prompt),
            group=group,
        )
        for (group, prompt), answer in zip(groups, answers, strict=True)
    ]
    model = load_model(folder)
    [batch] = pack(samples, 4096)
    plan = model.packed_plan(batch.segments)
    with torch.no_grad():
        hidden = model.hidden(
            torch.from_numpy(batch.tokens), torch.from_numpy(batch.positions), plan
        )
        found = model.head(hidden[torch.from_numpy(batch.rows)])
        whole = [
            model.head(model.run(torch.from_numpy(s.tokens[None, :-1])))[0, s.prefix - 1 :]
            for s in (samples[n] for n in batch.samples)
        ]
    torch.testing.assert_close(found, torch.cat(whole), atol=1e-4, rtol=0)


def test_other_image_is_another_prompt(folder):
    a, b = (store.put(picture(n)) for n in (3, 4))
    first, second, again = prompts_of(folder, chat(a), chat(b), chat(a))
    assert first.tolist() == again.tolist() != second.tolist()
    assert first[first < IMAGE].tolist() == second[second < IMAGE].tolist()
    model = load_model(folder)
    with torch.no_grad():
        states = [model.run(torch.from_numpy(one[None])) for one in (first, second, again)]
    assert torch.equal(states[0], states[2])
    assert (states[0][0, -1] - states[1][0, -1]).abs().max() > 1e-3


def test_sampled_placeholder_is_a_token_as_any_other(folder):
    """A random model says its own placeholder; the next pass must not look for its image."""
    [prompt] = prompts_of(folder, chat(store.put(picture(5))))
    model = load_model(folder)
    reader = load_image_reader(folder, load_tokenizer(folder))
    tokens = torch.from_numpy(np.append(prompt, [reader.token_id, 20]))[None]
    with torch.no_grad():
        before, after = model.run(tokens[:, :-2]), model.run(tokens)
    torch.testing.assert_close(after[:, :-2], before, atol=1e-4, rtol=0)


def test_every_part_is_trained_and_an_adapter_only_in_the_language_model(folder):
    name = store.put(picture(6))
    [prompt] = prompts_of(folder, chat(name))
    whole, adapted = load_model(folder), load_model(folder, LORA)
    for model in (whole, adapted):
        model.run(torch.from_numpy(prompt[None])).square().sum().backward()
    still = {n for n, p in whole.module.named_parameters() if p.grad is None or not p.grad.any()}
    assert still <= {"lm_head.weight"}  # `run` ends before it
    assert adapted.adapted and not [n for n in adapted.adapted if "vis" in n]
    assert all("lora" in name for name in adapted.trainable())


def test_checkpointing_gives_the_same_gradients(folder):
    name = store.put(picture(7))
    [prompt] = prompts_of(folder, chat(name))
    found = []
    for checkpointing in (False, True):
        model = load_model(folder)
        model.checkpointing = checkpointing
        model.run(torch.from_numpy(prompt[None])).square().sum().backward()
        found.append({n: p.grad for n, p in model.module.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_exported_adapter_is_read_by_peft(folder, tmp_path):
    model = load_model(folder, LORA)
    with torch.no_grad():
        for name, factor in model.adapter_weights().items():
            if "lora_B" in name:
                factor.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    name = store.put(picture(8))
    [prompt] = prompts_of(folder, chat(name))
    export_adapter(model, folder, tmp_path / "adapter", "# An adapter\n")
    adapted = PeftModel.from_pretrained(stock_image_model(folder), tmp_path / "adapter")
    with torch.no_grad():
        found = model.head(model.run(torch.from_numpy(prompt[None])))[0]
    expected = stock_logits(folder, [name], prompt, adapted)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)
    assert (expected - stock_logits(folder, [name], prompt)).abs().max() > 0.01


def test_older_config_has_the_texts_fields_beside_the_others(tmp_path):
    folder = save_image_model("qwen2_5_vl", tmp_path / "model")
    expected = check_model(folder)
    file = tmp_path / "model/config.json"
    values = json.loads(file.read_text())
    text = {k: v for k, v in values.pop("text_config").items() if k != "model_type"}
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope["rope_theta"]
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    values["vision_config"]["model_type"] = "qwen2_5_vl"
    file.write_text(json.dumps({**values, **text, "auto_map": {"AutoConfig": "evil.Config"}}))
    found = check_model(folder)
    assert not hasattr(found, "auto_map")
    for old, new in ((found, expected), (found.vision_config, expected.vision_config)):
        assert old.model_type == new.model_type
    changed = {"rope_parameters"}
    old, new = (one.get_text_config().to_dict() for one in (found, expected))
    assert {k: v for k, v in old.items() if k not in changed} == {
        k: v for k, v in new.items() if k not in changed
    }
    assert old["rope_parameters"]["mrope_section"] == new["rope_parameters"]["mrope_section"]
