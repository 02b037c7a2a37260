"""Values of a run with their origin, for `tandem plan`: those that are not the default, and what
`auto` and 0 become on this machine. It checks nothing.

    rl.group_size = 4    my.toml:12; default 8
    model.device = "auto"    default; here cpu, as PyTorch finds no GPU
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from tandem.cli.progress import WIDTH
from tandem.config.recipe import describe, toml_value
from tandem.config.schema import Config
from tandem.jobs.models import placement, releases_cache
from tandem.run_folder.folder import has_steps, resolved

# the commands that read a section, of those that not every one reads
_COMMANDS = {
    "sft": ("sft",),
    "preference": ("dpo", "rm"),
    "distill": ("distill",),
    "critic": ("train",),
    "rl": ("train", "distill"),
}


def value_lines(
    config: Config,
    command: str,
    origins: Mapping[str, str],
    here: Mapping[str, str],
    *,
    every: bool,
) -> Iterator[str]:
    """Yield a line for each value, two where one would be too wide. here: what becomes of values
    on this machine, by key; every: those too that are the default and stay as they are, or are of
    another command."""
    tree = config.model_dump()
    for key, default, _ in describe():
        section, _, name = key.partition(".")
        value, origin = toml_value(tree[section][name]), origins[key]
        of_others = command not in _COMMANDS.get(section, command)
        if not every and (of_others or (value == default and key not in here)):
            continue
        other = f"; default {default}" if value != default else ""
        given, about = f"  {key} = {value}", origin + other
        about += f"; here {here[key]}" if key in here else ""
        yield (
            f"{given}    {about}" if len(given + about) + 4 <= WIDTH else f"{given}\n      {about}"
        )


def values_here(config: Config, command: str, folder: Path) -> dict[str, str]:
    """Describe, by key, what the values that leave it open become on this machine, and why. Raises
    UserError for a device that is not there."""
    place, now = placement(config), resolved(config, folder)
    on_gpu = place.device.type == "cuda"
    kept = "as the run in the folder began"
    share = "OMP_NUM_THREADS" if "OMP_NUM_THREADS" in os.environ else "one a core"
    threads = kept if has_steps(folder) else share
    dtype = kept if has_steps(folder) else f"that of a {'GPU' if on_gpu else 'CPU'}"
    device = "the first GPU" if on_gpu else "as PyTorch finds no GPU"
    released = "a GPU's memory is the scarce one" if on_gpu else "there is no GPU"
    transport = "ray, on a Ray cluster" if config.cluster.nodes else "shm, on one machine"
    model = f"model.path, {config.model.path}"
    samples = command in ("train", "distill")
    open_values = [
        ("run.folder", "", f"{folder}", True),
        ("run.threads", 0, f"{now.run.threads}, {threads}", True),
        ("model.device", "auto", f"{place.device}, {device}", True),
        ("model.dtype", "auto", f"{now.model.dtype}, {dtype}", True),
        ("model.reference", "", model, command == "dpo" or bool(config.rl.kl_coef)),
        ("critic.path", "", model, command == "train" and config.rl.estimator.needs_critic),
        (
            "rollout.release_cache",
            "auto",
            f"{str(releases_cache(config, place)).lower()}, {released}",
            samples,
        ),
        ("weights.transport", "auto", transport, samples and bool(config.rollout.workers)),
    ]
    tree = config.model_dump()
    return {
        key: text
        for key, unset, text, used in open_values
        if used and tree[key.partition(".")[0]][key.partition(".")[2]] == unset
    }
