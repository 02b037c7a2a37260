"""The path that a model takes: exact, or inexact (inexact.py), or none.

A random model of its shapes is tried, before any weights are loaded. On the inexact path it must be
a causal language model, whose logits transformers computes from the tokens up to their own; whether
transformers' cache continues its sequences is tried too.
"""

import json
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.model.config_file import first_line, image_reason, is_lean, special_float, why_not_exact
from tandem.model.inexact import InexactModel, SequenceStates, make_inexact
from tandem.model.load import ExactModel, make_exact
from tandem.model.placement import CPU_FLOAT32, Placement
from tandem.model.trial import (
    MOST_APART,
    MOST_DIFFERENCE,
    TRIED,
    VOCABULARY,
    first_layers,
    general_fault,
    random_module,
)
from tandem.runtime.errors import UserError

BEGINNING = 137  # tokens of the TRIED ones that a cache continues


def choose_path(
    config: Any, where: str, place: Placement = CPU_FLOAT32
) -> Callable[..., ExactModel]:
    """Return what makes a model of a stock module and Lora. Raises UserError as `why_inexact`."""
    if reason := why_inexact(config, where, place):
        return partial(make_inexact, reason=reason, caches=stock_trial(config).caches)
    return make_exact


def why_inexact(config: Any, where: str, place: Placement = CPU_FLOAT32) -> str:
    """Say why a model of a transformers config cannot be exact, "" if it may be; place: of its
    weights. Raises UserError for one that cannot run inexactly either."""
    if is_lean(config):
        return ""
    if reason := image_reason(config):
        return reason
    from transformers.utils import logging

    logging.set_verbosity_error()  # reference kernels are slower, it says of each
    reason = why_not_exact(config)
    if not reason and place.device.type != "cpu":
        reason = f"it runs on {place.device.type}; model.device=cpu may be exact"
    reason = reason or general_fault(config)
    if reason and keeps_state(config):
        reason = "its layers keep a state from token to token"
    if reason and (fault := stock_trial(config).fault):
        raise _cannot_run(where, config, fault)
    return reason and f"architecture {config.model_type}: {reason}"


def keeps_state(config: Any) -> bool:
    """Tell whether transformers' cache of a model holds more than keys and values."""
    from transformers import DynamicCache
    from transformers.cache_utils import LinearAttentionCacheLayerMixin

    try:
        layers = DynamicCache(config=config).layers
    except Exception:  # a config of any model, with or without what a cache asks it for
        return False
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)


class StockTrial(NamedTuple):
    """Result of a trial of the inexact path: why a model cannot run on it, or "", and whether
    transformers' cache continues its sequences."""

    fault: str
    caches: bool = False


def stock_trial(config: Any) -> StockTrial:
    """Try the inexact path on a random model of a config's shapes."""
    return _stock_trial(config.__class__, config.to_json_string(), config.name_or_path)


@cache
def _stock_trial(config_class: Any, text: str, name: str) -> StockTrial:
    tokens = torch.randint(VOCABULARY, (1, TRIED), generator=torch.Generator().manual_seed(0))
    try:
        config = config_class.from_dict(json.loads(text, object_hook=special_float))
        config.name_or_path = name
        config = first_layers(config)
        with torch.no_grad():
            expected = random_module(config, 0)(input_ids=tokens, use_cache=False).logits
            model = make_inexact(random_module(config, 0))
            whole, first = (model.head(model.run(t)) for t in (tokens, tokens[:, :BEGINNING]))
    except Exception as error:  # any class of any model runs here
        return StockTrial(first_line(error))
    if not _is_close(whole, expected):
        return StockTrial("logits that are not the last states times the output projection")
    if not _is_close(first, whole[:, :BEGINNING], MOST_APART):
        return StockTrial("logits that depend on later tokens")
    return StockTrial("", bool(model.cache_name) and _continues(model, tokens, whole))


@torch.no_grad()
def _continues(model: InexactModel, tokens: Tensor, whole: Tensor) -> bool:
    """Tell whether a sequence whose tokens come one at a time, after some at once, has the logits
    [1, T, V] of a whole pass, although it goes on as two."""
    states = SequenceStates(model)
    try:
        found = [model.head(states.extend(tokens[:, :BEGINNING]))]
        states = states.repeated(2)
        for token in tokens[:, BEGINNING:].split(1, 1):
            found.append(model.head(states.extend(token.expand(2, 1)))[1:])
    except Exception:  # a cache of another kind
        return False
    return _is_close(torch.cat(found, 1), whole)


def _is_close(found: Tensor, expected: Tensor, bound: float = MOST_DIFFERENCE) -> bool:
    return bool((found - expected).abs().max() <= bound * expected.abs().max())


def _cannot_run(where: str, config: Any, found: str) -> UserError:
    return UserError(
        "this model cannot run",
        where=f"{where}, architecture {config.model_type}",
        found=found,
        expected="a causal language model, whose logits depend on the tokens up to their own",
        next="take one that docs/models.md lists; if it lists this one, report its config.json",
    )
