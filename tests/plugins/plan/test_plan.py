"""`tandem plan`: ready, with exit code 0, exactly where a run could start; it names what is missing
and loads no weights."""

import json
import re
import shutil

import pytest
import torch

from tandem.config.recipe import load_config
from tandem.jobs.models import build_learner
from tandem.plugins.plan.command import Machine, plan
from tandem.plugins.plan.footprint import model_sizes
from tandem.plugins.plan.origins import origins
from tandem.run_folder.metrics import read_metrics
from tandem.runtime.disk import human_bytes
from tandem.runtime.errors import UserError
from tandem.train_loop import saved_tensors
from tests.support.call_templates import call_templates
from tests.support.command import tandem
from tests.support.home import invoke


def planned(home, folder, *overrides, command="train"):
    """(exit code, the last line, everything)"""
    result = invoke(
        "plan", home / "recipe.toml", "--for", command, f"run.folder={folder}", *overrides
    )
    assert result.exit_code in (0, 2), result.exception or result.output
    return result.exit_code, result.output.splitlines()[-1], result.output


def test_plan_of_a_run_that_could_start_is_ready(home, tmp_path):
    """It runs in a process of its own: workers are as large as the one that plans them."""
    changes = (f"run.folder={tmp_path}/run", "rl.algorithm=dr_grpo", "rollout.workers=2")
    changes += ("env.max_tokens=99",)
    code, text, errors = tandem("plan", home / "recipe.toml", *changes, cwd=tmp_path)
    assert code == 0, text + errors
    assert text.splitlines()[-1] == f"ready: 2 steps of 32 episodes, a new run in {tmp_path}/run"
    assert "\na step\n  384 sampled tokens at most, 1 update\nready: " in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    order = [lines.index(title) for title in ("data", "memory", "disk")]
    assert lines[0].startswith("values set by you") and order == sorted(order)
    assert "rollout.workers = 2 command line; default 0" in lines[: order[0]]
    assert not any(line.startswith("rl.clip_low") for line in lines)
    assert any(line.startswith("data.train 48 problems, longest prompt ") for line in lines)
    assert any(line.endswith(" of 99 that env.max_tokens allows") for line in lines)
    assert any(line.startswith("eval.data 8 problems, longest prompt ") for line in lines)
    assert any(line.endswith("3 x Python, 2 x weights, packs and pages") for line in lines)
    assert not any(line.startswith("key/value cache") for line in lines)  # the workers have it
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("prompts", "times"), [(48, ""), (49, "1.0"), (1000, "20.8")])
def test_plan_warns_of_problems_that_come_several_times_a_step(
    home, tmp_path, caplog, prompts, times
):
    code, *_ = planned(home, tmp_path / "run", f"rl.prompts_per_step={prompts}")
    said = [record.getMessage() for record in caplog.records if "per_step" in record.getMessage()]
    about = (
        f"rl.prompts_per_step is {prompts:,} and data.train has 48 problems: a step is "
        f"{4 * prompts:,} episodes, and each problem is in it {times}"
    )
    assert code == 0
    assert [line.partition(" times")[0] for line in said] == [about] * bool(times)


def test_plan_tells_calls_that_are_not_read_and_tools_without_room(home, tmp_path, caplog):
    template = call_templates()["qwen3"].replace('{"name": "', '{"do": "')
    (tmp_path / "odd.jinja").write_text(template)
    shown = (f"data.chat_template={tmp_path}/odd.jinja", "env=tools", "reward=answer")
    code, last, text = planned(home, tmp_path / "run", *shown, "env.options.tools=calculator")
    assert "own form are not read" in caplog.text
    assert code == 2 and "with its tools leaves no room" in last and "tandem tiny DIR" in text


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.train=none.jsonl", "data.train"),
        ("rollout.max_new_tokens=1000", "a sequence would be longer than the model can place"),
        ("reward.function=none.py:score", "none.py"),
        ("model.path=./none", "the model directory does not exist"),
        ("rl.curriculum=true rl.prompts_per_step=49", "a curriculum picks every problem at most"),
        ("reward=reward_model reward.model={home}/model", "no head that scores"),
        ("data.max_prompt_tokens=5", "longer than data.max_prompt_tokens"),
        ("weights.transport=cuda_ipc rollout.workers=1 model.device=cpu", "the memory of a GPU"),
        ('lora.rank=4 lora.targets=["q_prj"]', "LoRA targets are not in this model"),
    ],
)
def test_what_would_stop_a_run_makes_it_not_ready(override, said, home, tmp_path):
    overrides = override.format(home=home).split(" ")
    code, last, text = planned(home, tmp_path / "run", *overrides)
    assert code == 2 and last.startswith("not ready: ") and said in text
    run = invoke("train", home / "recipe.toml", f"run.folder={tmp_path}/run", *overrides)
    assert isinstance(run.exception, UserError) and run.exception.what in text


@pytest.mark.parametrize(
    ("function", "found"),
    [
        ("(problem, completion): return problem.anser", "no attribute 'anser'"),
        ("(problem, completion): return 'good'", "of type str"),
        ("(completions, label, **columns): return [1.0]", "missing a required argument"),
    ],
    ids=["raises", "a text", "a column that is not there"],
)
def test_a_reward_that_cannot_score_is_not_ready(function, found, home, tmp_path):
    (tmp_path / "mine.py").write_text(f"def score{function}\n")
    reward = f"reward={tmp_path}/mine.py:score"
    code, last, text = planned(home, tmp_path / "run", reward)
    assert code == 2 and found in text
    assert last == "not ready: the reward function cannot score a completion of the first problem"
    run = invoke("train", home / "recipe.toml", f"run.folder={tmp_path}/run", reward)
    assert isinstance(run.exception, UserError) and found in run.exception.found
    assert "mine.py:score" in run.exception.where


