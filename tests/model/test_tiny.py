"""The tiny model and its character tokenizer, as a user loads them."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.data.algebra import generate
from tandem.model.tiny import make_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    make_tiny(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def encode(tokenizer, text):
    return tokenizer(text)["input_ids"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "a  b",
        " lead and trail ",
        "x+3=8\nAnswer: 5",
        "\n\n",
        "Answer:5 Answer:  7",
        "".join(map(chr, range(32, 127))),
    ],
)
def test_text_comes_back_exactly(tokenizer, text):
    assert tokenizer.decode(encode(tokenizer, text)) == text


def test_every_character_is_a_token_except_the_answer_marker(tokenizer):
    assert len(encode(tokenizer, "x+3=8\n")) == 6
    assert len(encode(tokenizer, "Answer: 42")) == 3
    assert len(encode(tokenizer, "Answer:")) == 7


def test_an_unknown_character_becomes_one_unk(tokenizer):
    assert encode(tokenizer, "é") == [tokenizer.unk_token_id]


def test_all_data_set_text_is_known(tokenizer):
    for level in ("easy", "school"):
        for row in generate("train", 40, 0, level):
            text = row["prompt"][0]["content"] + row["extra_info"]["solution"]
            assert tokenizer.unk_token_id not in encode(tokenizer, text)


def test_the_template_renders_turns_and_the_assistants_header(tokenizer):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2x=4, x?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|system|>Be brief.<|end|><|user|>2x=4, x?<|end|><|assistant|>"
    chat.append({"role": "assistant", "content": "Answer: 2"})
    assert tokenizer.apply_chat_template(chat, tokenize=False) == text + "Answer: 2<|end|>"


def test_a_chat_tokenizes_as_its_prompt_followed_by_the_reply(tokenizer):
    chat = [{"role": "user", "content": "x?"}, {"role": "assistant", "content": "x=1\nAnswer: 1"}]
    prompt = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True)["input_ids"]
    whole = tokenizer.apply_chat_template(chat)["input_ids"]
    assert whole == prompt + encode(tokenizer, "x=1\nAnswer: 1") + [tokenizer.eos_token_id]


def test_an_unknown_role_is_refused(tokenizer):
    with pytest.raises(Exception, match="unknown role: critic"):
        tokenizer.apply_chat_template([{"role": "critic", "content": "no"}])


def test_the_model_has_under_a_million_parameters_and_one_row_a_token(folder, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert 800_000 < model.num_parameters() < 1_000_000
    assert model.dtype == torch.float32
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|end|>")


def test_the_same_seed_gives_the_same_files_and_another_seed_other_weights(folder, tmp_path):
    torch.manual_seed(99)  # the caller's generator must neither matter nor move
    before = torch.get_rng_state()
    make_tiny(tmp_path / "again")
    assert torch.equal(torch.get_rng_state(), before)
    make_tiny(tmp_path / "other", seed=1)
    for file in folder.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != (folder / "model.safetensors").read_bytes()


def test_the_shape_can_be_chosen(tmp_path):
    make_tiny(tmp_path, hidden=32, layers=1, heads=2, kv_heads=1, intermediate=64)
    config = AutoModelForCausalLM.from_pretrained(tmp_path).config
    assert (config.hidden_size, config.num_hidden_layers, config.head_dim) == (32, 1, 16)
