"""Memory and disk that a run needs, by arithmetic over the shapes of its models.

No weights are loaded. Microbatches and the cache count as large as they may become. Passing tensors
of a step come on top (plugins/plan/plan_memory.py has them for the CPU).
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tandem.config.schema import Config
from tandem.config.training import Lora
from tandem.jobs.models import placement, releases_cache
from tandem.model.config_file import check_model
from tandem.model.load import empty_model
from tandem.model.lora import chosen_shapes
from tandem.model.onednn import pack_bytes
from tandem.model.placement import Placement
from tandem.model.quantized import quantized_bytes
from tandem.plugins.optim.adamw_8bit import state_bytes
from tandem.plugins.optim.offload import BUCKET
from tandem.plugins.plan.activations import activation_bytes
from tandem.runtime.disk import existing_parent, human_bytes
from tandem.runtime.errors import UserError
from tandem.train.muon import is_hidden_matrix

Need = tuple[str, int, str]  # what, bytes, how


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


def memory(sizes: Sizes, config: Config, command: str) -> list[Need]:
    """List the memory of a run of the command, on the device of its models."""
    policy, adapters = sizes.policy, sizes.adapters
    width, packed = sizes.place.dtype.itemsize, sizes.packed
    text = "bytes x parameters, of engine and trainer"
    if sizes.saved_in_base:
        text = f"bytes x parameters, but {config.lora.base} in the layers' linears"
    rows = [("weights", width * policy - sizes.saved_in_base, f"{width} {text}")]
    if packed:
        order = f"{packed} bytes x parameters, in oneDNN's order"
        rows.append(("packed weights", packed * policy, order))
    if _is_offloaded(sizes, config):
        text = "three buckets; the others are in host memory"
        state = sum(size for _, size, _ in _optimizer_rows(sizes, sizes.trained))
        rows.append(("optimizer's share", min(3 * 12 * BUCKET, state), text))
    else:
        rows += _optimizer_rows(sizes, sizes.trained, sizes.muon, sizes.saved_in_8bit)
    rows += _update_rows(sizes, config)
    if command != "rm":
        rows.append(_cache_row(sizes, config))
    if adapters:
        each = f"{width} bytes x (inputs + outputs) x {config.lora.rank} per linear"
        rows.append(("adapters", width * adapters, each))
    rows += _other_models(sizes, config)
    if not sizes.on_gpu:
        rows.append(_save_row(sizes))
    return rows + worker_rows(sizes, config, command)


def gpu_memory(place: Placement) -> int:
    """Return the bytes of a GPU."""
    return torch.cuda.get_device_properties(place.device).total_memory


def host_memory(sizes: Sizes, config: Config) -> list[Need]:
    """List the memory that a run takes of its machine while its models are on a GPU."""
    if not sizes.on_gpu:
        return []
    trained = sizes.trained + sizes.trained_critic
    offloaded = _optimizer_rows(sizes, trained) if _is_offloaded(sizes, config) else []
    return [*offloaded, _save_row(sizes)]


def savings(
    sizes: Sizes, config: Config, needs: Callable[[Sizes, Config], list[Need]]
) -> list[tuple[str, int]]:
    """List (setting, bytes that it saves on the device of the models), the most first. needs: of a
    run with a config."""
    train, found = config.train, {}
    before = sum(size for _, size, _ in needs(sizes, config))
    for section, key, value in (
        ("train", "activation_checkpointing", True),
        ("train", "tokens_per_microbatch", max(16, train.tokens_per_microbatch // 2)),
        ("train", "offload_optimizer", True),
        ("rollout", "cache_mb", max(1, config.rollout.cache_mb // 2)),
    ):
        if key == "offload_optimizer" and train.optimizer != "adamw":
            continue  # only AdamW's state can be fetched
        part = getattr(config, section).model_copy(update={key: value})
        other = needs(sizes, config.model_copy(update={section: part}))
        found[f"{section}.{key}={str(value).lower()}"] = before - sum(size for _, size, _ in other)
    return sorted((item for item in found.items() if item[1] > 0), key=lambda item: -item[1])


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


def _is_offloaded(sizes: Sizes, config: Config) -> bool:
    return sizes.on_gpu and config.train.offload_optimizer


def _optimizer_rows(sizes: Sizes, trained: int, muon: int = 0, saved: int = 0) -> list[Need]:
    rows = []
    if sizes.place.dtype != torch.float32:
        rows.append(("masters", 4 * trained, "float32, 4 bytes x trained parameters"))
    whose = "all other" if muon else "trained"
    text = "2 bytes x parameters, and scales" if saved else f"8 bytes x {whose} parameters"
    rows.append(("Adam moments", 8 * (trained - muon) - saved, text))
    if muon:
        rows.append(("Muon momentum", 4 * muon, "4 bytes x parameters of the layers' matrices"))
    return rows


def _update_rows(sizes: Sizes, config: Config) -> list[Need]:
    train, other = config.train, not config.train.activation_checkpointing
    instead = human_bytes(activations(sizes, config, activation_checkpointing=other))
    switch = "with" if other else "without"
    text = f"{train.tokens_per_microbatch:,} tokens; {instead} {switch} checkpointing"
    return [
        ("gradients", 4 * sizes.trained, "4 bytes x trained parameters"),
        ("activations", activations(sizes, config), text),
    ]


def _cache_row(sizes: Sizes, config: Config) -> Need:
    cache = config.rollout.cache_mb << 20
    if not releases_cache(config, sizes.place):
        return "key/value cache", cache, "at most rollout.cache_mb"
    turns = sum(size for _, size, _ in _update_rows(sizes, config))
    text = "rollout.cache_mb beyond what an update takes"
    return "key/value cache", max(0, cache - turns), text


def _other_models(sizes: Sizes, config: Config) -> list[Need]:
    rows, packed, width = [], sizes.packed, sizes.place.dtype.itemsize
    frozen, trained = width + packed, sizes.trained_critic
    for key, size in sizes.others.items():
        if key == "critic.path":
            held = frozen * size + 4 * trained - sizes.saved_in_base_critic
            if not _is_offloaded(sizes, config):
                saved = sizes.saved_in_8bit_critic
                state = _optimizer_rows(sizes, trained, sizes.muon_critic, saved)
                held += sum(count for _, count, _ in state)
            rows.append(("critic", held, "weights, packs, gradients and moments of its own"))
        elif key == "model.reference" and sizes.adapters and not config.model.reference:
            rows.append(("reference", packed * size, "packs of the weights without adapters"))
        else:
            text = "weights and packs of the frozen model"
            rows.append((key.rpartition(".")[2], frozen * size, text))
    return rows


def _save_row(sizes: Sizes) -> Need:
    return "a save under way", sizes.checkpoint, "a copy of weights and moments"


def worker_rows(sizes: Sizes, config: Config, command: str) -> list[Need]:
    """List the memory of the rollout workers, if the run has some."""
    rollout, width = config.rollout, sizes.place.dtype.itemsize
    if not (rollout.workers and command in ("train", "distill")):
        return []
    each, versions = width + sizes.packed, rollout.staleness + 1
    held = rollout.workers * (each * sizes.policy + (rollout.cache_mb << 20))
    if config.weights.transport in ("collective", "rdma"):
        held += rollout.workers * width * sizes.policy  # the copy that they receive into
    return [
        ("rollout workers", held, f"{rollout.workers} x weights, packs and rollout.cache_mb"),
        (
            "published weights",
            versions * width * sizes.policy,
            f"shared memory, {versions} versions",
        ),
    ]


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
    machine = machine or Machine.here(folder)
    needed = sum(size for _, size, _ in disk(model_sizes(config, command), config))
    if needed > machine.disk:
        raise UserError(
            "the run would not fit on the disk",
            where=str(folder),
            found=f"{human_bytes(machine.disk)} free",
            expected=f"{human_bytes(needed)} for checkpoints and export",
            next="free some, or another run.folder; fewer run.keep_checkpoints need less",
        )


def model_sizes(config: Config, command: str) -> Sizes:
    """Count parameters on the meta device: shapes without storage. Raises UserError for adapters'
    targets that are not there."""
    policy = _module(config.model.path)
    adapted = chosen_shapes(policy, config.lora.targets) if config.lora.rank else []
    adapters = config.lora.rank * sum(map(sum, adapted))
    paths = {
        "model.reference": (config.model.reference or config.model.path)
        * (command == "dpo" or (command == "train" and config.rl.kl_coef > 0)),
        "critic.path": (config.critic.path or config.model.path)
        * (command == "train" and config.rl.advantage == "gae"),
        "distill.teacher": config.distill.teacher * (command == "distill"),
        "reward.model": config.reward.model * (command != "rm"),
    }
    modules = {key: _module(path) for key, path in paths.items() if path}
    muon, in_8bit = (config.train.optimizer == name for name in ("muon", "adamw_8bit"))
    critic = modules.get("critic.path")
    return Sizes(
        place=placement(config),
        shape=policy.config.get_text_config(),
        policy=_count(policy),
        adapters=adapters,
        others={key: _count(module) for key, module in modules.items()},
        shapes={key: module.config.get_text_config() for key, module in modules.items()},
        muon=_count_hidden(policy) if muon else 0,
        muon_critic=_count_hidden(critic) if muon else 0,
        saved_in_8bit=_saved_in_8bit(policy, config.lora) if in_8bit else 0,
        saved_in_8bit_critic=_saved_in_8bit(critic, config.lora) if in_8bit and critic else 0,
        saved_in_base=_saved_in_base(policy, config),
        saved_in_base_critic=_saved_in_base(critic, config) if critic else 0,
    )


def _module(path: str) -> Any:
    return empty_model(path, check_model(path, head="value"))


def _count(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _saved_in_8bit(module: Any, lora: Lora) -> int:
    """Count the bytes that moments of 8 bits save of a module, or of its adapters."""
    shapes = [parameter.shape for parameter in module.parameters()]
    if lora.rank:
        chosen = chosen_shapes(module, lora.targets)
        shapes = [torch.Size((lora.rank, inputs)) for _, inputs in chosen]
        shapes += [torch.Size((outputs, lora.rank)) for outputs, _ in chosen]
    return sum(8 * shape.numel() - state_bytes(shape) for shape in shapes)


def _saved_in_base(module: Any, config: Config) -> int:
    """Count the bytes that the linears of a module's layers save in fewer bits (lora.base)."""
    if (base := config.lora.base) == "float":
        return 0
    width, parts = placement(config).dtype.itemsize, module.base_model.modules()
    weights = [part.weight for part in parts if isinstance(part, torch.nn.Linear)]
    return sum(width * weight.numel() - quantized_bytes(weight, base) for weight in weights)


def _count_hidden(module: Any) -> int:
    named = () if module is None else module.named_parameters()
    return sum(weight.numel() for name, weight in named if is_hidden_matrix(name, weight))
