"""Reward workers of a run, in a RewardPool of this machine."""

from typing import Any

from tandem.config.schema import Config
from tandem.registry import find, names
from tandem.rewards.pool import RewardPool


def build_reward_pool(config: Config) -> RewardPool:
    """Build the pool of reward workers; raises UserError if one needs a sandbox and there is
    none."""
    arguments = pool_arguments(config)
    if any("sandbox" in own for own in arguments["options"].values()):
        find("sandboxes", config.sandbox.kind, key="sandbox")(config.sandbox)
    return RewardPool(**arguments)


def pool_arguments(config: Config) -> dict[str, Any]:
    """Return the arguments of a RewardPool, which may be built in another process."""
    reward, options = config.reward, dict(config.reward.options)
    for name in filter(set(names("reward_options")).__contains__, reward.functions):
        of_run = find("reward_options", name, key="reward.function")(config)
        options[name] = {**options.get(name, {}), **of_run}
    return {
        "functions": reward.functions,
        "timeout_s": reward.timeout_s,
        "workers": reward.workers,
        "weights": reward.weights,
        "options": options,
    }
