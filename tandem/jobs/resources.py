"""Memory and disk that a run needs, by arithmetic over the shapes of its models.

No weights are loaded; the computation of a step comes on top.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.config.schema import Config
from tandem.jobs.models import placement
from tandem.model.config_file import check_model
from tandem.model.linear import pack_bytes
from tandem.model.load import empty_model
from tandem.model.lora import chosen_linears
from tandem.runtime.disk import existing_parent, human_bytes
from tandem.runtime.errors import UserError

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

    policy: int
    adapters: int  # 0 without LoRA: the policy itself is trained
    others: dict[str, int]  # of further models, by config key

    @property
    def trained(self) -> int:
        """Parameters that are trained, without those of a critic."""
        return self.adapters or self.policy

    @property
    def checkpoint(self) -> int:
        """Bytes of all trained weights and their moments."""
        critic = self.others.get("critic.path", 0)
        return 12 * (self.trained + (critic and (self.adapters or critic)))


def memory(sizes: Sizes, config: Config, command: str) -> list[Need]:
    """List the memory of a run of the command, on the device of its models."""
    policy, trained, adapters = sizes.policy, sizes.trained, sizes.adapters
    rollout, rank, place = config.rollout, config.lora.rank, placement(config)
    cache, width = rollout.cache_mb << 20, place.dtype.itemsize
    packed = pack_bytes(place.dtype) if place.device.type == "cpu" else 0
    frozen, masters = width + packed, 4 * (width < 4)
    rows = [("weights", width * policy, f"{width} bytes x parameters, of engine and trainer")]
    if packed:
        order = f"{packed} bytes x parameters, in oneDNN's order"
        rows.append(("packed weights", packed * policy, order))
    if masters:
        rows.append(("masters", masters * trained, "float32, 4 bytes x trained parameters"))
    rows += [
        ("gradients", 4 * trained, "4 bytes x trained parameters"),
        ("Adam moments", 8 * trained, "8 bytes x trained parameters"),
    ]
    if command != "rm":
        rows.append(("key/value cache", cache, "at most rollout.cache_mb"))
    if adapters:
        each = f"{width} bytes x (inputs + outputs) x {rank} per linear"
        rows.append(("adapters", width * adapters, each))
    for key, size in sizes.others.items():
        if key == "critic.path":
            held = frozen * size + (12 + masters) * (adapters or size)
            rows.append(("critic", held, "weights, packs, gradients and moments of its own"))
        elif key == "model.reference" and adapters and not config.model.reference:
            rows.append(("reference", packed * size, "packs of the weights without adapters"))
        else:
            text = "weights and packs of the frozen model"
            rows.append((key.rpartition(".")[2], frozen * size, text))
    rows.append(("a save under way", sizes.checkpoint, "a copy of weights and moments"))
    if rollout.workers and command in ("train", "distill"):
        each = f"{rollout.workers} x weights, packs and rollout.cache_mb"
        rows.append(("rollout workers", rollout.workers * (frozen * policy + cache), each))
        versions = rollout.staleness + 1
        published = f"shared memory, {versions} versions"
        rows.append(("published weights", versions * width * policy, published))
    return rows


def disk(sizes: Sizes, config: Config) -> list[Need]:
    """List the disk needs of a run, besides its episodes."""
    kept = config.run.keep_checkpoints
    checkpoints = f"weights and moments; {kept} kept while one is written"
    return [
        ("checkpoints", (kept + 1) * sizes.checkpoint, checkpoints),
        ("export", placement(config).dtype.itemsize * sizes.policy, "the Hugging Face directory"),
    ]


def require_disk(config: Config, command: str, folder: Path, machine: Machine) -> None:
    """Raise UserError if checkpoints and export do not fit on the disk of the run folder."""
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
    adapted = chosen_linears(policy, config.lora.targets) if config.lora.rank else []
    adapters = config.lora.rank * sum(
        linear.in_features + linear.out_features for linear in adapted
    )
    paths = {
        "model.reference": (config.model.reference or config.model.path)
        * (command == "dpo" or (command == "train" and config.rl.kl_coef > 0)),
        "critic.path": (config.critic.path or config.model.path)
        * (command == "train" and config.rl.advantage == "gae"),
        "distill.teacher": config.distill.teacher * (command == "distill"),
        "reward.model": config.reward.model * (command != "rm"),
    }
    others = {key: _count(_module(path)) for key, path in paths.items() if path}
    return Sizes(policy=_count(policy), adapters=adapters, others=others)


def _module(path: str) -> Any:
    return empty_model(path, check_model(path, head="value"))


def _count(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
