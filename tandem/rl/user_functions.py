"""A user's functions in place of Tandem's own: `rl.loss`, `rl.advantage`, `rl.filter` and
`eval.metric` as "my.py:NAME".

    rl.loss       policy_logprobs, proximal_logprobs, engine_logprobs, reference_logprobs (or None),
                  entropy, advantages, sequences: tensors [N]; clip_low, clip_high, dual_clip
                  -> the tokens' losses [N], or (losses, metrics as sums over tokens)
    rl.advantage  rewards float64 [P, G], lengths int64 [P, G], k, baseline; of K reward functions
                  parts float64 [K, P, G], weights [K] -> advantages [P, G]
    rl.filter     rewards [G], lengths [G] of a group -> whether to train on it
    eval.metric   rewards, lengths [P, S]; completions: P lists of S texts -> a number, or a dict
                  of numbers

P problems, G or S episodes each, N loss tokens. A function gets those of its parameters that the
key offers, by name, so a copy of one of `losses.py`, `advantages.py` or `filters.py` runs as it is.
It must be pure: a resumed run calls it again. Every mistake is a UserError that names the key.
"""

import math
from collections.abc import Mapping
from functools import cache
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.rl.algorithms import Estimator, PolicyLoss, bound
from tandem.rl.losses import Metrics, total
from tandem.runtime.errors import UserError
from tandem.runtime.user_code import describe, load_user_object, user_line

_load = cache(load_user_object)  # a run keeps what it has loaded
# rewards and lengths of two groups of three
SMALL_GROUPS = np.array([[0.0, 1.0, 0.5], [1.0, 1.0, 1.0]]), np.full((2, 3), 2)


def user_loss(*, name: str, **offered: Any) -> tuple[Tensor, Metrics]:
    """Return the losses [N] of a user's function and its metrics as "loss/NAME", beside the sum of
    the losses. What is not finite is the optimizer's matter: it skips the update."""
    result = call_user_function("rl.loss", name, offered)
    losses, numbers = checked_losses("rl.loss", name, result, offered["policy_logprobs"])
    own = {f"loss/{k}": v for k, v in numbers.items()}
    return losses, {"policy_loss": total(losses), **own}


def checked_losses(key: str, name: str, result: Any, logprobs: Tensor) -> tuple[Tensor, Metrics]:
    """Return the losses [N] and the metrics in the result of a user's function."""
    losses, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not isinstance(losses, Tensor) or losses.shape != logprobs.shape:
        raise _wrong(key, name, _form(losses), f"a tensor of the tokens, {_form(logprobs)}")
    if logprobs.requires_grad and len(logprobs) and not losses.requires_grad:
        raise _wrong(key, name, "losses without a gradient", "a function of policy_logprobs")
    return losses, _numbers(key, name, metrics, finite=False)


def user_advantage(*, name: str, **offered: Any) -> np.ndarray:
    """Return the advantages of a user's function, float64 [P, G]."""
    shape = offered["rewards"].shape
    table = call_user_function("rl.advantage", name, offered)
    try:
        array = np.asarray(table, np.float64)
    except (TypeError, ValueError, RuntimeError):  # ragged, of texts, a tensor with a gradient
        array = np.empty(0)
    if array.shape != shape:
        raise _wrong("rl.advantage", name, _form(table), f"an array {list(shape)}, as the rewards")
    _require_finite("rl.advantage", name, array)
    return array


def user_filter(name: str, rewards: np.ndarray, lengths: np.ndarray) -> bool:
    """Return whether a user's function keeps a group."""
    kept = call_user_function("rl.filter", name, {"rewards": rewards, "lengths": lengths})
    if not isinstance(kept, (bool, np.bool_)):
        raise _wrong("rl.filter", name, _form(kept), "True or False")
    return bool(kept)


