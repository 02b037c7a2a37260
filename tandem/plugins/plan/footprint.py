"""Memory and disk that a run needs, by arithmetic over the shapes of its models: one process, or
rank 0 of a mesh and the ranks beside it.

No weights are loaded. Microbatches and the cache count as large as they may become. Passing tensors
of a step come on top (plan_memory.py has them for the CPU). results/scaling.md has the formulas of
meshes in words, with their checks against published numbers.
"""

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tandem.choices import trainer_of, transport_of
from tandem.config.parallel import Parallel
from tandem.config.schema import Config
from tandem.config.training import Lora
from tandem.jobs.models import placement, releases_cache
from tandem.model.config_file import check_model
from tandem.model.load import empty_model
from tandem.model.lora import chosen_shapes
from tandem.model.onednn import pack_bytes
from tandem.model.placement import Placement
from tandem.model.quantized import quantized_bytes
from tandem.plugins.plan.activations import FLOAT32, activation_bytes
from tandem.plugins.plan.shards import Work, largest_layer, memory
from tandem.registry import find
from tandem.runtime.disk import existing_parent, human_bytes
from tandem.runtime.errors import UserError
from tandem.runtime.place import here
from tandem.train.optimizer import Optimizer

Need = tuple[str, int, str]  # what, bytes, how
COPY, CACHE = "whole weights of rank 0", "key/value cache"
OF_RANK_0 = {COPY, CACHE, "model", "packed weights of rank 0"}
NAMED = 3  # settings of the advice to a run out of memory
# it sums gradients in another order, so a run that is under way keeps its value
CHANGES_BITS = "train.tokens_per_microbatch"


# ---------------------------------------------------------------- what there is


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Memory and disk that a run may use, in bytes."""

    memory: int  # of the machine, or of the container
    disk: int  # free for the run folder, with the space that its old checkpoints give back

    @classmethod
    def here(cls, folder: Path) -> "Machine":
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        limits = [
            Path("/sys/fs/cgroup/memory.max"),
            Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        ]
        texts = [limit.read_text().strip() for limit in limits if limit.is_file()]
        memory = min([memory, *(int(text) for text in texts if text.isdecimal())])
        held = sum(file.stat().st_size for file in (folder / "checkpoints").glob("step_*/*"))
        return cls(memory=memory, disk=shutil.disk_usage(existing_parent(folder)).free + held)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Parameters of the models of a run, counted without their storage."""

    place: Placement  # of all models
    shape: Any  # transformers config of the policy
    policy: int
    adapters: int  # 0 without LoRA: the policy itself is trained
    others: dict[str, int]  # of further models, by config key
    shapes: dict[str, Any] = field(default_factory=dict)  # theirs
    muon: int = 0  # of the policy, those that Muon steps
    muon_critic: int = 0
    saved_in_8bit: int = 0  # bytes that moments of 8 bits save, without a critic's
    saved_in_8bit_critic: int = 0
    saved_in_base: int = 0  # bytes that lora.base saves of the policy
    saved_in_base_critic: int = 0

    @property
    def on_gpu(self) -> bool:
        return self.place.device.type != "cpu"

    @property
    def packed(self) -> int:
        """Bytes of a parameter in a pack of weights; a GPU has none."""
        return 0 if self.on_gpu else pack_bytes(self.place.dtype)

    @property
    def trained(self) -> int:
        """Parameters that are trained, without those of a critic."""
        return self.adapters or self.policy

    @property
    def trained_critic(self) -> int:
        """Parameters of a critic that are trained; 0 without one."""
        critic = self.others.get("critic.path", 0)
        return critic and (self.adapters or critic)

    @property
    def checkpoint(self) -> int:
        """Bytes of all trained weights and their moments."""
        saved = 4 * (self.muon + self.muon_critic)  # Muon has one where AdamW has two
        saved += self.saved_in_8bit + self.saved_in_8bit_critic
        return 12 * (self.trained + self.trained_critic) - saved