@pytest.mark.parametrize(
    ("command", "key", "file"),
    [
        ("sft", "sft.train", "data/warm.jsonl"),
        ("dpo", "preference.train", "pairs.jsonl"),
        ("rm", "preference.train", "pairs.jsonl"),
        ("distill", "distill.teacher", "teacher"),
    ],
)
def test_every_command_that_trains_has_a_plan(command, key, file, home, tmp_path):
    code, last, text = planned(home, tmp_path / "run", f"{key}={home}/{file}", command=command)
    assert code == 0 and last.startswith("ready: 2 steps of "), text
    code, last, _ = planned(home, tmp_path / "run", f"{key}=none.jsonl", command=command)
    assert code == 2 and last.startswith("not ready: ")


def test_plan_beyond_memory_is_not_ready_workers_included(home, tmp_path):
    code, last, _ = planned(home, tmp_path / "run", "rollout.workers=50000")
    assert code == 2 and re.match(r"not ready: memory: [\d.]+ TiB needed.* in this machine", last)
    most = "train.tokens_per_microbatch=99999999"
    overrides = [most, "rl.prompts_per_step=1000000", "rl.group_size=1000"]
    code, last, _ = planned(home, tmp_path / "run", *overrides)
    assert code == 2 and "memory: " in last


def test_memory_is_of_as_many_tokens_as_a_step_has(home, tmp_path):
    """The cache and a microbatch may hold more than a step fills: neither is counted then."""

    def figures(*overrides, command="train"):
        out = tmp_path / "plan.json"
        files = [f"sft.train={home}/data/warm.jsonl", "--json", out]
        assert planned(home, tmp_path / "run", *overrides, *files, command=command)[0] == 0
        return json.loads(out.read_text())["memory"]

    small, large = figures(), figures("rl.prompts_per_step=16")
    page = small["key/value cache"] / 32  # 32 episodes of one page
    assert large["key/value cache"] == 2 * small["key/value cache"] == 64 * page
    assert large["activations"] > 1.8 * small["activations"]
    kept = human_bytes(figures("train.activation_checkpointing=true")["activations"])
    assert f" tokens; {kept} with checkpointing" in planned(home, tmp_path / "run")[2]
    few = ["train.tokens_per_microbatch=64", "rollout.cache_mb=1"]
    assert figures("rl.prompts_per_step=16", *few)["activations"] == figures(*few)["activations"]
    assert figures(*few)["key/value cache"] <= 1 << 20
    assert "key/value cache" not in figures(command="sft")
    same = {"weights", "packed weights", "Adam moments", "gradients", "a save under way"}
    assert {name: small[name] for name in same} == {name: large[name] for name in same}


def test_planned_memory_is_what_a_run_takes(home, tmp_path):
    """Both in processes of their own; other processes of the run are left out."""
    chats = [f"sft.train={home}/data/warm.jsonl", "eval.data=", f"run.folder={tmp_path}/run"]
    more = ["sft.batch_size=256", "train.tokens_per_microbatch=8192"]
    recipe = [home / "recipe.toml", *chats, *more]
    out = tmp_path / "plan.json"
    assert tandem("plan", *recipe, "--for", "sft", "--json", out, cwd=tmp_path)[0] == 0
    assert tandem("sft", *recipe, cwd=tmp_path)[0] == 0
    rows = json.loads(out.read_text())["memory"]
    measured = read_metrics(tmp_path / "run", "timings.jsonl")[-1]["rss_mb"]
    planned_mb = (sum(rows.values()) - rows["other processes"]) / 2**20
    assert planned_mb == pytest.approx(measured, rel=0.15)


def test_checkpoints_that_the_disk_cannot_take_are_not_ready(home, tmp_path, capsys):
    config = load_config(home / "recipe.toml", [])
    small, large = (Machine(memory=1 << 40, disk=disk) for disk in (1 << 10, 1 << 30))
    named = origins(home / "recipe.toml", [])
    assert plan(config, "train", tmp_path / "run", named, machine=small) == 2
    assert capsys.readouterr().out.splitlines()[-1].startswith("not ready: disk: ")
    assert plan(config, "train", tmp_path / "run", named, machine=large) == 0


@pytest.mark.parametrize("changes", [[], ["lora.rank=4"], ["train.optimizer=muon"]])
def test_a_checkpoint_has_the_bytes_that_are_planned(home, changes):
    config = load_config(home / "recipe.toml", changes)
    learner = build_learner(config, config.model.path, config.train, 1)
    for weight in learner.model.trainable().values():
        weight.grad = torch.ones_like(weight)
    learner.optimizer.update()  # makes the moments
    saved = saved_tensors({"policy": learner}).values()
    found = sum(tensor.nbytes for named in saved for tensor in named.values())
    # beside a step for each tensor
    assert found == pytest.approx(model_sizes(config, "train").checkpoint, rel=0.01)


def test_a_run_that_is_there_is_held_against_the_plan(home, tmp_path):
    data = tmp_path / "train.jsonl"
    shutil.copy(home / "data/train.jsonl", data)
    folder = tmp_path / "run"
    same = [f"data.train={data}", "run.steps=3"]
    assert invoke("train", home / "recipe.toml", f"run.folder={folder}", *same).exit_code == 0
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    code, last, text = planned(home, folder, *same, "run.steps=4")
    assert code == 0 and "resumed from step_000003" in last, text
    assert "the config differs" in planned(home, folder, *same, "rl.group_size=8")[1]
    teacher = f"distill.teacher={home}/teacher"
    assert "another command" in planned(home, folder, *same, teacher, command="distill")[1]
    data.write_text("\n".join(reversed(data.read_text().splitlines())))
    assert "has changed since the run began" in planned(home, folder, *same)[1]
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
