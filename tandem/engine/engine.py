"""The exact rollout engine: continuous batching over the trainer's own weights.

    waiting --admit--> prefill (prompts packed, one for all samples of a prompt) --> live slots --decode--> done
                 ^ free slots, whole budget in bytes              |  ^ one token a step, addressed uniform
                 +------------------------------------------------+  +-- leaves at stop, string or length

What a request returns depends on the request and the weights only, never on its neighbours, the batch size, the
order or the cache budget. It knows no problem, reward or loss.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tandem.draws import uniforms
from tandem.engine.cache import BLOCK, KVCache, PrefillPlan, slots_within
from tandem.engine.sampler import sample
from tandem.errors import UserError
from tandem.model.load import ExactModel
from tandem.model.logprobs import Filter
from tandem.types import Completion, Request, SamplingParams

PREFILL_TOKENS = 8192  # prompt tokens of one prefill pass, so that its activations stay bounded


@dataclass(kw_only=True)
class Live:
    """The running sequences, one row a slot; rows [:count] are live."""

    request: np.ndarray  # int64 [S], index of the request
    kind: np.ndarray  # int64 [S], index of its sampling parameters among the distinct ones
    key: np.ndarray  # uint64 [S]
    position: np.ndarray  # int64 [S], where the last token stands; its keys are not in the cache yet
    length: np.ndarray  # int64 [S], tokens sampled
    tokens: np.ndarray  # int64 [S, N]
    logprobs: np.ndarray  # float32 [S, N]
    count: int = 0

    def move(self, source: int, target: int) -> None:
        for column in (self.request, self.kind, self.key, self.position, self.length, self.tokens, self.logprobs):
            column[target] = column[source]


class Engine:
    """Generates with an ExactModel. decode turns token ids into text, for results and for stop strings."""

    def __init__(self, model: ExactModel, decode: Callable[[np.ndarray], str], *, cache_bytes: int, max_batch: int):
        self.model, self.decode = model, decode
        self.cache_bytes, self.max_batch = cache_bytes, max_batch
        self.weight_version = 0
        self._cache: KVCache | None = None
        self._params: list[SamplingParams] = []

    @torch.no_grad()
    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Run every request to its end, in any number of batches; results in request order.

        Raises UserError when one sequence does not fit the cache budget or the model's positions.
        """
        if not requests:
            return []
        cache = self._cache_for(requests)
        self._params = list(dict.fromkeys(r.params for r in requests))
        live = _new_live(cache.slots, max(r.params.max_new_tokens for r in requests))
        results: list[Completion | None] = [None] * len(requests)
        waiting = _prompt_order(requests)
        while waiting or live.count:
            waiting = self._admit(requests, waiting, live, cache)
            self._retire(live, cache, results)
            if live.count:
                self._decode(live, cache)
                self._retire(live, cache, results)
        return results  # type: ignore[return-value]

    def _cache_for(self, requests: Sequence[Request]) -> KVCache:
        longest = max(len(r.prompt) + r.params.max_new_tokens for r in requests)
        slots = min(self.max_batch, len(requests), self.require_room(longest))
        capacity = _capacity(longest)
        if self._cache is None or (self._cache.slots, self._cache.capacity) != (slots, capacity):
            self._cache = None  # the old one goes before the new one is made
            self._cache = KVCache(self.model, slots, capacity)
        return self._cache

    def require_room(self, longest: int) -> int:
        """How many sequences of that many tokens fit the cache; UserError when not one, or the model has no positions."""
        if longest > self.model.config.max_position_embeddings:
            raise UserError("a sequence would be longer than the model can place", where="rollout.max_new_tokens",
                            found=f"{longest} tokens, prompt and completion", expected="at most "
                            f"{self.model.config.max_position_embeddings} (the model's max_position_embeddings)")  # fmt: skip
        return slots_within(self.model, self.cache_bytes, _capacity(longest))

    def _admit(self, requests: Sequence[Request], waiting: list[int], live: Live, cache: KVCache) -> list[int]:
        """Prefill as many waiting requests as there are free slots; each distinct prompt runs once."""
        prompts: list[np.ndarray] = []
        slots: list[list[int]] = []
        taken, tokens = 0, 0
        for number in waiting[: cache.slots - live.count]:
            prompt = requests[number].prompt
            if not (prompts and np.array_equal(prompts[-1], prompt)):
                if prompts and tokens + len(prompt) > PREFILL_TOKENS:
                    break
                prompts.append(prompt)
                slots.append([])
                tokens += len(prompt)
            slot = live.count + taken
            slots[-1].append(slot)
            live.request[slot], live.key[slot] = number, requests[number].key
            live.kind[slot] = self._params.index(requests[number].params)
            live.position[slot], live.length[slot] = len(prompt) - 1, 0
            taken += 1
        if taken:
            self._prefill(prompts, slots, live, cache)
            live.count += taken
        return waiting[taken:]

    def _prefill(self, prompts: list[np.ndarray], slots: list[list[int]], live: Live, cache: KVCache) -> None:
        heads, kv_heads, _ = self.model.heads
        lengths = [len(p) for p in prompts]
        plan = PrefillPlan(cache, lengths, slots, heads // kv_heads)
        tokens = torch.from_numpy(np.concatenate(prompts))
        positions = torch.from_numpy(np.concatenate([np.arange(n) for n in lengths]))
        last = torch.from_numpy(np.cumsum(lengths) - 1)
        logits = self.model.head(self.model.hidden(tokens, positions, plan).index_select(0, last))
        members = np.array([slot for shared in slots for slot in shared])
        shared = torch.from_numpy(np.repeat(np.arange(len(slots)), [len(s) for s in slots]))
        self._sample(logits.index_select(0, shared), members, live)

    def _decode(self, live: Live, cache: KVCache) -> None:
        rows = np.arange(live.count)
        positions = live.position[rows]
        tokens = torch.from_numpy(live.tokens[rows, live.length[rows] - 1])
        hidden = self.model.hidden(tokens, torch.from_numpy(positions), cache.decode_plan(positions))
        self._sample(self.model.head(hidden), rows, live)

    def _sample(self, logits: Tensor, slots: np.ndarray, live: Live) -> None:
        """Append one token to each slot; logits [B, V] belong to slots int64 [B]."""
        draws = torch.from_numpy(uniforms(live.key[slots], live.length[slots]))
        for kind, rows in _kinds(live.kind[slots]):
            part = slice(None) if len(rows) == len(slots) else torch.from_numpy(rows)
            tokens, logprobs = sample(logits[part], _filter(self._params[kind]), draws[part])
            chosen = slots[rows]
            live.tokens[chosen, live.length[chosen]] = tokens.numpy()
            live.logprobs[chosen, live.length[chosen]] = logprobs.numpy()
        live.position[slots] += 1
        live.length[slots] += 1

    def _retire(self, live: Live, cache: KVCache, results: list[Completion | None]) -> None:
        """Hand out the sequences that ended and close the gaps they leave, from the back."""
        rows = np.arange(live.count)
        last = live.tokens[rows, live.length[rows] - 1]
        ended: dict[int, tuple[str, str]] = {}
        for kind, part in _kinds(live.kind[rows]):
            params = self._params[kind]
            candidates = part if params.stop else part[
                np.isin(last[part], params.stop_token_ids) | (live.length[part] >= params.max_new_tokens)
            ]  # fmt: skip
            for slot in candidates:
                verdict = self._ending(live.tokens[slot, : live.length[slot]], params)
                if verdict:
                    ended[int(slot)] = verdict
        for slot in sorted(ended, reverse=True):
            results[live.request[slot]] = self._completion(live, slot, *ended[slot])
            live.count -= 1
            if slot != live.count:
                cache.move(live.count, slot, int(live.position[live.count]))
                live.move(live.count, slot)

    def _ending(self, tokens: np.ndarray, params: SamplingParams) -> tuple[str, str] | None:
        """(text, stop reason) when the sequence has ended."""
        if tokens[-1] in params.stop_token_ids:
            return self.decode(tokens[:-1]), "stop"
        text = self.decode(tokens) if params.stop or len(tokens) >= params.max_new_tokens else ""
        cuts = [text.index(stop) for stop in params.stop if stop in text]
        if cuts:
            return text[: min(cuts)], "stop"
        return (text, "length") if len(tokens) >= params.max_new_tokens else None

    def _completion(self, live: Live, slot: int, text: str, reason: str) -> Completion:
        count = live.length[slot]
        return Completion(
            tokens=live.tokens[slot, :count].copy(),
            logprobs=live.logprobs[slot, :count].copy(),
            weight_versions=np.full(count, self.weight_version, np.int32),
            text=text,
            stop_reason=reason,
        )


def _capacity(tokens: int) -> int:
    return tokens + -tokens % BLOCK


def _new_live(slots: int, longest: int) -> Live:
    return Live(
        request=np.zeros(slots, np.int64), kind=np.zeros(slots, np.int64), key=np.zeros(slots, np.uint64),
        position=np.zeros(slots, np.int64),
        length=np.zeros(slots, np.int64), tokens=np.zeros((slots, longest), np.int64),
        logprobs=np.zeros((slots, longest), np.float32),
    )  # fmt: skip


def _prompt_order(requests: Sequence[Request]) -> list[int]:
    """Request numbers with equal prompts side by side, in order of first appearance, so that they share a prefill."""
    first: dict[bytes, int] = {}
    for number, request in enumerate(requests):
        first.setdefault(request.prompt.tobytes(), number)
    return sorted(range(len(requests)), key=lambda number: (first[requests[number].prompt.tobytes()], number))


def _filter(params: SamplingParams) -> Filter:
    return Filter(temperature=params.temperature, top_k=params.top_k, top_p=params.top_p)


def _kinds(kinds: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """(kind, indices that have it) for each distinct kind."""
    return [(int(kind), np.flatnonzero(kinds == kind)) for kind in np.unique(kinds)]
