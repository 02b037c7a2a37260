"""Every command that computes, with weights of bfloat16: what it exports is of that type, what it
goes on from is float32."""

import json
from shutil import copytree

import pytest
import torch
from safetensors.torch import load_file

from tests.support.home import done, output_of

BF16 = "model.dtype=bfloat16"


@pytest.mark.parametrize(
    ("command", "settings"),
    [
        pytest.param(
            "train",
            ["rl.minibatches=2", 'rollout.devices=["cpu", "cpu"]', "rollout.workers=2"],
            marks=pytest.mark.nightly,
        ),
        pytest.param("sft", ["sft.train=HOME/data/warm.jsonl"], marks=pytest.mark.nightly),
        pytest.param("dpo", ["preference.train=HOME/pairs.jsonl"], marks=pytest.mark.nightly),
        ("rm", ["preference.train=HOME/pairs.jsonl"]),
        pytest.param("distill", ["distill.teacher=HOME/teacher"], marks=pytest.mark.nightly),
    ],
)
def test_a_run_exports_bfloat16_and_keeps_float32_masters(command, settings, home, tmp_path):
    folder = tmp_path / "run"
    settings = [setting.replace("HOME", str(home)) for setting in settings]
    rows, target = done(command, home, folder, BF16, "eval.every=0", *settings)
    exported = load_file(target / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    assert {weight.dtype for weight in exported.values()} == {torch.bfloat16}
    assert config["dtype"] == "bfloat16"
    name = "scorer" if command == "rm" else "policy"
    masters = load_file(folder / "checkpoints" / target.name / f"{name}.safetensors")
    assert {weight.dtype for weight in masters.values()} == {torch.float32}
    assert all(torch.equal(masters[name].bfloat16(), exported[name]) for name in exported)
    # and they hold more than the rounded weights, so small updates add up
    assert any(not torch.equal(masters[n].bfloat16().float(), masters[n]) for n in exported)
    if command == "train":
        gaps = [row["logprob_gap"] for row in rows if "logprob_gap" in row]
        assert gaps and set(gaps) == {0.0}
    assert "equal" in output_of("replay", folder, "--step", rows[-1]["step"])


def test_eval_takes_the_type_that_a_model_was_saved_in(home, tmp_path, monkeypatch):
    saved = copytree(home / "model", tmp_path / "model")
    about = (saved / "config.json").read_text()
    (saved / "config.json").write_text(about.replace('"dtype": "float32"', '"dtype": "bfloat16"'))
    cases = (home / "model", "pairs"), (saved, "pairs"), (saved, "")  # and what multiplies bfloat16
    for (model, unit), dtype in zip(cases, ("float32", "bfloat16", "float32"), strict=True):
        monkeypatch.setattr("tandem.plugins.commands.eval.bfloat16_unit", lambda unit=unit: unit)
        output = output_of("eval", home / "recipe.toml", f"model.path={model}")
        assert f"in {dtype} on" in " ".join(output.split())


def test_commands_that_only_generate_run_in_bfloat16(home, tmp_path):
    evaluate = "eval", home / "recipe.toml", BF16, "--out", tmp_path / "means.json"
    read = [" answers read from " in output_of(*evaluate, *more) for more in ((), (), ("--fresh",))]
    assert read == [False, True, False]
    assert json.loads((tmp_path / "means.json").read_text())
    output_of("rollout", home / "recipe.toml", BF16, "--out", tmp_path / "e.jsonl")
    lines = (tmp_path / "e.jsonl").read_text().splitlines()
    assert lines and all(json.loads(line)["engine_logprobs"] for line in lines)
    problems = tmp_path / "p.jsonl"
    problems.write_text(json.dumps({"prompt": "1 + 1?", "answer": "2"}) + "\n")
    how = ["--data", problems, "--model", home / "model", "--rows", 1, BF16]
    output = output_of("try", f"{home}/reward.py:score", *how, "rollout.max_new_tokens=4")
    assert "reward" in output
