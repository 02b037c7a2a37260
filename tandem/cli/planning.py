"""`tandem plan`: the resolved config and the memory a run will need, by arithmetic and without loading weights."""

from typing import Any

from rich.table import Table

from tandem.cli.progress import console
from tandem.config import Config
from tandem.recipe import describe, to_toml


def show_keys() -> None:
    table = Table("key", "default", "meaning")
    for row in describe():
        table.add_row(*row)
    console.print(table)


def plan(config: Config) -> None:
    console.print(to_toml(config), markup=False)
    from tandem.build import playground
    from tandem.model.load import check_model

    model_config = check_model(config.model.path)
    with playground(config):  # environment and reward functions can be loaded
        pass
    parameters, adapters = _parameters(config, model_config)
    rows = memory(parameters, adapters, config)
    table = Table("memory", "GiB", "how", title=f"{model_config.model_type}, {parameters / 1e6:,.1f}M parameters")
    for name, count, how in rows:
        table.add_row(name, f"{count / 2**30:.2f}", how)
    table.add_row("sum", f"{sum(count for _, count, _ in rows) / 2**30:.2f}", "activations of a microbatch come on top")
    console.print(table)
    episodes = config.rl.prompts_per_step * config.rl.group_size * max(1, config.rl.max_gen_batches)
    bound = "at most " if config.rl.max_gen_batches else ""
    tokens, updates = episodes * config.rollout.max_new_tokens, config.rl.minibatches * config.rl.epochs
    console.print(
        f"a step: {bound}{episodes} episodes, at most {tokens:,} sampled tokens, {updates} optimizer update(s)"
    )


def memory(parameters: int, adapters: int, config: Config) -> list[tuple[str, int, str]]:
    """(what, bytes, formula) of what `tandem train` holds, in float32; adapters: their parameters, 0 without LoRA."""
    trained = adapters or parameters
    rows = [
        ("weights", 4 * parameters, "4 bytes x parameters, shared by engine and trainer"),
        ("packed weights", 4 * parameters, "the linear layers again, in oneDNN's order, adapters merged in"),
        ("gradients", 4 * trained, "4 bytes x trained parameters"),
        ("Adam moments", 8 * trained, "8 bytes x trained parameters"),
        ("key/value cache", config.rollout.cache_mb << 20, "at most rollout.cache_mb"),
    ]
    if adapters:
        rows.append(("adapters", 4 * adapters, f"4 bytes x (inputs + outputs) x {config.lora.rank} of each linear"))
    if config.rl.kl_coef and adapters and not config.model.reference:
        rows.append(("reference", 4 * parameters, "packs of the weights without adapters"))
    elif config.rl.kl_coef:
        rows.append(("reference", 8 * parameters, "weights and packs of the frozen model"))
    critics = 1 if config.rl.advantage == "gae" else 0
    if critics:
        rows.append(("critic", 8 * parameters + 12 * trained, "weights, packs, gradients and moments of its own"))
    rows.append(
        ("a save under way", 12 * trained * (1 + critics), "weights and moments, copied until they are written")
    )
    rollout = config.rollout
    if rollout.workers:
        each, versions = 8 * parameters + (rollout.cache_mb << 20), rollout.staleness + 1
        rows.append(
            ("rollout workers", rollout.workers * each, f"{rollout.workers} x weights, packs and rollout.cache_mb")
        )
        rows.append(("published weights", versions * 4 * parameters, f"shared memory, {versions} versions"))
    return rows


def _parameters(config: Config, model_config: Any) -> tuple[int, int]:
    """Count the parameters of the model, and those of its adapters, without storage for them."""
    from tandem.model.load import empty_model
    from tandem.model.lora import chosen_linears

    model = empty_model(config.model.path, model_config)
    adapted = chosen_linears(model, config.lora.targets)
    adapters = config.lora.rank * sum(linear.in_features + linear.out_features for linear in adapted)
    return sum(p.numel() for p in model.parameters()), adapters
