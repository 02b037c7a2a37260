"""The algorithms by name: what each is made of, and what its parts need of a run.

An `Algorithm` is a set of values of [rl]. `rl.advantage` names an `Estimator` and `rl.loss` a
`PolicyLoss`: facts beside a function, which is imported when it is first used, so that a config is
checked without torch. A package adds its own by entry points in the groups `tandem.algorithms`,
`tandem.advantages` and `tandem.losses`. A user's function, "my.py:NAME", has an object of what is
known about it, which is nothing. Equations and papers of the parts: docs/guide/algorithms.md.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import cache, partial
from importlib import import_module
from typing import Any

from tandem.registry import find

OWN = "my.py:NAME"  # stands for a user's function
Conflicts = Callable[[Any], Iterable[str]]  # of a Config: "section.key: reason" for what cannot be


@dataclass(frozen=True)
class Part:
    """A function of an algorithm and what is known about it."""

    name: str
    function: str  # "module:NAME"
    _: KW_ONLY
    settings: tuple[str, ...] = ()  # keys of [rl] that count beside this part, and others of a kind
    conflicts: Conflicts = lambda config: ()

    def bind(self, **offered: Any) -> partial[Any]:
        """Return the function with those of its parameters that are offered, by name."""
        module, _, member = self.function.partition(":")
        return bound(getattr(import_module(module), member), {"name": self.name, **offered})


@dataclass(frozen=True, kw_only=True)
class Estimator(Part):
    """A value of `rl.advantage`: rewards of a step to advantages.

    The function takes rewards float64 [P, G] and gives advantages [P, G]; or, `by_token`, it takes
    the rewards [N] of one episode's sampled tokens and gives advantages [N], with `needs_critic`
    also the returns [N].
    """

    compares_group: bool = False  # episodes of one problem with each other
    equal_is_zero: bool | None = False  # groups of equal rewards teach nothing; None: not known
    from_group: bool = False  # a group's rewards decide its advantages, and nothing beside them
    by_token: bool = False
    needs_critic: bool = False
    whitens: bool = False  # the advantages are scaled over the step's tokens afterwards
    keeps_baseline: bool = False  # a running mean of the rewards of earlier steps


@dataclass(frozen=True, kw_only=True)
class PolicyLoss(Part):
    """A value of `rl.loss`: log-probs and advantages of tokens [N] to their losses [N] and
    metrics, sums over tokens."""

    of_sequences: bool = False  # a token's loss depends on the others of its sequence
    # where every ratio is 1 its gradient is minus the advantage, which first updates check
    starts_at_advantage: bool = False


@dataclass(frozen=True)
class Algorithm:
    """A value of `rl.algorithm`: names of its parts, and further values of [rl] that it sets."""

    name: str
    paper: str
    advantage: str
    loss: str
    aggregation: str
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """All values of [rl] that it stands for, by key."""
        parts = {"advantage": self.advantage, "loss": self.loss, "aggregation": self.aggregation}
        return {**parts, **self.defaults}


@cache
def estimator(name: str) -> Estimator:
    """Return the estimator of a name, or of a user's function."""
    if ":" in name:
        function = "tandem.rl.user_functions:user_advantage"
        settings = ("k", "ema_decay")
        return Estimator(name, function, settings=settings, equal_is_zero=None, keeps_baseline=True)
    return find("advantages", name, key="rl.advantage")  # type: ignore[no-any-return]


@cache
def policy_loss(name: str) -> PolicyLoss:
    """Return the loss of a name, or of a user's function."""
    if ":" in name:
        function = "tandem.rl.user_functions:user_loss"
        return PolicyLoss(name, function, settings=(*CLIPS, "dual_clip"))
    return find("losses", name, key="rl.loss")  # type: ignore[no-any-return]


