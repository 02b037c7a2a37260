"""Meshes that are possible for a model, what a run needs on each, and the fastest that fit.

They are enumerated, not searched: thousands of them take a second. It knows no files.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from tandem.choices import trainer_of
from tandem.config.parallel import DIMENSIONS, Parallel
from tandem.config.schema import Config
from tandem.jobs.models import check_shape, releases_cache
from tandem.plugins.plan.gpus import Assumptions, Gpu
from tandem.plugins.plan.resources import Need, Sizes, worker_rows
from tandem.plugins.plan.resources import memory as memory_of_one
from tandem.plugins.plan.scaling import Rollout, Times, cached_bytes, rollout_time, update_time
from tandem.plugins.plan.shards import FLOAT32, Work, largest_layer, memory
from tandem.runtime.errors import UserError
from tandem.runtime.place import here

LARGEST = 4096  # GPUs that `smallest` tries
COPY, CACHE, SCORER = "whole weights of rank 0", "key/value cache", "model"
OF_RANK_0 = {COPY, CACHE, SCORER}
DEFAULT = Config()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run on a mesh: bytes of rank 0, in training by name and while it loads its models, and
    seconds of an update."""

    mesh: Parallel
    memory: dict[str, int]
    loading: int
    times: Times

    @property
    def needed(self) -> int:
        return max(self.loading, sum(self.memory.values()))


def why_impossible(shape: Any, mesh: Parallel) -> str:
    """Return why a mesh cannot divide a model (transformers config), "" if it can."""
    return _why_refused(DEFAULT.model_copy(update={"parallel": mesh}), {"model.path": shape})


def why_refused(sizes: Sizes, config: Config, mesh: Parallel) -> str:
    """Return why a run could not begin on a mesh, "" if it could."""
    config = config.model_copy(update={"parallel": mesh})
    for reason in (*mesh.contradictions(), *config.contradictions()):
        return reason
    divided = {"model.path": sizes.shape, **sizes.shapes}
    divided.pop("reward.model", None)  # it is whole, on rank 0
    return _why_refused(config, divided)


def _why_refused(config: Config, shapes: dict[str, Any]) -> str:
    for key, shape in shapes.items():
        try:
            check_shape(config, shape, key)  # as the run does
        except UserError as error:
            return f"{error.where}: {error.found}, expected {error.expected}"
    return ""


def possible_meshes(shape: Any, count: int, node: int = 8) -> Iterator[Parallel]:
    """Yield the meshes of so many GPUs that can divide a model. HSDP has the shards of a node."""
    for sizes in _factors(count, len(DIMENSIONS)):
        mesh = Parallel(**dict(zip(DIMENSIONS, sizes, strict=True)))
        if why_impossible(shape, mesh):
            continue
        yield mesh
        shard = node // mesh.tensor
        if mesh.expert == 1 and 1 < shard < mesh.replicas and mesh.replicas % shard == 0:
            yield mesh.model_copy(update={"shard": shard})


