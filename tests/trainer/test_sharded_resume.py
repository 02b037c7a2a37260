"""A checkpoint of any number of processes is taken up by any other, weights and moments to the last
bit."""

import pytest
import torch

from tandem.plugins.optim.adamw_8bit import Optimizer8bit
from tandem.run_folder.checkpoint import Contents, load_checkpoint, save_checkpoint
from tandem.run_folder.shards import Shard, write_shard
from tandem.runtime.disk import DISK
from tandem.train_loop import load_learners, saved_boxes, saved_tensors
from tandem.trainer.optimizer import Optimizer
from tandem.trainer.parallel.ranks import ParallelRanks
from tandem.trainer.ranks import ALONE
from tandem.weights.hashing import weight_hash
from tests.support.meshes import on_mesh
from tests.support.tiny import exact_model
from tests.support.updates import learner_of, microbatches, updated


def model_of(kind, seed=0):
    changes = {"num_experts": 4} if kind == "qwen3_moe" else {}  # tensor = 2 divides them
    return exact_model(kind, seed, **changes)


def learner_on(model, ranks, kind=Optimizer):
    return learner_of(model, ranks, kind=kind, schedule="cosine", warmup_steps=1)


def save(learner, folder, gather):
    """Save as train_loop.py and follow.py do, with a gather in place of the store."""
    learners, ranks = {"policy": learner}, learner.ranks
    state = {"optimizer_steps": {"policy": learner.optimizer.step}}
    tensors, shard = saved_tensors(learners), None
    if ranks.size > 1:
        boxes = saved_boxes(learners)
        shard = Shard(rank=ranks.rank, size=ranks.size, folder=".tmp-step_000001-x", boxes=boxes)
    if ranks.rank:
        gather(write_shard(folder, tensors, shard, DISK))
        return
    others = {k: v for part in gather({}) for k, v in part.items()}
    contents = Contents(
        step=1,
        tensors=tensors,
        state=state,
        config="",
        keep=1,
        shard=shard,
        wait_for_others=lambda: others,
    )
    save_checkpoint(folder, contents)


def load(learner, folder):
    tensors, state = load_checkpoint(folder / "step_000001")
    load_learners({"policy": learner}, tensors, state["optimizer_steps"])


def take_up(mesh, kind, source, target, steps, optimizer=Optimizer):
    """Go on from a checkpoint, if there is one, with so many steps, and save; return how many bytes
    of weights and moments this process has."""
    model, ranks = model_of(kind), ParallelRanks(mesh)
    ranks.divide(model, torch.float32)
    learner = learner_on(model, ranks, optimizer)
    if source is not None:
        load(learner, source)
    updated(learner, microbatches(ranks.shares), steps)
    save(learner, target, lambda entries: mesh.world.gather(entries, "entries"))
    return sum(tensor.nbytes for part in learner.saved() for tensor in part.values())


def take_up_alone(kind, source, target, optimizer=Optimizer):
    learner = learner_on(model_of(kind, seed=1), ALONE, optimizer)
    load(learner, source)
    save(learner, target, lambda entries: [entries])


def content(folder):
    """Hashes of weights and moments, read whole, and the steps made."""
    tensors, state = load_checkpoint(folder / "step_000001")
    steps = state["optimizer_steps"]["policy"]
    return {stem: weight_hash(named.items()) for stem, named in tensors.items()} | {"steps": steps}


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_a_checkpoint_goes_from_four_processes_to_two_to_one_and_back_to_the_bit(tmp_path, kind):
    four, two, one, again = (tmp_path / name for name in ("four", "two", "one", "again"))
    sizes = on_mesh(take_up, kind, None, four, 2, data=4)
    on_mesh(take_up, kind, four, two, 0, tensor=2)
    take_up_alone(kind, two, one)
    on_mesh(take_up, kind, one, again, 0, data=2, pipeline=2)
    assert content(four)["steps"] == 2
    assert content(four) == content(two) == content(one) == content(again)
    whole = sum(
        tensor.nbytes
        for named in load_checkpoint(one / "step_000001")[0].values()
        for tensor in named.values()
    )
    assert sum(sizes) < whole * 1.05 and max(sizes) < 0.4 * whole  # no process saves the rest
    names = {file.name for file in (again / "step_000001").glob("policy-*")}
    assert names == {f"policy-0000{n}-of-00004.safetensors" for n in (1, 2, 3, 4)}


def test_moments_of_8_bits_go_to_other_meshes_with_their_scales(tmp_path):
    kind = "qwen3_moe"
    two, one, again, whole = (tmp_path / name for name in ("two", "one", "again", "whole"))
    on_mesh(take_up, kind, None, two, 2, Optimizer8bit, data=2)
    take_up_alone(kind, two, one, Optimizer8bit)
    on_mesh(take_up, kind, one, again, 0, Optimizer8bit, data=2, pipeline=2)
    assert content(two) == content(one) == content(again)
    on_mesh(take_up, kind, one, again, 1, Optimizer8bit, data=2)
    on_mesh(take_up, kind, None, whole, 3, Optimizer8bit, data=2)
    assert content(again) == content(whole) != content(one)


@pytest.mark.parametrize("sizes", [{"data": 2}, {"data": 4, "shard": 2}])
def test_the_same_mesh_goes_on_as_if_it_had_never_stopped(tmp_path, sizes):
    on_mesh(take_up, "qwen3", None, tmp_path / "half", 2, **sizes)
    on_mesh(take_up, "qwen3", tmp_path / "half", tmp_path / "resumed", 2, **sizes)
    saved = on_mesh(take_up, "qwen3", None, tmp_path / "whole", 4, **sizes)
    assert sum(n > 0 for n in saved) == sizes.get("shard", sizes["data"])  # one copy of each part
    assert content(tmp_path / "resumed") == content(tmp_path / "whole")
    assert content(tmp_path / "resumed") != content(tmp_path / "half")
