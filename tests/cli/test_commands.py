"""The commands that train, on a tiny model: each ends, leaves what stock transformers loads, and
tells a mistake in words."""

import json
import shutil
from contextlib import chdir
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tandem.config.schema import Config
from tandem.jobs.input_hashes import function_hashes, require_same_functions
from tandem.model.load import load_model
from tandem.model.tiny import make_tiny
from tandem.runtime.disk import file_hash
from tandem.runtime.errors import UserError
from tests.support.home import STEPS, done, invoke, mistake, output_of

TOKENS = torch.arange(10, 40)[None]


def weights(folder):
    return load_file(folder / "model.safetensors")


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def stock_logits(folder, kind=AutoModelForCausalLM):
    model, report = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return model(TOKENS).logits


def test_dpo_learns_its_pairs_and_exports_a_language_model(home, tmp_path):
    pairs = f"preference.train={home}/pairs.jsonl"
    held_out = f"preference.test={home}/pairs.jsonl"
    rows, target = done("dpo", home, tmp_path, pairs, held_out, "preference.batch_size=24")
    assert rows[0]["eval/loss"] == pytest.approx(0.6931, abs=1e-4)
    assert rows[1]["loss"] == rows[0]["eval/loss"]
    assert rows[2]["eval/loss"] < rows[2]["loss"] < rows[1]["loss"]
    assert stock_logits(target).isfinite().all()
    assert not same(weights(target), weights(home / "model"))
    assert "eval/greedy" in rows[-1]  # the problems of eval.data too


def test_reward_model_learns_pairs_and_is_a_one_label_classifier(home, tmp_path):
    pairs = f"preference.train={home}/pairs.jsonl"
    rows, target = done("rm", home, tmp_path / "run", pairs, f"preference.test={home}/pairs.jsonl")
    assert rows[-1]["eval/loss"] < rows[0]["eval/loss"] == pytest.approx(0.6931, abs=1e-4)
    assert stock_logits(target, AutoModelForSequenceClassification).shape == (1, 1)
    output_of("export", tmp_path / "run", "--out", tmp_path / "again")
    assert same(weights(tmp_path / "again"), weights(target))


def test_reward_model_scores_conversations_as_transformers_does(home, tmp_path):
    pairs = [f"preference.train={home}/pairs.jsonl", "preference.learning_rate=1e-2"]
    _, scorer = done("rm", home, tmp_path / "rm", *pairs)
    how = [
        f"env.name={home}/env.py:Chat",
        "reward.weights=[1.0, 0.5]",
        'reward.function=["reward_model", "env"]',
    ]
    how += [f"reward.model={scorer}", 'rollout.stop=["a", "e", "1", "x", "Z"]']
    done("train", home, tmp_path / "run", *how)
    stock = AutoModelForSequenceClassification.from_pretrained(scorer).eval()
    tokenizer, found = AutoTokenizer.from_pretrained(scorer), []
    for row in pq.read_table(tmp_path / "run/episodes/train_step_000001.parquet").to_pylist():
        if row["env_error"]:
            continue
        said = json.loads(row["transcript"])
        while said[-1]["role"] != "assistant":
            said.pop()  # what the model no longer answered, at a limit
        text = tokenizer.apply_chat_template([*json.loads(row["messages"]), *said], tokenize=False)
        tokens = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        with torch.no_grad():
            value = float(stock(tokens).logits[0, 0])
        parts = dict(row["reward_parts"])
        assert parts["reward_model"] == pytest.approx(value, abs=1e-5)
        assert row["reward"] == pytest.approx(parts["reward_model"] + 0.5 * parts["env"])
        found.append(len(said))
    assert max(found) > 2 and len(set(found)) > 1  # conversations of several turns among them


@pytest.mark.parametrize("estimator", ["exact", "sampled"])
def test_distillation_brings_the_student_nearer_to_its_teacher(estimator, home, tmp_path):
    how = [
        f"distill.teacher={home}/teacher",
        f"distill.estimator={estimator}",
        "train.learning_rate=1e-2",
        *("rl.prompts_per_step=8", "rl.group_size=16"),  # fewer hide what a step gains
    ]
    rows, target = done("distill", home, tmp_path, *how)
    assert rows[1]["teacher_kl"] > rows[2]["teacher_kl"] > 0
    assert stock_logits(target).isfinite().all()