def model_sizes(config: Config, command: str) -> Sizes:
    """Count parameters on the meta device: shapes without storage. Raises UserError for adapters'
    targets that are not there."""
    policy, lora = _module(config.model.path), config.lora
    optimizer = find("optimizers", config.train.optimizer, key="train.optimizer")
    adapted = chosen_shapes(policy, lora.targets) if lora.rank else []
    paths = {
        "model.reference": (config.model.reference or config.model.path)
        * (command == "dpo" or (command == "train" and config.rl.kl_coef > 0)),
        "critic.path": (config.critic.path or config.model.path)
        * (command == "train" and config.rl.estimator.needs_critic),
        "distill.teacher": config.distill.teacher * (command == "distill"),
        "reward.model": config.reward.model * (command != "rm"),
    }
    modules = {key: _module(path) for key, path in paths.items() if path}
    critic = modules.get("critic.path")
    return Sizes(
        place=placement(config),
        shape=policy.config.get_text_config(),
        policy=_count(policy),
        adapters=lora.rank * sum(map(sum, adapted)),
        others={key: _count(module) for key, module in modules.items()},
        shapes={key: module.config.get_text_config() for key, module in modules.items()},
        muon=_count_momentum(policy, optimizer),
        muon_critic=_count_momentum(critic, optimizer) if critic else 0,
        saved_in_8bit=_saved_in_moments(policy, lora, optimizer),
        saved_in_8bit_critic=_saved_in_moments(critic, lora, optimizer) if critic else 0,
        saved_in_base=_saved_in_base(policy, config),
        saved_in_base_critic=_saved_in_base(critic, config) if critic else 0,
    )


def _module(path: str) -> Any:
    return empty_model(path, check_model(path, head="value"))


def _count(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _count_momentum(module: Any, optimizer: type[Optimizer]) -> int:
    named = module.named_parameters()
    return sum(weight.numel() for name, weight in named if optimizer.has_momentum(name, weight))


def _saved_in_moments(module: Any, lora: Lora, optimizer: type[Optimizer]) -> int:
    """Count the bytes that an optimizer's moments save of a module, or of its adapters."""
    shapes = [parameter.shape for parameter in module.parameters()]
    if lora.rank:
        chosen = chosen_shapes(module, lora.targets)
        shapes = [torch.Size((lora.rank, inputs)) for _, inputs in chosen]
        shapes += [torch.Size((outputs, lora.rank)) for outputs, _ in chosen]
    return sum(8 * shape.numel() - optimizer.moment_bytes(shape) for shape in shapes)


def _saved_in_base(module: Any, config: Config) -> int:
    """Count the bytes that the linears of a module's layers save in fewer bits (lora.base)."""
    base = config.lora.base
    if base == "float":
        return 0
    width, parts = placement(config).dtype.itemsize, module.base_model.modules()
    weights = [part.weight for part in parts if isinstance(part, torch.nn.Linear)]
    return sum(width * weight.numel() - quantized_bytes(weight, base) for weight in weights)


# ---------------------------------------------------------------- memory


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
        whole=sizes.policy,
        clusters=clusters,
        cluster=cluster,
        length=length,
        microbatch=train.tokens_per_microbatch,
        checkpointing=train.activation_checkpointing,
        offload=sizes.on_gpu and train.offload_optimizer,
        adapters=sizes.adapters,
        muon=sizes.muon,
        saved_in_8bit=sizes.saved_in_8bit,
        megatron=not trainer_of(config).runs_alone,
        updates=updates,
    )


def is_divided(work: Work, mesh: Parallel) -> bool:
    """Tell whether the trainer's weights are others than the engine's."""
    return mesh.processes > 1 or work.megatron


def rank_memory(sizes: Sizes, config: Config, work: Work, mesh: Parallel) -> dict[str, int]:
    """Return the bytes of rank 0, which besides its part of the models has the engine."""
    width, divided = work.dtype.itemsize, is_divided(work, mesh)
    rows = memory(work, mesh)
    whole, cache = sizes.packed * sizes.policy, config.rollout.cache_mb << 20
    if releases_cache(config, sizes.place):
        cache = max(0, cache - rows["gradients"] - rows["activations"])
    packs = {"packed weights of rank 0" if divided else "packed weights": whole}
    if divided and mesh.replicas == 1:  # FSDP's gathered weights keep none
        packs["packed weights"] = sizes.packed * rows["weights"] // width
    others = {CACHE: cache, COPY: width * sizes.policy * divided}
    if not divided:
        rows["weights"] -= sizes.saved_in_base
        others["adapters"] = width * sizes.adapters
    others |= _other_models(sizes, config, work, mesh)
    if not sizes.on_gpu:
        others["a save under way"] = sizes.checkpoint // mesh.processes
    rows = {"weights": rows.pop("weights")} | packs | rows | others
    return {name: size for name, size in rows.items() if size}


