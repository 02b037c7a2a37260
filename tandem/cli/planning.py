"""`tandem plan`: the resolved config and the memory a run will need, by arithmetic and without loading weights."""

from typing import Any

from rich.table import Table

from tandem.cli.progress import console
from tandem.config import Config, describe, to_toml


def show_keys() -> None:
    table = Table("key", "default", "meaning")
    for row in describe():
        table.add_row(*row)
    console.print(table)


def plan(config: Config) -> None:
    console.print(to_toml(config), markup=False)
    from tandem.model.load import check_model

    check_model(config.model.path)
    parameters, model_config = _parameters(config.model.path)
    rows = memory(parameters, config, reference=bool(config.rl.kl_coef))
    table = Table("memory", "GiB", "how", title=f"{model_config.model_type}, {parameters / 1e6:,.1f}M parameters")
    for name, count, how in rows:
        table.add_row(name, f"{count / 2**30:.2f}", how)
    table.add_row("sum", f"{sum(count for _, count, _ in rows) / 2**30:.2f}", "activations of a microbatch come on top")
    console.print(table)
    episodes = config.rl.prompts_per_step * config.rl.group_size
    console.print(f"a step: {episodes} episodes, at most {episodes * config.rollout.max_new_tokens:,} sampled tokens, "
                  f"{config.rl.minibatches} optimizer update(s)")  # fmt: skip


def memory(parameters: int, config: Config, *, reference: bool) -> list[tuple[str, int, str]]:
    """(what, bytes, formula) of what a training run holds, in float32."""
    rows = [
        ("weights", 4 * parameters, "4 bytes x parameters, shared by engine and trainer"),
        ("packed weights", 4 * parameters, "the linear layers again, in oneDNN's order"),
        ("gradients", 4 * parameters, "4 bytes x parameters"),
        ("Adam moments", 8 * parameters, "8 bytes x parameters"),
        ("key/value cache", config.rollout.cache_mb << 20, "at most rollout.cache_mb"),
    ]
    return [*rows, ("reference", 8 * parameters, "weights and packs of the frozen model")] if reference else rows


def _parameters(path: str) -> tuple[int, Any]:
    """Counted on the meta device: shapes without storage."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(p.numel() for p in model.parameters()), config
