"""Memory of a run by device, what a setting saves, and the error of a run that finds none."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from tandem.config.recipe import load_config
from tandem.jobs import rl
from tandem.jobs.models import build_learner
from tandem.jobs.out_of_memory import explain_out_of_memory
from tandem.model.placement import Placement
from tandem.plugins.plan import footprint
from tandem.plugins.plan.footprint import activations, host_memory, model_sizes, savings
from tandem.runtime.errors import UserError
from tests.support.home import invoke, make_home
from tests.support.runs import fingerprint

GPU = Placement(torch.device("cuda:0"), torch.bfloat16)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return make_home(tmp_path_factory.mktemp("home"), steps=4)


def config_of(home, *overrides):
    return load_config(home / "recipe.toml", list(overrides))


def needs(sizes, config):
    return footprint.needs(sizes, config, "train", 20)


def rows_of(needs):
    return {name: size for name, size, _ in needs}


def on_gpu(config):
    return replace(model_sizes(config, "train"), place=GPU)


def test_plan_names_activations_and_what_checkpointing_leaves_of_them(home):
    config = config_of(home)
    sizes = model_sizes(config, "train")
    [(size, text)] = [row[1:] for row in needs(sizes, config) if row[0] == "activations"]
    assert (
        size
        == activations(sizes, config)
        > activations(sizes, config, activation_checkpointing=True)
    )
    assert text.startswith("8,192 tokens; ") and text.endswith(" with checkpointing")


def test_muon_has_one_momentum_for_each_matrix_of_the_layers(home):
    """The plan counts what a policy's and a critic's optimizer hold after a step."""
    adamw = config_of(home, "rl.advantage=gae")
    muon = config_of(home, "rl.advantage=gae", "train.optimizer=muon")
    before, after = (model_sizes(config, "train") for config in (adamw, muon))
    learner = build_learner(muon, muon.model.path, muon.train, 1)
    for weight in learner.optimizer.parameters.values():
        weight.grad = torch.ones_like(weight)
    learner.optimizer.update()
    state = learner.optimizer.state()
    held = 4 * sum(tensor.numel() for name, tensor in state.items() if name[:5] != "step.")
    rows = rows_of(needs(after, muon))
    assert rows["Adam moments"] + rows["Muon momentum"] == held < 8 * after.policy
    assert before.checkpoint - after.checkpoint == 4 * (after.muon + after.muon_critic)
    critics = rows_of(needs(before, adamw))["critic"] - rows["critic"]
    assert critics == 4 * after.muon_critic == rows["Muon momentum"]


@pytest.mark.parametrize("changes", [[], ["lora.rank=4"]])
def test_moments_of_8_bits_are_planned_to_the_byte(home, changes):
    """Policy, critic and adapters have as many as their optimizers hold after a step."""
    changes = ["rl.advantage=gae", *changes]
    adamw, in_8bit = (
        config_of(home, *changes, f"train.optimizer={name}") for name in ("adamw", "adamw_8bit")
    )
    before, after = (model_sizes(config, "train") for config in (adamw, in_8bit))
    learner = build_learner(in_8bit, in_8bit.model.path, in_8bit.train, 1)
    for weight in learner.optimizer.parameters.values():
        weight.grad = torch.ones_like(weight)
    learner.optimizer.update()
    state = learner.optimizer.state()
    held = sum(tensor.nbytes for name, tensor in state.items() if name[:5] != "step.")
    rows, plain = rows_of(needs(after, in_8bit)), rows_of(needs(before, adamw))
    assert rows["Adam moments"] == held < 0.6 * plain["Adam moments"]
    saved = plain["Adam moments"] - held
    assert before.checkpoint - after.checkpoint == saved + plain["critic"] - rows["critic"]
    assert plain["critic"] - rows["critic"] >= saved
    assert "train.offload_optimizer=true" not in dict(
        savings(on_gpu(in_8bit), in_8bit, "train", 20)
    )


def test_masters_and_moments_move_to_the_host_with_offload(home):
    config = config_of(home)
    offloads = config_of(home, "train.offload_optimizer=true")
    sizes = on_gpu(config)
    before, after = (rows_of(needs(sizes, c)) for c in (config, offloads))
    state = {"masters": 4 * sizes.policy, "Adam moments": 8 * sizes.policy}
    assert state.items() <= before.items() and not state.keys() & after.keys()
    assert rows_of(host_memory(sizes, config)) == {"a save under way": 12 * sizes.policy}
    assert state.items() <= rows_of(host_memory(sizes, offloads)).items()
    # on a CPU both are the same memory
    sizes = model_sizes(config, "train")
    assert needs(sizes, config) == needs(sizes, offloads)
    assert host_memory(sizes, offloads) == []


def test_a_cache_that_takes_turns_counts_beyond_the_update_only(home):
    sizes, kept = on_gpu(config_of(home)), {}
    for release in ("auto", "false"):
        config = config_of(home, f"rollout.release_cache={release}")
        kept[release] = rows_of(needs(sizes, config))
    update = kept["auto"]["gradients"] + kept["auto"]["activations"]
    assert kept["false"]["key/value cache"] == 1 << 30
    assert kept["auto"]["key/value cache"] == (1 << 30) - update


def test_savings_are_the_differences_of_two_plans_the_most_first(home):
    small = ["rollout.cache_mb=8", "rollout.release_cache=false"]
    config = config_of(home, *small)
    sizes = model_sizes(config, "train")
    before = sum(rows_of(needs(sizes, config)).values())
    found = savings(sizes, config, "train", 20)
    assert [saved for _, saved in found] == sorted((s for _, s in found), reverse=True)
    assert {setting.partition("=")[0] for setting, _ in found} == {
        "train.activation_checkpointing",
        "train.tokens_per_microbatch",
        "rollout.cache_mb",
    }
    for setting, saved in found:
        other = config_of(home, *small, setting)
        assert before - sum(rows_of(needs(sizes, other)).values()) == saved


@pytest.mark.parametrize(
    "allocate",
    [lambda: torch.empty(1 << 60, dtype=torch.uint8), lambda: np.zeros(1 << 60, np.uint8)],
    ids=["torch", "numpy"],
)
def test_an_allocation_that_fails_on_the_cpu_is_explained(allocate, home):
    memory_error = pytest.raises(UserError, match="out of memory")
    with memory_error as caught, explain_out_of_memory(config_of(home), "train"):
        allocate()
    assert "llocate" in caught.value.found


def test_a_run_out_of_memory_names_three_settings_and_goes_on_with_one(home, tmp_path, monkeypatch):
    command = ["train", home / "recipe.toml", "run.save_every=1"]
    assert invoke(*command, f"run.folder={tmp_path}/whole").exit_code == 0
    make_job = rl.open_rl_job

    @contextmanager
    def short_of_memory(config, run, report):
        with make_job(config, run, report) as job:
            step = job.step

            def step_until_2(done):
                if done == 2:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
                return step(done)

            job.step = step_until_2
            yield job

    monkeypatch.setattr(rl, "open_rl_job", short_of_memory)
    error = invoke(*command, f"run.folder={tmp_path}/run").exception
    assert isinstance(error, UserError) and error.what == "out of memory"
    assert error.found == "CUDA out of memory. Tried to allocate 2.00 GiB"
    for setting in ("rollout.cache_mb=512 saves 512", "train.activation_checkpointing=true saves "):
        assert setting in error.next
    [changes_bits] = [part for part in error.next.split("; ") if part.endswith("run.folder)")]
    assert changes_bits.startswith("train.tokens_per_microbatch=4096 saves ")
    monkeypatch.undo()
    settings = ["rollout.cache_mb=512", "train.activation_checkpointing=true"]
    assert invoke(*command, f"run.folder={tmp_path}/run", *settings).exit_code == 0
    assert fingerprint(tmp_path / "run") == fingerprint(tmp_path / "whole")


def test_a_mesh_needs_each_process_and_the_engine_of_rank_0(home):
    alone = config_of(home, "rollout.cache_mb=1")
    config = config_of(home, "rollout.cache_mb=1", "parallel.data=2")
    sizes = model_sizes(config, "train")
    found = rows_of(footprint.needs(sizes, config, "train", 20))
    one = rows_of(footprint.needs(sizes, alone, "train", 20))
    assert found["whole weights of rank 0"] == 4 * sizes.policy == one["weights"]
    assert found["weights"] == one["weights"] and found["Adam moments"] == one["Adam moments"]
    assert found["activations"] == 2 * one["activations"]
    assert found["key/value cache"] == 1 << 20
    split = rows_of(footprint.needs(sizes, config_of(home, "parallel.tensor=2"), "train", 20))
    assert split["packed weights"] == split["weights"] > one["weights"] / 2