def _other_models(sizes: Sizes, config: Config, work: Work, mesh: Parallel) -> dict[str, int]:
    """Return the bytes of further models, which FSDP holds in float32 parts; a reward model is
    whole, on rank 0. Without adapters the policy is its own reference."""
    width, divided = work.dtype.itemsize, is_divided(work, mesh)
    shards = 1 if work.megatron else mesh.shard or mesh.replicas
    left = 1 / (mesh.tensor * mesh.pipeline * shards) if divided else 1.0
    frozen = FLOAT32 * left if divided else width + sizes.packed
    rows = {}
    for key, size in sizes.others.items():
        held = frozen * size
        if key == "reward.model" and divided:
            held = width * size
        elif key == "model.reference" and sizes.adapters and not config.model.reference:
            held = 0 if divided else sizes.packed * size  # packs of the weights without adapters
        elif key == "critic.path":
            gradients = FLOAT32 * sizes.trained_critic
            state = 2 * gradients - 4 * sizes.muon_critic - sizes.saved_in_8bit_critic
            state += gradients if width < FLOAT32 and not divided else 0  # masters
            held += left * (gradients + (0 if work.offload else state))
            held -= 0 if divided else sizes.saved_in_base_critic
        rows[_row_of(key)] = round(held)
    return rows


def loading_memory(sizes: Sizes, config: Config, work: Work, mesh: Parallel) -> int:
    """Return the most bytes of rank 0 while it loads its models: each is whole before it is
    divided, a layer of it in float32 at a time, beside those that came before."""
    width, rows = work.dtype.itemsize, _other_models(sizes, config, work, mesh)
    others = {key: size for key, size in sizes.others.items() if rows[_row_of(key)]}
    if not is_divided(work, mesh):
        return width * (sizes.policy + sum(others.values()))
    largest = width * sizes.policy + FLOAT32 * largest_layer(sizes.shape)
    before = memory(work, mesh)["weights"] + width * sizes.policy  # the engine's copy
    for key, size in others.items():
        largest = max(largest, before + width * size + FLOAT32 * largest_layer(sizes.shapes[key]))
        before += rows[_row_of(key)]
    return largest


def _row_of(key: str) -> str:
    """Return the row of a further model, e.g. "teacher" of distill.teacher."""
    return "critic" if key == "critic.path" else key.rpartition(".")[2]


def needs(sizes: Sizes, config: Config, command: str, longest: int) -> list[Need]:
    """List the memory of a run: of its one process, or of its mesh on this machine; on GPUs that
    of rank 0. longest: tokens, as in `work_of`."""
    mesh = config.parallel
    work = work_of(sizes, config, command, longest)
    rows = rank_memory(sizes, config, work, mesh)
    if command == "rm":
        rows.pop(CACHE, None)
    if is_divided(work, mesh):
        count = 1 if sizes.on_gpu else here(os.environ, mesh.processes).local_size
        each = f"of each of {count} processes" if count > 1 else f"of rank 0, mesh {mesh.mesh}"
        found = [
            (name, size, "of rank 0 alone") if name in OF_RANK_0 else (name, count * size, each)
            for name, size in rows.items()
        ]
    else:
        found = [(name, size, _how(name, sizes, config)) for name, size in rows.items()]
    return found + worker_rows(sizes, config, command)


def _how(name: str, sizes: Sizes, config: Config) -> str:
    """Say how a row of one process is computed."""
    width, train, muon = sizes.place.dtype.itemsize, config.train, bool(sizes.muon)
    match name:
        case "weights" if sizes.saved_in_base:
            return f"{width} bytes x parameters, but {config.lora.base} in the layers' linears"
        case "weights":
            return f"{width} bytes x parameters, of engine and trainer"
        case "packed weights":
            return f"{sizes.packed} bytes x parameters, in oneDNN's order"
        case "Adam moments" if sizes.saved_in_8bit:
            return "2 bytes x parameters, and scales"
        case "Adam moments":
            return f"8 bytes x {'all other' if muon else 'trained'} parameters"
        case "activations":
            other = not train.activation_checkpointing
            instead = human_bytes(activations(sizes, config, activation_checkpointing=other))
            switch = "with" if other else "without"
            return f"{train.tokens_per_microbatch:,} tokens; {instead} {switch} checkpointing"
        case "key/value cache" if releases_cache(config, sizes.place):
            return "rollout.cache_mb beyond what an update takes"
        case "adapters":
            return f"{width} bytes x (inputs + outputs) x {config.lora.rank} per linear"
        case "reference" if sizes.adapters and not config.model.reference:
            return "packs of the weights without adapters"
    return {
        "optimizer's share": "three buckets; the others are in host memory",
        "masters": "float32, 4 bytes x trained parameters",
        "Muon momentum": "4 bytes x parameters of the layers' matrices",
        "gradients": "4 bytes x trained parameters",
        "key/value cache": "at most rollout.cache_mb",
        "critic": "weights, packs, gradients and moments of its own",
        "a save under way": "a copy of weights and moments",
    }.get(name, "weights and packs of the frozen model")