def counts_with(chosen: Estimator, loss: PolicyLoss) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield (key, "rl.advantage" or "rl.loss", its names beside which the key counts)."""
    for key, table, part in (
        ("rl.advantage", {**ADVANTAGES, OWN: estimator(OWN)}, chosen),
        ("rl.loss", {**LOSSES, OWN: policy_loss(OWN)}, loss),
    ):
        known = {**table, **({} if ":" in part.name else {part.name: part})}
        for setting in dict.fromkeys(one for other in known.values() for one in other.settings):
            names = tuple(name for name, other in known.items() if setting in other.settings)
            yield f"rl.{setting}", key, names


def settings_of_parts() -> set[str]:
    """Return the keys of [rl] that count beside some part only."""
    return {
        setting for part in (*ADVANTAGES.values(), *LOSSES.values()) for setting in part.settings
    }


def bound(function: Callable[..., Any], offered: Mapping[str, Any]) -> partial[Any]:
    """Return a function with those of its parameters that are offered, by name."""
    parameters = inspect.signature(function).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        offered = {name: value for name, value in offered.items() if name in parameters}
    return partial(function, **offered)


def _k_of_group(config: Any) -> Iterator[str]:
    if not 2 <= config.rl.k <= config.rl.group_size:
        found = f"{config.rl.k} of {config.rl.group_size}"
        yield f"rl.k: max_at_k needs 2 <= k <= rl.group_size, found {found}"


def _several_rewards(config: Any) -> Iterator[str]:
    by_itself = "gdpo normalizes each reward function by itself"
    if len(config.reward.functions) < 2:
        yield f"rl.advantage: {by_itself}, so reward.function needs a list of several"
    if config.rl.kl_coef and config.rl.kl_in == "reward":
        yield f"rl.kl_in: {by_itself}, and a KL in the reward is none; use rl.kl_in=loss"


def _warmup_ends(config: Any) -> Iterator[str]:
    if config.critic.warmup_steps >= config.run.steps:
        yield "critic.warmup_steps: must be below run.steps, or the policy is never trained"


def _on_policy_only(config: Any) -> Iterator[str]:
    rl, rollout = config.rl, config.rollout
    if rl.minibatches * rl.epochs > 1:
        yield (
            "rl.loss: reinforce has no probability ratio, so a second update on a step's episodes "
            "(rl.minibatches, rl.epochs) would be off policy without a correction; use ppo_clip"
        )
    if rl.correction != "none":
        return
    if rl.max_gen_batches:
        yield (
            "rl.max_gen_batches: survivors are trained a step later, off policy, for which "
            "rl.loss=reinforce has no ratio; use ppo_clip, or a correction"
        )
    if rollout.staleness or rollout.token_budget:
        yield (
            "rl.loss: reinforce has no probability ratio, and with rollout.staleness or "
            "rollout.token_budget episodes are of older weights; use ppo_clip, or a correction "
            "(rl.correction=tis)"
        )


CLIPS = ("clip_low", "clip_high")
_of_group = partial(Estimator, compares_group=True, equal_is_zero=True, from_group=True)
_of_tokens = partial(Estimator, by_token=True, whitens=True)
_clipped = partial(PolicyLoss, settings=CLIPS, starts_at_advantage=True)
_EPISODES, _TOKENS = "tandem.rl.advantages", "tandem.rl.returns"

ADVANTAGES = {
    part.name: part
    for part in (
        _of_group("grpo", f"{_EPISODES}:grpo"),
        _of_group("grpo_no_std", f"{_EPISODES}:centred"),
        _of_group("rloo", f"{_EPISODES}:rloo"),
        _of_group("rloo_std", f"{_EPISODES}:rloo_std"),
        _of_group("max_at_k", f"{_EPISODES}:max_at_k", settings=("k",), conflicts=_k_of_group),
        _of_group("reinforce_pp_baseline", f"{_EPISODES}:centred", from_group=False, whitens=True),
        Estimator("gdpo", f"{_EPISODES}:gdpo", compares_group=True, conflicts=_several_rewards),
        Estimator("ema", f"{_EPISODES}:against", settings=("ema_decay",), keeps_baseline=True),
        _of_tokens("reinforce_pp", f"{_TOKENS}:returns_to_go", settings=("gamma",)),
        _of_tokens(
            "gae",
            f"{_TOKENS}:gae",
            settings=("gamma", "gae_lambda"),
            needs_critic=True,
            conflicts=_warmup_ends,
        ),
    )
}
LOSSES = {
    part.name: part
    for part in (
        _clipped("ppo_clip", "tandem.rl.losses:ppo_clip", settings=(*CLIPS, "dual_clip")),
        _clipped("gspo", "tandem.rl.losses:gspo", of_sequences=True),
        _clipped("cispo", "tandem.rl.losses:cispo"),
        PolicyLoss(
            "reinforce",
            "tandem.rl.losses:reinforce",
            starts_at_advantage=True,
            conflicts=_on_policy_only,
        ),
    )
}
_KL_IN_REWARD = {"kl_in": "reward", "kl_estimator": "k1"}
_OF_DAPO = {"clip_high": 0.28, "max_gen_batches": 8}
_OF_GSPO = {"clip_low": 3e-4, "clip_high": 4e-4}
_OF_CISPO = {"clip_low": 1.0, "clip_high": 4.0}
_PP = "arXiv 2501.03262"
ALGORITHMS = {
    one.name: one
    for one in (
        Algorithm("grpo", "arXiv 2402.03300", "grpo", "ppo_clip", "sequence_mean"),
        Algorithm("dr_grpo", "arXiv 2503.20783", "grpo_no_std", "ppo_clip", "fixed_length"),
        Algorithm("rloo", "arXiv 2402.14740", "rloo", "ppo_clip", "fixed_length", _KL_IN_REWARD),
        Algorithm("reinforce", "Williams 1992", "ema", "reinforce", "fixed_length"),
        Algorithm("reinforce_pp", _PP, "reinforce_pp", "ppo_clip", "token_mean", _KL_IN_REWARD),
        Algorithm(
            "reinforce_pp_baseline",
            f"{_PP}, section 3.2",
            "reinforce_pp_baseline",
            "ppo_clip",
            "token_mean",
            {"kl_estimator": "k2"},
        ),
        Algorithm("dapo", "arXiv 2503.14476", "grpo", "ppo_clip", "token_mean", _OF_DAPO),
        Algorithm("gspo", "arXiv 2507.18071", "grpo", "gspo", "sequence_mean", _OF_GSPO),
        Algorithm("cispo", "arXiv 2506.13585", "grpo", "cispo", "token_mean", _OF_CISPO),
        Algorithm("ppo", "arXiv 1707.06347", "gae", "ppo_clip", "token_mean", _KL_IN_REWARD),
    )
}
