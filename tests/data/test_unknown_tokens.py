"""The warning of text that a tokenizer has no tokens for."""

import pytest

from tandem.config.schema import Data
from tandem.data.renderer import ChatRenderer, load_renderer
from tandem.model.tiny import make_tokenizer
from tandem.plugins.offline.loss_mask import training_samples
from tandem.types import Problem
from tests.support.byte_models import make_model


def renderer_of(tokenizer):
    return ChatRenderer(tokenizer, tokenizer.get_chat_template(), {tokenizer.eos_token_id}, "tiny")


def problem(uid, text):
    return Problem(uid=uid, messages=({"role": "user", "content": text},), answer="")


@pytest.fixture
def tiny():
    return renderer_of(make_tokenizer())


def test_prompts_with_unknown_characters_are_counted_in_one_warning(tiny, caplog):
    texts = ["réverse ü", "plain", *["plain"] * 2000, "äéîõû"]
    problems = [problem(str(number), text) for number, text in enumerate(texts)]
    _, lengths = tiny.check_lengths(problems, Data(), key="eval.data")
    assert len(lengths) == len(problems)
    [record] = caplog.records
    warning = record.getMessage()
    assert warning.startswith("2 of 2,003 prompts of eval.data have text that the tokenizer does ")
    assert "('é', 'ü', 'ä', 'î', 'õ' and others)" in warning
    assert "the model reads <unk>" in warning and "tandem tiny DIR --from FILE" in warning


def test_chats_with_unknown_characters_are_counted_in_one_warning(tiny, caplog):
    chats = [
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": text}]
        for text in ("b", "é", "c")
    ]
    training_samples(tiny, chats)
    [record] = caplog.records
    assert record.getMessage().startswith("1 of 3 chats of sft.train have text")


def test_a_tokenizer_of_bytes_and_one_of_gpt_2s_kind_know_every_text(tmp_path, caplog):
    load_renderer(make_model(tmp_path)).check_lengths([problem("0", "é")], Data())
    tokenizer = make_tokenizer()
    tokenizer.unk_token = tokenizer.eos_token  # which the template writes after a prompt
    renderer_of(tokenizer).check_lengths([problem("0", "a")], Data())
    assert not caplog.records
