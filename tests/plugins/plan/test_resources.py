"""Memory of a run by device, what a setting saves, and the error of a run that finds none."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from tandem.cli.train import explain_out_of_memory
from tandem.config.recipe import load_config
from tandem.jobs import rl
from tandem.jobs.models import build_learner
from tandem.model.placement import Placement
from tandem.plugins.plan.footprint import Footprint, model_sizes
from tandem.runtime.errors import UserError
from tests.support.home import invoke
from tests.support.runs import fingerprint

GPU = Placement(torch.device("cuda:0"), torch.bfloat16)


def config_of(home, *overrides):
    return load_config(home / "recipe.toml", list(overrides))


def run_of(home, *overrides, place=None):
    """The Footprint of a recipe with changes, on this machine or in a place."""
    config = config_of(home, *overrides)
    sizes = model_sizes(config, "train")
    sizes = replace(sizes, place=place or sizes.place)
    return Footprint(sizes=sizes, config=config, command="train", longest=20)


def rows_of(needs):
    return {name: size for name, size, _ in needs}


def held_after_a_step(config):
    """Bytes that the optimizer of the policy holds."""
    learner = build_learner(config, config.model.path, config.train, 1)
    for weight in learner.optimizer.parameters.values():
        weight.grad = torch.ones_like(weight)
    learner.optimizer.update()
    state = learner.optimizer.state()
    return sum(tensor.nbytes for name, tensor in state.items() if name[:5] != "step.")


def test_muon_has_one_momentum_for_each_matrix_of_the_layers(home):
    """The plan counts what a policy's and a critic's optimizer hold after a step."""
    before, after = (
        run_of(home, "rl.advantage=gae", f"train.optimizer={name}") for name in ("adamw", "muon")
    )
    rows, (policy, critic) = rows_of(after.needs()), after.sizes.trained
    held = held_after_a_step(after.config)
    assert rows["Adam moments"] + rows["Muon momentum"] == held < 8 * policy.count
    saved = 4 * (policy.momentum + critic.momentum)
    assert before.sizes.checkpoint - after.sizes.checkpoint == saved
    critics = rows_of(before.needs())["critic"] - rows["critic"]
    assert critics == 4 * critic.momentum == rows["Muon momentum"]


@pytest.mark.parametrize("changes", [[], ["lora.rank=4"]])
def test_moments_of_8_bits_are_planned_to_the_byte(home, changes):
    """Policy, critic and adapters have as many as their optimizers hold after a step."""
    before, after = (
        run_of(home, "rl.advantage=gae", *changes, f"train.optimizer={name}")
        for name in ("adamw", "adamw_8bit")
    )
    held = held_after_a_step(after.config)
    rows, plain = rows_of(after.needs()), rows_of(before.needs())
    assert rows["Adam moments"] == held < 0.6 * plain["Adam moments"]
    saved, of_critic = plain["Adam moments"] - held, plain["critic"] - rows["critic"]
    assert before.sizes.checkpoint - after.sizes.checkpoint == saved + of_critic
    assert of_critic >= saved
    on_gpu = replace(after, sizes=replace(after.sizes, place=GPU))
    assert "train.offload_optimizer=true" not in dict(on_gpu.savings())


def test_masters_and_moments_move_to_the_host_with_offload(home):
    run, offloads = (
        run_of(home, *changes, place=GPU) for changes in ([], ["train.offload_optimizer=true"])
    )
    before, after, count = rows_of(run.needs()), rows_of(offloads.needs()), run.sizes.policy.count
    state = {"masters": 4 * count, "Adam moments": 8 * count}
    assert state.items() <= before.items() and not state.keys() & after.keys()
    assert rows_of(run.on_host()) == {"a save under way": 12 * count}
    assert state.items() <= rows_of(offloads.on_host()).items()
    # on a CPU both are the same memory
    here, offloads = run_of(home), run_of(home, "train.offload_optimizer=true")
    assert here.needs() == offloads.needs() and offloads.on_host() == []


def test_a_cache_that_takes_turns_counts_beyond_the_update_only(home):
    kept = {
        release: rows_of(run_of(home, f"rollout.release_cache={release}", place=GPU).needs())
        for release in ("auto", "false")
    }
    update = kept["auto"]["gradients"] + kept["auto"]["activations"]
    assert kept["false"]["key/value cache"] == 1 << 30
    assert kept["auto"]["key/value cache"] == (1 << 30) - update


def test_savings_are_the_differences_of_two_plans_the_most_first(home):
    small = ["rollout.cache_mb=8", "rollout.release_cache=false"]
    run = run_of(home, *small)
    found, before = run.savings(), sum(rows_of(run.needs()).values())
    assert [saved for _, saved in found] == sorted((s for _, s in found), reverse=True)
    keys = {"train.activation_checkpointing", "train.tokens_per_microbatch", "rollout.cache_mb"}
    assert {setting.partition("=")[0] for setting, _ in found} == keys
    for setting, saved in found:
        assert before - sum(rows_of(run_of(home, *small, setting).needs()).values()) == saved


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
    command = ["train", home / "recipe.toml", "run.save_every=1", "run.steps=4"]
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
    assert changes_bits.startswith("train.tokens_per_microbatch=512 saves ")
    monkeypatch.undo()
    settings = ["rollout.cache_mb=512", "train.activation_checkpointing=true"]
    assert invoke(*command, f"run.folder={tmp_path}/run", *settings).exit_code == 0
    assert fingerprint(tmp_path / "run") == fingerprint(tmp_path / "whole")


def test_a_mesh_needs_each_process_and_the_engine_of_rank_0(home):
    alone, mesh, split = (
        run_of(home, "rollout.cache_mb=1", *changes)
        for changes in ([], ["parallel.data=2"], ["parallel.tensor=2"])
    )
    one, found = rows_of(alone.needs()), rows_of(mesh.needs())
    assert found["whole weights of rank 0"] == 4 * mesh.sizes.policy.count == one["weights"]
    assert found["weights"] == one["weights"] and found["Adam moments"] == one["Adam moments"]
    assert found["activations"] == 2 * one["activations"]
    assert found["key/value cache"] == 1 << 20
    halves = rows_of(split.needs())
    assert halves["packed weights"] == halves["weights"] > one["weights"] / 2