def user_metric(name: str, offered: Mapping[str, Any]) -> Metrics:
    """Return the metrics of a user's function: {"NAME": value}, or {"NAME/key": value, ...}."""
    value, last = call_user_function("eval.metric", name, offered), name.rpartition(":")[2]
    if isinstance(value, Mapping):
        return {f"{last}/{k}": v for k, v in _numbers("eval.metric", name, value).items()}
    return _numbers("eval.metric", name, {last: value})


def try_user_metric(name: str) -> None:
    """Load a user's metric, and try it on small arrays. Raises UserError for a mistake."""
    rewards, lengths = SMALL_GROUPS
    completions = [["one", "two", "two"], ["one", "one", "one"]]
    user_metric(name, {"rewards": rewards, "lengths": lengths, "completions": completions})


def try_functions(loss: PolicyLoss, advantage: Estimator, keep: str) -> None:
    """Load the functions of an algorithm and of a filter, and try them on small arrays. Raises
    UserError for the first mistake of a user's."""
    rewards, lengths = SMALL_GROUPS
    logprobs = torch.linspace(-2.0, -0.1, 12).requires_grad_()
    plain = logprobs.detach()
    names = ("proximal_logprobs", "engine_logprobs", "reference_logprobs", "entropy")
    sequences, advantages = torch.arange(12) // 2, torch.linspace(-1.0, 1.0, 12)
    clips = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0.0}
    tokens = {**dict.fromkeys(names, plain), "advantages": advantages, "sequences": sequences}
    losses, metrics = loss.bind(policy_logprobs=logprobs, **tokens, **clips)()
    _require_finite("rl.loss", loss.name, losses.detach().float().numpy())
    _numbers("rl.loss", loss.name, metrics)
    if not advantage.by_token:
        settings = {"k": 2, "baseline": 0.0, "parts": rewards[None], "weights": np.ones(1)}
        advantage.bind(rewards=rewards, lengths=lengths, **settings)()
    if keep:
        user_filter(keep, rewards[0], lengths[0])


def call_user_function(key: str, name: str, offered: Mapping[str, Any]) -> Any:
    """Call a user's function with those of its parameters that are offered."""
    function = _load(name, key=key)
    try:
        return bound(function, offered)()
    except Exception as error:  # a user's function may raise anything
        raise UserError(
            "a function of yours raised an exception",
            where=f"{key} = {name}" + (f" ({line})" if (line := user_line(error)) else ""),
            found=describe(error),
            expected=f"a function of some of {', '.join(offered)}",
            next="mend it, and start the same command again"
            + ", with --fresh if steps were made: they are the old one's" * key.startswith("rl."),
        ) from error


def _numbers(key: str, name: str, values: Any, finite: bool = True) -> Metrics:
    """Return metrics as floats, finite ones unless that is False."""
    if not isinstance(values, Mapping):
        raise _wrong(key, name, _form(values), "a dict of metrics")
    numbers: Metrics = {}
    for metric, value in values.items():
        plain = value.item() if getattr(value, "shape", None) == () else value
        if not isinstance(plain, Real) or (finite and not math.isfinite(plain)):
            raise _wrong(key, name, f"{metric!r}: {_form(value)}", "a finite number")
        numbers[str(metric)] = float(plain)
    return numbers


def _require_finite(key: str, name: str, values: np.ndarray) -> None:
    bad = np.argwhere(~np.isfinite(values))
    if len(bad):
        at = [int(i) for i in bad[0]]
        found = f"{values[tuple(bad[0])]} at {at}, and {len(bad) - 1} more of {values.size}"
        raise _wrong(key, name, found, "finite numbers")


def _form(value: Any) -> str:
    """Describe a value by its type, and an array also by its shape."""
    shape = getattr(value, "shape", ())
    return type(value).__name__ + (f" {list(shape)}" if shape else f" {value!r:.60}")


def _wrong(key: str, name: str, found: str, expected: str) -> UserError:
    return UserError(
        "a function of yours cannot be used",
        where=f"{key} = {name}",
        found=found,
        expected=expected,
        next="docs/guide/algorithms.md, `Your own functions`, has an example of each",
    )
