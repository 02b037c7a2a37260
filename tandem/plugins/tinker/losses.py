"""The losses of Tinker's API, each a sum over tokens, as functions of `Session.forward_backward`.

`advantages` are a token's weight in cross_entropy. Knows no protobuf and no model.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor

from tandem.api.session import importance_sampling
from tandem.rl.algorithms import bound
from tandem.rl.losses import cispo, gspo, ppo_clip
from tandem.runtime.errors import UserError, require_range

Terms = tuple[Tensor, Mapping[str, float]]
POLICY = ("target_tokens", "logprobs", "advantages")
CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}  # bounds of the ratio


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A loss, the inputs of a datum that it needs, and its settings with their defaults.

    mask: the input that names the tokens it is of; "": all whose target is the next token.
    """

    function: Callable[..., Terms]
    inputs: tuple[str, ...] = POLICY
    settings: Mapping[str, float] = field(default_factory=dict)
    mask: str = ""


def cross_entropy(policy_logprobs: Tensor, advantages: Tensor) -> Terms:
    """Compute -w log p."""
    return -policy_logprobs * advantages, {}


def dro(policy_logprobs: Tensor, engine_logprobs: Tensor, advantages: Tensor, beta: float) -> Terms:
    """Compute -(A log p - beta / 2 (log p - log q)^2) (DRO, arXiv 2405.19107, section 3). A token
    that was not sampled, with neither advantage nor log-prob, has none."""
    gap = (policy_logprobs - engine_logprobs).square() * sampled(engine_logprobs, advantages)
    return -(policy_logprobs * advantages - 0.5 * beta * gap), {}


def sampled(engine_logprobs: Any, advantages: Any) -> Any:
    """Find the tokens that were sampled: the others have neither advantage nor log-prob."""
    return (advantages != 0) | (engine_logprobs != 0)


def of_sampled(function: Callable[..., Terms], **offered: Any) -> Terms:
    """Compute a loss of all tokens, with the metrics of the sampled ones."""
    terms, _ = bound(function, offered)()
    at = sampled(offered["engine_logprobs"], offered["advantages"])
    own = {k: v.detach()[at] if isinstance(v, Tensor) else v for k, v in offered.items()}
    return terms, bound(function, own)()[1]


RANGES = {"clip_low_threshold": (0, 1), "clip_high_threshold": (1, np.inf), "beta": (0, np.inf)}
LOSSES = {
    "cross_entropy": Loss(function=cross_entropy, inputs=("target_tokens", "weights")),
    "importance_sampling": Loss(function=importance_sampling),
    "ppo": Loss(function=partial(of_sampled, ppo_clip), settings=CLIP),
    "cispo": Loss(function=partial(of_sampled, cispo), settings=CLIP),
    "gspo": Loss(
        function=gspo,
        inputs=(*POLICY, "sequence_ratio_mask"),
        settings=CLIP,
        mask="sequence_ratio_mask",
    ),
    "dro": Loss(function=dro, settings={"beta": 0.05}),
}


def loss_named(name: str, given: Mapping[str, Any]) -> tuple[Loss, dict[str, float]]:
    """Return the loss of a name, and settings of its function. Raises UserError for a loss or a
    setting that there is not."""
    if (loss := LOSSES.get(name)) is None:
        raise UserError(
            f"the loss {name!r} is not offered",
            where="loss_fn",
            expected=f"one of {', '.join(LOSSES)}, or forward_backward_custom",
        )
    if unknown := sorted(given.keys() - loss.settings.keys()):
        raise UserError(
            f"{name} has no such setting",
            where="loss_fn_config",
            found=", ".join(unknown),
            expected=", ".join(loss.settings) or "none",
        )
    settings = {**loss.settings, **given}
    require_range(SimpleNamespace(**settings), {name: RANGES[name] for name in settings})
    if loss.settings is CLIP:
        low, high = (settings[key] for key in CLIP)
        return loss, {"clip_low": 1 - low, "clip_high": high - 1}
    return loss, settings
