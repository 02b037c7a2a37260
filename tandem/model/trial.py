"""The general and the inexact path, tried on a random model of a config's shapes before any weight
is read.

On the general path transformers' own pass and passes of the engine must give the trainer's logits.
On the inexact one a model must be a causal language model, whose logits transformers computes from
the tokens up to their own; whether transformers' cache continues its sequences is tried too.
"""

import json
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.model.attention import PackedPlan
from tandem.model.config_file import first_line, special_float, why_not_exact
from tandem.model.first_layers import first_layers
from tandem.model.general import make_general
from tandem.model.inexact import InexactModel, SequenceStates, make_inexact
from tandem.model.linear import ExactLinear
from tandem.model.load import ExactModel
from tandem.model.lora import Lora, add_adapter
from tandem.model.paths import ModelPath
from tandem.model.rope import positions_of
from tandem.model.schedule import VOCABULARY, Schedule, random_module

TRIED = 150  # tokens of a trial
BEGINNING = 137  # of them, which a cache continues
FAR = 8  # tokens at the last positions of a model, beside the others of a trial
MOST_DIFFERENCE = 1e-3  # of the largest logit: rounding in another order, and nothing else
MOST_APART = 1e-5  # likewise between packed and paged sequences, of which 0 is usual


class General(ModelPath):
    name = "general"

    def why_not(self, config: Any, place: Any) -> str:
        from transformers.utils import logging

        logging.set_verbosity_error()  # reference kernels are slower, it says of each
        reason = why_not_exact(config)
        if not reason and place is not None and place.device.type != "cpu":
            reason = f"it runs on {place.device.type}; model.device=cpu may be exact"
        reason = reason or general_fault(config)
        if reason and _keeps_state(config):
            return "its layers keep a state from token to token"
        return reason

    def build(self, module: Any, lora: Lora | None = None) -> ExactModel:
        if lora is not None:
            add_adapter(module, lora)
        return make_general(module, lora)

    def small(self, config: Any, splits: int) -> Any:
        return first_layers(config)

    def linears(self, model: ExactModel) -> list[tuple[Callable[..., Any], Sequence[ExactLinear]]]:
        parts = model.module.base_model.modules()
        return [(part, [part]) for part in parts if isinstance(part, ExactLinear)]

    def foreign_parts(self, model: ExactModel) -> dict[str, Any]:
        return dict(model.module.base_model.named_modules())


class Inexact(ModelPath):
    name = "inexact"

    def why_not(self, config: Any, place: Any) -> str:
        return stock_trial(config).fault

    def gap(self, config: Any, place: Any) -> str:
        return f"architecture {config.model_type}: {GENERAL.why_not(config, place)}"

    def maker(self, folder: str, config: Any, place: Any) -> Callable[..., InexactModel]:
        gap, caches = self.gap(config, place), stock_trial(config).caches
        return partial(make_inexact, gap=gap, caches=caches)


GENERAL, INEXACT = General(), Inexact()


Trial = Callable[[Any], Any]  # of the config of a model's first layers; it may raise anything


def general_fault(config: Any) -> str:
    """Try the general path on a random model of a config's shapes; say in which way it is wrong, ""
    if it is not: transformers' own pass gives other logits, or passes of the engine do, or one
    cannot run.

    Rounding is not looked at here: whether all bits agree the probe says.
    """
    return str(
        _tried(_general_trial, config.__class__, config.to_json_string(), config.name_or_path)
    )


@cache
def _tried(trial: Trial, config_class: Any, text: str, name: str) -> Any:
    """Make a trial once for a config, which its JSON and the name of its directory tell; return
    what it finds, or the error that it raises in one line."""
    try:
        config = config_class.from_dict(json.loads(text, object_hook=special_float))
        config.name_or_path = name
        return trial(first_layers(config))
    except Exception as error:  # any class of any model runs here
        return first_line(error)


class _WatchedPlan(PackedPlan):
    """Knows whether any layer attended by it."""

    attended = False

    def attend(self, *args: Any, **options: Any) -> Tensor:
        self.attended = True
        return super().attend(*args, **options)


def _general_trial(config: Any) -> str:
    tokens = torch.randint(VOCABULARY, (TRIED,), generator=torch.Generator().manual_seed(0))
    stock = random_module(config, 0)
    stock.set_attn_implementation("eager")
    with torch.no_grad():
        expected = stock(input_ids=tokens[None], use_cache=False).logits[0]
        del stock  # one at a time: it may have layers of a gigabyte
        exact = make_general(random_module(config, 0))
        heads, kv_heads, _ = exact.heads
        plan = _WatchedPlan(
            np.array([[0, TRIED, 0, 0]]), group=heads // kv_heads, kv_heads=kv_heads
        )
        found = exact.head(exact.hidden(tokens, torch.arange(TRIED), plan))
        rows, last = len(tokens), positions_of(exact.config)
        far_plan = exact.packed_plan(np.array([[0, rows, 0, 0], [rows, FAR, 0, 0]]))
        positions = torch.cat([torch.arange(rows), torch.arange(last - FAR, last)])
        hidden = exact.hidden(F.pad(tokens, (0, FAR)), positions, far_plan)
        beside_far = exact.head(hidden[:rows])
    schedule = Schedule(exact, 0)
    apart = float((schedule.paged((1,)) - schedule.packed()[0]).abs().max())
    if not plan.attended:
        return "attention of its own, which transformers' AttentionInterface cannot replace"
    worst, scale = float((found - expected).abs().max()), float(expected.abs().max())
    if not worst <= MOST_DIFFERENCE * scale:
        return f"logits that differ by {worst:.2g} from transformers' own, of up to {scale:.2g}"
    if not apart <= MOST_APART * scale:
        return f"log-probs that differ by {apart:.2g} between packed and paged sequences"
    if not float((beside_far - found).abs().max()) <= MOST_APART * scale:
        return "a result that depends on the longest position of the pass"
    return ""


def _keeps_state(config: Any) -> bool:
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
    found = _tried(_stock_trial, config.__class__, config.to_json_string(), config.name_or_path)
    return found if isinstance(found, StockTrial) else StockTrial(found)


@torch.no_grad()
def _stock_trial(config: Any) -> StockTrial:
    tokens = torch.randint(VOCABULARY, (1, TRIED), generator=torch.Generator().manual_seed(0))
    expected = random_module(config, 0)(input_ids=tokens, use_cache=False).logits
    model = make_inexact(random_module(config, 0))
    whole, first = (model.head(model.run(t)) for t in (tokens, tokens[:, :BEGINNING]))
    if not _is_close(whole, expected):
        return StockTrial("logits that are not the last states times the output projection")
    if not _is_close(first, whole[:, :BEGINNING], MOST_APART):
        return StockTrial("logits that depend on later tokens")
    return StockTrial("", bool(model.cache_name) and _continues(model, tokens, whole))


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