def test_sft_on_all_tokens_also_learns_user_messages(home, tmp_path):
    chats, counts = f"sft.train={home}/data/warm.jsonl", {}
    for loss_on in ("assistant", "all"):
        rows, target = done(
            "sft", home, tmp_path / loss_on, chats, f"sft.loss_on={loss_on}", "sft.batch_size=64"
        )
        counts[loss_on] = rows[1]["num_loss_tokens"]
        assert stock_logits(target).isfinite().all()
    chats = [
        json.loads(line)["messages"] for line in (home / "data/warm.jsonl").read_text().splitlines()
    ]
    tokenizer = AutoTokenizer.from_pretrained(home / "model")
    lengths = [
        len(tokenizer(tokenizer.apply_chat_template(chat, tokenize=False))["input_ids"])
        for chat in chats
    ]
    # nothing predicts the first token
    assert counts["all"] == sum(lengths) - len(lengths) > counts["assistant"]


@pytest.fixture(scope="module")
def adapted(home, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapted") / "run"
    return folder, *done(
        "train", home, folder, "lora.rank=4", "rl.kl_coef=0.1", "train.learning_rate=1e-2"
    )


def test_run_is_exported_and_replayed_from_another_directory(home, tmp_path):
    shutil.copytree(home, tmp_path / "project")
    text = (home / "recipe.toml").read_text().replace(f"{home}/", "")
    (tmp_path / "project/recipe.toml").write_text(text)
    with chdir(tmp_path / "project"):
        _, target = done("train", Path(), Path("runs/mine"))
    (tmp_path / "other").mkdir()
    with chdir(tmp_path / "other"):
        run = "../project/runs/mine"
        # its data and its model are not here, which changes nothing there
        mistake("train", "../project/recipe.toml", f"run.folder={tmp_path}/project/runs/mine")
        assert "equal" in invoke("replay", run, "--step", 1).output
        row = pq.read_table(f"{run}/episodes/train_step_000001.parquet").to_pylist()[0]
        name = f"1:{row['uid']}:{row['sample_index']}"
        assert row["text"][:5] in invoke("why", run, "--episode", name, "--no-learning").output
        shutil.rmtree(tmp_path / "project/model")
        output_of("export", run, "--out", "again")
    assert same(weights(tmp_path / "other/again"), weights(tmp_path / "project" / target))
    found = [stock_logits(tmp_path / name) for name in ("other/again", f"project/{target}")]
    assert torch.equal(*found)
    names = {file.name for file in (tmp_path / "other/again").iterdir()}
    assert names == {file.name for file in (tmp_path / "project" / target).iterdir()}


def test_flipped_byte_in_exported_weights_is_found_at_load(adapted, tmp_path):
    _, _, target = adapted
    copy = tmp_path / "copy"
    shutil.copytree(target, copy)
    sums = dict(
        reversed(line.split("  ")) for line in (copy / "SHA256SUMS").read_text().splitlines()
    )
    assert sums.keys() == {path.name for path in copy.iterdir()} - {"SHA256SUMS"}
    assert sums == {name: file_hash(copy / name) for name in sums}
    (copy / "README.md").write_text("my own words")
    load_model(str(copy))
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (copy / "model.safetensors").write_bytes(data)
    with pytest.raises(UserError, match=r"(?s)not those that were exported.*model\.safetensors"):
        load_model(str(copy))
    (copy / "SHA256SUMS").unlink()
    load_model(str(copy))


# Mistakes
# ------------------------------------------------------------------------------


def test_teacher_of_another_vocabulary_is_refused(home, tmp_path):
    command = ["distill", home / "recipe.toml", f"run.folder={tmp_path}/run"]
    bonus = mistake(*command, f"distill.teacher={home}/teacher", "rl.entropy_coef=0.1")
    assert "rl.entropy_coef = 0.1" in bonus and "add rl.kl_coef=0" in bonus
    make_tiny(tmp_path / "other", hidden=32, layers=1, intermediate=64)
    config = json.loads((tmp_path / "other/config.json").read_text())
    tensors = weights(tmp_path / "other")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:-3].clone()
    save_file(tensors, tmp_path / "other/model.safetensors", metadata={"format": "pt"})
    (tmp_path / "other/config.json").write_text(
        json.dumps(config | {"vocab_size": config["vocab_size"] - 3})
    )
    text = mistake(*command, f"distill.teacher={tmp_path}/other")
    assert "do not share a vocabulary" in text and str(config["vocab_size"] - 3) in text


