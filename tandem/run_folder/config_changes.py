"""The keys of a config that may change while a run goes on in its folder.

It does not know what a folder holds beside the config.
"""

import tomllib
from pathlib import Path
from typing import Any

from tandem.config.parallel import DIMENSIONS
from tandem.run_folder.files import KEPT
from tandem.runtime.errors import UserError

THREADS = "run.threads"  # free if the exactness probe has found that it changes no bit
# Free as well; each mesh adds up gradients in an order of its own.
MESH = {f"parallel.{name}" for name in (*DIMENSIONS, "shard")}
# Keys that change neither a step nor its place in the run. The folder may have been moved since.
_FREE_OF_SECTIONS = {
    "cluster": ("address", "env_workers", "nodes", "placement", "reward_workers", "trainers"),
    "eval": ("every", "keep_best", "metric", "patience"),
    "model": ("device",),
    "parallel": ("timeout_s",),
    "reward": ("workers",),
    "rl": ("max_flat_steps", "max_truncated"),
    "rollout": ("cache_mb", "devices", "release_cache", "restarts", "workers"),
    "run": ("folder", "keep_checkpoints", "save_every", "show_samples", "stall_s", "trackers"),
    "stream": ("kind",),
    "train": ("activation_checkpointing", "offload_optimizer"),
    "weights": ("delta", "transport"),
}
_FREE = {f"{section}.{name}" for section, names in _FREE_OF_SECTIONS.items() for name in names}
# bounds that may have stopped a run, and may grow from that value on
_BOUNDS = {"rl.max_gen_batches": 1, "train.max_bad_steps": 0}


def toml_values(toml: str) -> dict[str, Any]:
    """Read TOML by key: "[run]\\nseed = 1" -> {"run.seed": 1}."""
    return {
        f"{section}.{name}": value
        for section, fields in tomllib.loads(toml).items()
        for name, value in fields.items()
    }


def identifying_values(toml: str) -> dict[str, Any]:
    """Return the values that identify a run."""
    others = {*_BOUNDS, "run.steps", THREADS}
    values = toml_values(toml).items()
    return {k: value for k, value in values if k not in others and k not in _FREE | MESH}


def allowed_changes(
    old: dict[str, Any], new: dict[str, Any], *, any_threads: bool, path: Path
) -> list[str]:
    """Describe the allowed changes of values; old, new: values by key; any_threads: any thread
    count gives the same bits; path: the config.toml with the old ones.

    Raises UserError for a change that is not allowed.
    """
    changed = {
        key: f"{key}: {old.get(key, 'unset')!r} -> {new.get(key, 'unset')!r}"
        for key in {**old, **new}
        if old.get(key) != new.get(key)
    }
    for key in changed.keys() & MESH:
        changed[key] += (
            " (gradients are added up in another order: from here on the bits are this mesh's)"
        )
    refused = [key for key in changed if key not in _FREE | MESH and not _extends(key, old, new)]
    if THREADS in refused and (old[THREADS] == 0 or any_threads):
        refused.remove(THREADS)
    if refused:
        raise UserError(
            "the config differs from that of the run in the folder (its value -> the value now)\n"
            + "\n".join(f"  - {change}" for change in [changed[key] for key in refused]),
            where=str(path),
            expected="the same values; docs/concepts/durability.md lists the keys that may change",
            next=f"take the old values, another run.folder=PATH, or --fresh {KEPT}",
        )
    return list(changed.values())


def _extends(key: str, old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Tell whether a larger value makes the same run longer, or lets it go on.

    More steps do, unless the learning rate of past steps was bent by their number, or rollouts
    ahead of the last step were not made. So does a larger bound on what stopped the run: it changes
    no step made under the smaller one.
    """
    if key == "run.steps":
        return (
            new[key] > old.get(key, 0)
            and new["train.schedule"] == "constant"
            and not new["rollout.staleness"]
        )
    return key in _BOUNDS and new[key] > old.get(key, 0) >= _BOUNDS[key]