def _factors(number: int, length: int) -> Iterator[tuple[int, ...]]:
    """Yield all tuples of so many factors with this product."""
    if length == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in _factors(number // first, length - 1):
                yield (first, *rest)


def plans(
    sizes: Sizes, config: Config, work: Work, count: int, gpu: Gpu, assumed: Assumptions
) -> list[Plan]:
    """Return the plans on all possible meshes of so many GPUs that fit, the fastest first."""
    found = [
        Plan(
            mesh=mesh,
            memory=rank_memory(sizes, config, work, mesh),
            loading=loading_memory(sizes, config, work, mesh),
            times=update_time(work, mesh, gpu, assumed),
        )
        for mesh in possible_meshes(work.shape, count, gpu.node)
        if not why_refused(sizes, config, mesh)
    ]
    fitting = [plan for plan in found if plan.needed <= gpu.memory * assumed.memory]
    return sorted(fitting, key=lambda plan: (plan.times.total, plan.needed))


def smallest(
    sizes: Sizes, config: Config, work: Work, gpu: Gpu, assumed: Assumptions
) -> int | None:
    """Return the smallest power of two of GPUs on which a run fits; None above LARGEST."""
    count = 1
    while count <= LARGEST:
        if plans(sizes, config, work, count, gpu, assumed):
            return count
        count *= 2
    return None


def rank_memory(sizes: Sizes, config: Config, work: Work, mesh: Parallel) -> dict[str, int]:
    """Return the bytes of rank 0, which besides its part of the models has the engine.

    On one GPU they are those of resources.py, whose engine and trainer share the weights.
    """
    rows = memory(work, mesh) | _other_models(sizes, config, work, mesh)
    if _is_divided(work, mesh):
        rows[COPY] = work.dtype.itemsize * sizes.policy
    cache = config.rollout.cache_mb << 20
    if releases_cache(config, sizes.place):
        cache = max(0, cache - rows["gradients"] - rows["activations"])
    return rows | {CACHE: cache}


def memory_of_run(sizes: Sizes, config: Config, command: str, longest: int) -> list[Need]:
    """List the memory of a run: of its one process, or of its mesh on this machine. On GPUs it is
    that of rank 0. longest: tokens, as in `work_of`."""
    size = config.parallel.processes
    if size == 1 and trainer_of(config).runs_alone:
        return memory_of_one(sizes, config, command)
    local = here(os.environ, size).local_size
    return _mesh_needs(sizes, config, command, longest, 1 if sizes.on_gpu else local)


def _mesh_needs(sizes: Sizes, config: Config, command: str, longest: int, count: int) -> list[Need]:
    """List the memory of so many processes, rank 0 among them."""
    mesh = config.parallel
    work = work_of(sizes, config, command, longest)
    rows = rank_memory(sizes, config, work, mesh)
    if sizes.packed:
        rows["packed weights of rank 0"] = sizes.packed * sizes.policy
        if mesh.replicas == 1:  # FSDP's gathered weights keep none
            rows["packed weights"] = sizes.packed * rows["weights"] // work.dtype.itemsize
        rows["a save under way"] = sizes.checkpoint // mesh.processes
    each = f"of each of {count} processes" if count > 1 else f"of rank 0, mesh {mesh.mesh}"
    needs = [
        (name, size, "of rank 0 alone")
        if name in OF_RANK_0 or name.endswith("rank 0")
        else (name, count * size, each)
        for name, size in rows.items()
        if size and not (command == "rm" and name == CACHE)
    ]
    return needs + worker_rows(sizes, config, command)


def _is_divided(work: Work, mesh: Parallel) -> bool:
    """Tell whether the trainer's weights are others than the engine's."""
    return mesh.processes > 1 or work.megatron


def _other_models(sizes: Sizes, config: Config, work: Work, mesh: Parallel) -> dict[str, int]:
    width, alone = work.dtype.itemsize, not _is_divided(work, mesh)
    shards = 1 if work.megatron else mesh.shard or mesh.replicas
    each = FLOAT32 / (mesh.tensor * mesh.pipeline * shards)  # bytes that are left of a parameter
    rows = {}
    for key, size in _others(sizes, config).items():
        held = width * size if alone or key == "reward.model" else each * size
        if key == "critic.path":
            trained = 8 if work.offload else 16 if alone and width < FLOAT32 else 12
            state = trained * sizes.trained_critic - 4 * sizes.muon_critic
            state -= sizes.saved_in_8bit_critic
            held += (1.0 if alone else each / FLOAT32) * state
        rows[key.rpartition(".")[2]] = round(held)
    return rows


def _others(sizes: Sizes, config: Config) -> dict[str, int]:
    """Return the parameters of further models that are loaded: without adapters the policy is its
    own reference."""
    shared = bool(sizes.adapters and not config.model.reference)
    return {k: n for k, n in sizes.others.items() if not (shared and k == "model.reference")}


def loading_memory(sizes: Sizes, config: Config, work: Work, mesh: Parallel) -> int:
    """Return the most bytes of rank 0 while it loads its models: each is whole before it is
    divided, a layer of it in float32 at a time, beside those that came before."""
    width, others = work.dtype.itemsize, _others(sizes, config)
    if not _is_divided(work, mesh):
        return width * (sizes.policy + sum(others.values()))
    rows = _other_models(sizes, config, work, mesh)
    largest = width * sizes.policy + FLOAT32 * largest_layer(sizes.shape)
    before = memory(work, mesh)["weights"] + width * sizes.policy  # the engine's copy
    for key, size in others.items():
        largest = max(largest, before + width * size + FLOAT32 * largest_layer(sizes.shapes[key]))
        before += rows[key.rpartition(".")[2]]
    return largest


def work_of(sizes: Sizes, config: Config, command: str, longest: int) -> Work:
    """Return the updates of a step of a command. longest: tokens of the longest prompt, chat or
    answer, which all are taken to have."""
    rl, train = config.rl, config.train
    updates = 1
    if command in ("train", "distill"):
        new, updates = config.rollout.max_new_tokens, rl.minibatches * rl.epochs
        together = max(1, min(rl.group_size, (train.tokens_per_microbatch - longest) // new))
        episodes = rl.prompts_per_step * rl.group_size
        clusters = -(-episodes // (together * rl.minibatches))
        cluster, length = longest + together * new, longest + new
    else:
        pairs = command != "sft"
        clusters = (config.preference if pairs else config.sft).batch_size
        cluster, length = longest * (1 + pairs), longest
    return Work(
        shape=sizes.shape,
        dtype=sizes.place.dtype,
        clusters=clusters,
        cluster=cluster,
        length=length,
        microbatch=train.tokens_per_microbatch,
        checkpointing=train.activation_checkpointing,
        offload=train.offload_optimizer,
        adapters=sizes.adapters,
        muon=sizes.muon,
        saved_in_8bit=sizes.saved_in_8bit,
        megatron=not trainer_of(config).runs_alone,
        updates=updates,
    )


def rollout_of(sizes: Sizes, config: Config, longest: int) -> Rollout:
    """Return the rollout of a step. An engine holds as many sequences as its cache, which shares a
    prompt's pages between the samples of its group."""
    rl, rollout, width = config.rl, config.rollout, sizes.place.dtype.itemsize
    tokens = longest / rl.group_size + rollout.max_new_tokens
    held = int((rollout.cache_mb << 20) / (tokens * cached_bytes(sizes.shape, width)))
    return Rollout(
        shape=sizes.shape,
        width=width,
        prompts=rl.prompts_per_step,
        episodes=prod((rl.prompts_per_step, rl.group_size)),
        prompt=longest,
        new=rollout.max_new_tokens,
        batch=max(1, min(rollout.max_batch, held)),
    )


def times_of_rollout(work: Rollout, count: int, gpu: Gpu, assumed: Assumptions) -> float:
    """Return the seconds of a rollout by so many engines, at most one a prompt."""
    return rollout_time(work, min(count, work.prompts), gpu, assumed)
