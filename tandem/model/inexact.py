"""The inexact path: a causal language model that transformers alone can run, with its own
attention, states and cache: linear attention, Mamba, attention that it does not let others replace,
rotary embeddings that depend on the length.

Packed rows are unpacked for it: a prompt shared by several samples becomes the beginning of each,
and sequences run as batches padded on the right, where no causal model looks. The hidden states go
back to the packed rows, so packing, losses and log-probs know nothing of it. Linears, norms,
activations and experts are those of general.py, to be as near to exact as can be. This file knows
no sampling; the engine is engine/inexact_engine.py.
"""

import copy
import inspect
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.model.attention import Plan
from tandem.model.expert_choices import ExpertChoices
from tandem.model.general import GeneralModel, Pass, put_exact_parts
from tandem.model.general_experts import ExactFunctions
from tandem.model.lora import Lora, add_adapter
from tandem.model.rope import has_static_ropes

BATCH_TOKENS = 4096  # of a padded batch, unless one sequence is longer
UNTRIED = "it runs by transformers' own operators"
CACHES = ("past_key_values", "cache_params")  # names that forward passes have for their cache


class UnpackedPlan:
    """The sequences of packed segments (types.Microbatch.segments), in batches of like length.

    batches: packed rows int64 [B, L] of each, the last one repeated as padding; places: int64 [T],
    where the state of each packed row is among those of all batches. pads: False takes only
    sequences of the same length together.
    """

    def __init__(self, segments: np.ndarray, *, pads: bool = True):
        rows = [
            np.concatenate([np.arange(before, before + prefix), np.arange(first, first + count)])
            for first, count, before, prefix in segments.tolist()
        ]
        shared = {(before, prefix) for _, _, before, prefix in segments.tolist()}
        own = [
            r for r, (first, n, *_) in zip(rows, segments, strict=True) if (first, n) not in shared
        ]
        self.batches: list[Tensor] = []
        self.places = torch.zeros(sum(segments[:, 1].tolist()), dtype=torch.int64)
        start = 0
        for batch in _batches(own, pads):
            for row, sequence in enumerate(batch):
                at = start + row * len(batch[0])
                self.places[sequence] = torch.arange(at, at + len(sequence))
            padded = [np.pad(one, (0, len(batch[0]) - len(one)), mode="edge") for one in batch]
            self.batches.append(torch.from_numpy(np.stack(padded)))
            start += len(batch) * len(batch[0])

    def attend(self, *args: Any, **options: Any) -> Tensor:
        raise AssertionError("transformers attends by itself")


def _batches(sequences: list[np.ndarray], pads: bool) -> list[list[np.ndarray]]:
    """Group sequences, the longest first."""
    batches: list[list[np.ndarray]] = []
    for sequence in sorted(sequences, key=len, reverse=True):
        longest = len(batches[-1][0]) if batches else 0
        fits = batches and longest * (len(batches[-1]) + 1) <= BATCH_TOKENS
        if fits and (pads or longest == len(sequence)):
            batches[-1].append(sequence)
        else:
            batches.append([sequence])
    return batches


NO_PASS = Pass(UnpackedPlan(np.zeros((0, 4), np.int64)), (0, 0, 0), torch.zeros(0))


class InexactModel(GeneralModel):
    """transformers' causal language model with its own attention and states.

    gap: why it is not exact; caches: whether transformers' cache continues a sequence.
    """

    path, engine = "inexact", "unpaged"

    def __init__(
        self,
        module: Any,
        lora: Lora | None,
        functions: ExactFunctions | None,
        gap: str,
        caches: bool,
    ):
        super().__init__(module, lora, functions)
        self.gap = gap
        # a rotary embedding may depend on the longest sequence of a batch
        self._pads = has_static_ropes(self.config)
        names = inspect.signature(module.base_model.forward).parameters
        self.cache_name = next((n for n in CACHES if n in names), "") if caches else ""

    def packed_plan(self, segments: np.ndarray) -> Plan:
        return UnpackedPlan(segments, pads=self._pads)

    def hidden(
        self, tokens: Tensor, positions: Tensor, plan: Plan, choices: ExpertChoices | None = None
    ) -> Tensor:
        assert isinstance(plan, UnpackedPlan) and choices is None
        states = [self.run(tokens[rows]).flatten(0, 1) for rows in plan.batches]
        return torch.cat(states).index_select(0, plan.places.to(self.device))

    def run(self, tokens: Tensor, cache: Any = None, shift: int = 0) -> Tensor:
        """Compute the last hidden states [B, L, D] of sequences int64 [B, L], which follow those in
        transformers' cache, if there is one. shift: as `shift` returned for what is cached."""
        known = {} if cache is None else {self.cache_name: cache}
        with self._repeating(NO_PASS, self._base_only):
            out = self.module.base_model(
                input_ids=tokens.to(self.device), use_cache=cache is not None, **known
            )
        states: Tensor = out.last_hidden_state
        return states if self.factor == 1.0 else states * self.factor

    def shift(self, tokens: Tensor) -> int:
        """Return by how much the positions of what follows a sequence int64 [1, L] differ from the
        count of tokens before it: an image may have fewer than tokens."""
        return 0


class SequenceStates:
    """Memory of B sequences of one length between passes: transformers' own cache, or of a
    model without one their tokens, which run again in each pass."""

    def __init__(self, model: InexactModel):
        from transformers import DynamicCache

        self._model = model
        self._cache = DynamicCache(config=model.config) if model.cache_name else None
        self._tokens = torch.zeros((1, 0), dtype=torch.int64)  # without a cache
        self._shift: int | None = None  # once there are tokens

    def extend(self, tokens: Tensor) -> Tensor:
        """Run further tokens int64 [B, n]; return their last hidden states [B, n, D]."""
        if self._cache is not None:
            if self._shift is None:
                self._shift = self._model.shift(tokens)
            return self._model.run(tokens, self._cache, self._shift)
        self._tokens = torch.cat([self._tokens, tokens], 1)
        return self._model.run(self._tokens)[:, -tokens.shape[1] :]

    def repeated(self, count: int) -> "SequenceStates":
        """Return the states of `count` sequences that begin as this one."""
        copied = copy.copy(self)
        copied._tokens = self._tokens.repeat(count, 1)
        if self._cache is not None:
            copied._cache = copy.deepcopy(self._cache)
            first = torch.zeros(count, dtype=torch.int64, device=self._model.device)
            copied._cache.reorder_cache(first)
        return copied


def make_inexact(
    module: Any, lora: Lora | None = None, *, gap: str = UNTRIED, caches: bool = True
) -> InexactModel:
    """Put exact parts into a transformers module in place, where it has any, and with lora a new
    adapter. gap, caches: as in InexactModel."""
    if lora is not None:
        add_adapter(module, lora)
    functions = put_exact_parts(module, lora)
    return InexactModel(module.eval(), lora, functions, gap, caches)