@pytest.mark.parametrize(("command", "key"), [("dpo", "train"), ("rm", "train"), ("dpo", "test")])
def test_pair_one_token_too_long_is_named(command, key, home, tmp_path):
    rows = (home / "pairs.jsonl").read_text().splitlines()
    tokenizer, places = AutoTokenizer.from_pretrained(home / "model"), 256
    prompt = [
        {"role": "user", "content": json.loads(rows[6])["prompt"]},
        {"role": "assistant", "content": ""},
    ]
    around = len(tokenizer(tokenizer.apply_chat_template(prompt, tokenize=False))["input_ids"])
    files = {"train": home / "pairs.jsonl"} | {key: tmp_path / "long.jsonl"}
    overrides = [f"preference.{name}={file}" for name, file in files.items()]

    def write(size):
        rows[6] = json.dumps(json.loads(rows[6]) | {"rejected": "x" * (size - around)})
        (tmp_path / "long.jsonl").write_text("\n".join(rows))

    # the last token of an answer has a place only where a score is read at it
    last = places + (command == "dpo")
    write(last + 1)
    text = mistake(command, home / "recipe.toml", f"run.folder={tmp_path}/run", *overrides)
    assert f"preference.{key}, pair 7" in text
    assert "an answer is longer than the model can place" in text
    write(last)
    done(command, home, tmp_path / "run", *overrides)


def test_teacher_with_another_tokenizer_is_refused(home, tmp_path):
    shutil.copytree(home / "teacher", tmp_path / "teacher")
    tree = json.loads((tmp_path / "teacher/tokenizer.json").read_text())
    for item in [*tree["added_tokens"], *([tree["model"]["vocab"]])]:
        if "x" in item and "y" in item:
            item["x"], item["y"] = item["y"], item["x"]
    (tmp_path / "teacher/tokenizer.json").write_text(json.dumps(tree))
    command = ["distill", home / "recipe.toml", f"run.folder={tmp_path}/run"]
    assert "do not read the same tokens" in mistake(*command, f"distill.teacher={tmp_path}/teacher")


FUNCTIONS = {"rl.loss": "loss", "rl.filter": "keep", "reward.function": "score"}
OWN = (Path(__file__).parents[2] / "examples/own_functions.py").read_text()
SCORE = "from os.path import exists\n\ndef score(problem, completion):\n"
SCORE += "    assert not exists(__file__ + '.down')\n    return float(len(completion) % 2)\n"


def test_resume_with_a_changed_function_is_refused(home, tmp_path):
    files = {key: tmp_path / f"{name}.py" for key, name in FUNCTIONS.items()}
    texts = dict.fromkeys(FUNCTIONS, OWN) | {"reward.function": SCORE}  # which imports no torch
    for key, file in files.items():
        file.write_text(texts[key])
    command = ["train", home / "recipe.toml", f"run.folder={tmp_path}/run", "rl.max_gen_batches=9"]
    command += [f"{key}={file}:{FUNCTIONS[key]}" for key, file in files.items()]
    output_of(*command)
    more = f"run.steps={STEPS + 1}"
    for key, file in files.items():
        file.write_text(texts[key] + "\n# another\n")
        text = mistake(*command, more)
        assert f"{key}/{file}" in text and "a function of yours" in text
        file.write_text(texts[key])
    (down := tmp_path / "score.py.down").touch()  # say a service that scores
    text = mistake(*command, more)
    assert "at least one episode without an error" in text
    assert "change of your code add --fresh" in text
    down.unlink()
    output_of(*command, more)


def test_a_rank_with_another_file_of_a_function_is_refused(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text(OWN)
    config = Config.model_validate({"rl": {"advantage": f"{mine}:advantage"}})
    begun = function_hashes(config)
    require_same_functions(config, begun)
    mine.unlink()
    with pytest.raises(UserError, match="another file of a function of yours") as caught:
        require_same_functions(config, begun)
    assert caught.value.where == f"rl.advantage/{mine}" and caught.value.found == "no file"