def activations(sizes: Sizes, config: Config, **changes: Any) -> int:
    """Return the bytes that autograd keeps of a microbatch, under these changes of [train]."""
    train = config.train.model_copy(update=changes)
    return activation_bytes(
        sizes.shape,
        train.tokens_per_microbatch,
        sizes.place.dtype,
        checkpointing=train.activation_checkpointing,
        head=not sizes.adapters,
    )


def gpu_memory(place: Placement) -> int:
    """Return the bytes of a GPU."""
    return torch.cuda.get_device_properties(place.device).total_memory


def host_memory(sizes: Sizes, config: Config) -> list[Need]:
    """List the memory that a run takes of its machine while its models are on a GPU."""
    if not sizes.on_gpu:
        return []
    trained, rows = sizes.trained + sizes.trained_critic, {"a save under way": sizes.checkpoint}
    if config.train.offload_optimizer:
        masters = {"masters": 4 * trained} if sizes.place.dtype != torch.float32 else {}
        rows = masters | {"Adam moments": 8 * trained} | rows
    return [(name, size, _how(name, sizes, config)) for name, size in rows.items()]


def worker_rows(sizes: Sizes, config: Config, command: str) -> list[Need]:
    """List the memory of the rollout workers, if the run has some."""
    rollout, width = config.rollout, sizes.place.dtype.itemsize
    if not (rollout.workers and command in ("train", "distill")):
        return []
    each, versions = width + sizes.packed, rollout.staleness + 1
    held = rollout.workers * (each * sizes.policy + (rollout.cache_mb << 20))
    if transport_of(config).stages:
        held += rollout.workers * width * sizes.policy  # the copy that they receive into
    text = f"shared memory, {versions} versions"
    return [
        ("rollout workers", held, f"{rollout.workers} x weights, packs and rollout.cache_mb"),
        ("published weights", versions * width * sizes.policy, text),
    ]


# ---------------------------------------------------------------- disk, and advice


def disk(sizes: Sizes, config: Config) -> list[Need]:
    """List the disk needs of a run, besides its episodes."""
    kept = config.run.keep_checkpoints + config.eval.keep_best
    checkpoints = f"weights and moments; {kept} kept while one is written"
    return [
        ("checkpoints", (kept + 1) * sizes.checkpoint, checkpoints),
        ("export", sizes.place.dtype.itemsize * sizes.policy, "the Hugging Face directory"),
    ]


def require_disk(
    config: Config, command: str, folder: Path, machine: Machine | None = None
) -> None:
    """Raise UserError if checkpoints and export do not fit on the disk of the run folder."""
    there = (machine or Machine.here(folder)).disk
    needed = sum(size for _, size, _ in disk(model_sizes(config, command), config))
    if needed > there:
        raise UserError(
            "the run would not fit on the disk",
            where=str(folder),
            found=f"{human_bytes(there)} free",
            expected=f"{human_bytes(needed)} for checkpoints and export",
            next="free some, or another run.folder; fewer run.keep_checkpoints need less",
        )


def out_of_memory(error: Exception, config: Config, command: str) -> UserError:
    """Make the error of an allocation that failed: the settings that would save most, and how
    much."""
    sizes, longest = model_sizes(config, command), config.data.max_prompt_tokens
    needed = sum(size for _, size, _ in needs(sizes, config, command, longest))
    settings = [
        f"{setting} saves {human_bytes(size)}"
        + " (in a new run.folder)" * setting.startswith(CHANGES_BITS)
        for setting, size in savings(sizes, config, command, longest)[:NAMED]
    ]
    return UserError(
        "out of memory",
        where=f"{sizes.place.device}, {config.model.path}",
        found=str(error).strip().partition("\n")[0],
        expected=f"about {human_bytes(needed)} and the passing tensors of a step (tandem plan)",
        next="nothing is lost: the same command goes on from the last checkpoint, with one of "
        + "; ".join(settings),
    )


def savings(sizes: Sizes, config: Config, command: str, longest: int) -> list[tuple[str, int]]:
    """List (setting, bytes that it saves on the device of the models), the most first."""
    train, found = config.train, {}
    before = sum(size for _, size, _ in needs(sizes, config, command, longest))
    for section, key, value in (
        ("train", "activation_checkpointing", True),
        ("train", "tokens_per_microbatch", max(16, train.tokens_per_microbatch // 2)),
        ("train", "offload_optimizer", True),
        ("rollout", "cache_mb", max(1, config.rollout.cache_mb // 2)),
    ):
        if key == "offload_optimizer" and not train.can_offload:
            continue
        part = getattr(config, section).model_copy(update={key: value})
        other = needs(sizes, config.model_copy(update={section: part}), command, longest)
        found[f"{section}.{key}={str(value).lower()}"] = before - sum(size for _, size, _ in other)
    return sorted((item for item in found.items() if item[1] > 0), key=lambda item: -item[1])
