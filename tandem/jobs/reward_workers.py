"""Reward workers of a run, in a RewardPool of this machine."""

from typing import Any

from tandem.config.schema import Config
from tandem.registry import find
from tandem.rewards.pool import RewardPool


def build_reward_pool(config: Config) -> RewardPool:
    """Build the pool of reward workers; raises UserError if `code` is scored and there is no
    sandbox."""
    if "code" in config.reward.functions:
        find("sandboxes", config.sandbox.kind, key="sandbox")(config.sandbox)
    return RewardPool(**pool_arguments(config))


def pool_arguments(config: Config) -> dict[str, Any]:
    """Return the arguments of a RewardPool, which may be built in another process."""
    reward, options = config.reward, dict(config.reward.options)
    if "code" in reward.functions:
        options["code"] = {**options.get("code", {}), "sandbox": config.sandbox.model_dump()}
    return {
        "functions": reward.functions,
        "timeout_s": reward.timeout_s,
        "workers": reward.workers,
        "weights": reward.weights,
        "options": options,
    }
