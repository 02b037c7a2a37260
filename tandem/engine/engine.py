"""The exact rollout engine: continuous batching over the trainer's own weights.

    submit --> Scheduler.schedule --> forward: chunks of prompts and one token of each other sequence, in one pass
                    ^                    |
                    |                    v
                 _retire <-- _sample: one addressed uniform a token; ends at a stop token, stop string or length

What a request returns depends on the request and the weights only, never on its neighbours, the
batch size, chunks, shared prefixes, preemption or order. One thread calls it. It knows no problem,
reward or loss.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from tandem.engine.page_cache import PageCache
from tandem.engine.sampler import sample
from tandem.engine.scheduler import RunningSequence, Scheduler, Work
from tandem.model.forward import batch_logprobs
from tandem.model.load import ExactModel
from tandem.model.logprobs import SamplingDistribution, SeenTokens
from tandem.model.paged_attention import PAGE, Runs
from tandem.runtime import watchdog
from tandem.runtime.errors import UserError
from tandem.runtime.rng import uniforms
from tandem.types import Completion, Microbatch, Request
from tandem.weights.hashing import weight_hash

OnUpdate = Literal["finish", "restart", "continue"]


class Engine:
    """Generates with an ExactModel. decode turns token ids into text, for results and for stop
    strings.

    cache_bytes: budget of the key/value cache; max_batch: most sequences that run together;
    max_queue: most that wait; chunk_tokens: most prompt tokens of one pass.
    """

    def __init__(
        self,
        model: ExactModel,
        decode: Callable[[np.ndarray], str],
        *,
        cache_bytes: int,
        max_batch: int,
        max_queue: int = 1024,
        chunk_tokens: int = 2048,
    ):
        self.model, self.decode = model, decode
        self.weight_version = 0
        self.cache = PageCache(model, cache_bytes)
        self.scheduler = Scheduler(
            self.cache, max_batch=max_batch, max_queue=max_queue, chunk_tokens=chunk_tokens
        )
        self._ended: list[
            RunningSequence
        ] = []  # while weights were changed; the next step returns them
        self._arrivals = self._generated = 0
        # of the completions under these weights, the one with the least key
        self._to_check: RunningSequence | None = None
        self._stamp = self._weights_stamp()

    # ---- requests

    def submit(self, request: Request) -> RunningSequence:
        """Queue a request. Raises UserError when it can never run and QueueFull when too many
        wait."""
        self.require_room(len(request.prompt) + request.params.max_new_tokens)
        if not self.has_work:
            self._to_check = None  # what ended before is somebody else's: an evaluation's
        running = RunningSequence.of(request, self._arrivals)
        self.scheduler.submit(running)
        self._arrivals += 1
        return running

    def cancel(self, running: RunningSequence) -> None:
        """End a request now, with what it has; its pages are free at once. One that has ended stays
        as it is."""
        if running.completion is None:
            self._end(running, self.decode(np.array(running.tokens, np.int64)), "cancelled")

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting or self._ended)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Run every request to its end; results in request order. Errors as `submit`, before any
        work."""
        for request in requests:
            self.require_room(len(request.prompt) + request.params.max_new_tokens)
        pending, mine = deque(requests), []
        results: list[Completion] = []
        while len(results) < len(requests):
            while pending and len(self.scheduler.waiting) < self.scheduler.max_queue:
                mine.append(self.submit(pending.popleft()))
            self.step()
            while (
                len(results) < len(mine)
                and (completion := mine[len(results)].completion) is not None
            ):
                results.append(completion)
        return results

    @property
    def longest(self) -> int:
        """Most tokens of one sequence, by the model's positions and by the cache."""
        return min(self.model.config.max_position_embeddings, self.cache.count * PAGE)

    def require_room(self, longest: int) -> None:
        """UserError when a sequence of that many tokens fits neither the cache nor the model's
        positions."""
        check_room(self.model.config, self.cache.count, self.cache.page_bytes, longest)

    # ---- weights

    def apply(
        self, version: int, load: Callable[[], None] | None = None, running: OnUpdate = "finish"
    ) -> None:
        """Go over to weights of that version; load writes them into the model, where they are not
        there already.

        Requests that have begun are finished under the old weights first ("finish"; the next step
        returns them), begin anew ("restart"), or go on under the new weights with their past
        computed again ("continue"). No cached key survives.
        """
        if running == "finish":
            while (
                any(sequence.tokens for sequence in self.scheduler.waiting)
                or self.scheduler.running
            ):
                self._ended += [
                    r for r in self._pass(only_started=True) if r.completion is not None
                ]
        self.scheduler.preempt_all()
        if running == "restart":
            for sequence in self.scheduler.waiting:
                for column in (
                    sequence.tokens,
                    sequence.logprobs,
                    sequence.weight_versions,
                    sequence.top,
                ):
                    column.clear()
        if load is not None:
            load()
        self.weight_version = version
        self._forget()

    def weight_hash(self) -> str:
        """SHA-256 over names, shapes and bytes of the weights it runs, as in a checkpoint."""
        return weight_hash(self.model.named_weights())

    def _weights_stamp(self) -> tuple[int, int]:
        return self.weight_version, self.model.changes()

    def _check_weights(self) -> None:
        """Drop every cached key and value when the weights are not those it was computed with."""
        if self._stamp == self._weights_stamp():
            return
        if any(sequence.tokens for sequence in (*self.scheduler.running, *self.scheduler.waiting)):
            raise RuntimeError(
                "the weights changed under running requests; call Engine.apply, which says what becomes of them"
            )
        self.scheduler.preempt_all()
        self._forget()

    def _forget(self) -> None:
        self.cache.flush()
        self._to_check = None
        self._stamp = self._weights_stamp()

    # ---- a check of itself

    def logprob_gap(self) -> float:
        """Pass a completion that has ended since the engine was last idle, under these weights,
        through the trainer's packed pass: the largest difference of its log-probs in nats; 0 where
        there is none."""
        checked = self._to_check
        if checked is None:
            return 0.0
        prompt, tokens = checked.request.prompt, checked.known()
        before, count = len(prompt), len(checked.tokens)
        segments = [(0, before, 0, 0)] + [(before, count - 1, 0, before)] * (count > 1)
        batch = Microbatch(
            tokens=tokens[:-1],
            positions=np.arange(len(tokens) - 1),
            segments=np.array(segments),
            rows=np.arange(before - 1, len(tokens) - 1),
            targets=tokens[before:],
            samples=np.zeros(1, np.int64),
            sequences=np.zeros(count, np.int64),
        )
        with torch.no_grad():
            logprobs = (
                batch_logprobs(self.model, batch, checked.how, entropy=False)[0].cpu().numpy()
            )
        # others were sampled before a pause
        own = np.array(checked.weight_versions) == self.weight_version
        return float(np.abs(logprobs - np.array(checked.logprobs, np.float32))[own].max())

    # ---- one pass

    def step(self) -> list[RunningSequence]:
        """One forward pass; returns the sequences that got a token, with `completion` set on those
        that ended."""
        watchdog.beat()
        ended, self._ended = self._ended, []
        return ended + self._pass(only_started=False)

    @torch.no_grad()
    def _pass(self, *, only_started: bool) -> list[RunningSequence]:
        self._check_weights()
        work = self.scheduler.schedule(only_started=only_started)
        if not work:
            return []
        # the order of paged attention: no rows are moved then
        work.sort(key=lambda part: -len(part[0].pages))
        hidden = self._forward(work)
        last = np.cumsum([count for _, count in work]) - 1
        ready = [
            (sequence, row)
            for (sequence, _), row in zip(work, last, strict=True)
            if sequence.cached == sequence.length
        ]
        if ready:
            rows = torch.from_numpy(np.array([row for _, row in ready])).to(self.model.device)
            self._sample(
                self.model.head(hidden.index_select(0, rows)), [sequence for sequence, _ in ready]
            )
            self._retire([sequence for sequence, _ in ready])
        return [sequence for sequence, _ in ready]

    def _forward(self, work: Work) -> Tensor:
        """The last hidden states [T, D] of the new tokens, whose keys and values are in the cache
        afterwards."""
        cache = self.cache
        starts, counts = (
            np.array([s.cached for s, _ in work]),
            np.array([count for _, count in work]),
        )
        tokens = np.array([token for s, count in work for token in s.next_tokens(count)], np.int64)
        runs = Runs([s.pages for s, _ in work], starts, counts)
        plan = self.model.paged_plan(cache.keys, cache.values, runs)
        hidden = self.model.hidden(torch.from_numpy(tokens), torch.from_numpy(runs.positions), plan)
        cache.fill(runs.pages, runs.offsets, tokens)
        for sequence, count in work:
            sequence.cached += count
        return hidden

    def _sample(self, logits: Tensor, ready: list[RunningSequence]) -> None:
        """Append one token to each sequence; logits [B, V] are theirs."""
        keys = np.array([s.request.key for s in ready], np.uint64)
        draws = torch.from_numpy(
            uniforms(keys, np.array([s.request.drawn + len(s.tokens) for s in ready]))
        ).to(logits.device)
        alike: dict[tuple[SamplingDistribution, int], list[int]] = defaultdict(list)
        for row, sequence in enumerate(ready):
            alike[sequence.how, sequence.request.params.top_logprobs].append(row)
        for (how, top_logprobs), rows in alike.items():
            members = [ready[row] for row in rows]
            part = slice(None) if len(rows) == len(ready) else torch.tensor(rows)
            seen = _seen(members, logits.device) if how.repetition_penalty != 1.0 else None
            drawn = sample(logits[part], how, draws[part], seen, top_logprobs)
            columns = (
                t.tolist()
                for t in (drawn.tokens, drawn.logprobs, drawn.top_tokens, drawn.top_logprobs)
            )
            for sequence, token, logprob, top, theirs in zip(members, *columns, strict=True):
                sequence.tokens.append(token)
                sequence.logprobs.append(logprob)
                sequence.weight_versions.append(self.weight_version)
                if top:
                    sequence.top.append((top, theirs))
        self._generated += len(ready)

    def _retire(self, ready: list[RunningSequence]) -> None:
        for sequence in ready:
            verdict = self._ending(sequence)
            if verdict is not None:
                self._end(sequence, *verdict)

    def _ending(self, sequence: RunningSequence) -> tuple[str, str] | None:
        """(text, stop reason) when the sequence has ended."""
        params, tokens = sequence.request.params, sequence.tokens
        if tokens[-1] in params.stop_token_ids:
            return self.decode(np.array(tokens[:-1], np.int64)), "stop"
        full, paused = len(tokens) >= params.max_new_tokens, len(tokens) == sequence.pause_at
        if not params.stop and not full and not paused:
            return None
        text = self.decode(np.array(tokens, np.int64))
        cuts = [text.index(stop) for stop in params.stop if stop in text]
        if cuts:
            return text[: min(cuts)], "stop"
        return (text, "length") if full else (text, "paused") if paused else None

    def _end(self, sequence: RunningSequence, text: str, reason: str) -> None:
        self.scheduler.remove(sequence)
        if sequence.tokens and sequence.weight_versions[-1] == self.weight_version:
            self._to_check = min(
                self._to_check or sequence, sequence, key=lambda one: one.request.key
            )
        shape = (len(sequence.top), sequence.request.params.top_logprobs)
        sequence.completion = Completion(
            tokens=np.array(sequence.tokens, np.int64),
            logprobs=np.array(sequence.logprobs, np.float32),
            weight_versions=np.array(sequence.weight_versions, np.int32),
            text=text,
            stop_reason=reason,
            top_tokens=np.array([tokens for tokens, _ in sequence.top], np.int64).reshape(shape),
            top_logprobs=np.array([logprobs for _, logprobs in sequence.top], np.float32).reshape(
                shape
            ),
        )

    def stats(self) -> dict[str, float]:
        """Gauges and counters since the start; pages are of 128 tokens."""
        scheduler, cache = self.scheduler, self.cache
        in_use = cache.count - cache.available
        return {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "pages": cache.count,
            "pages_in_use": in_use,
            "pages_cached": cache.cached,
            "cache_bytes_in_use": in_use * cache.page_bytes,
            "generated_tokens": self._generated,
            "prompt_tokens": scheduler.prompt_tokens,
            "prompt_tokens_cached": scheduler.prompt_tokens_cached,
            "preemptions": scheduler.preemptions,
        }


def _seen(sequences: list[RunningSequence], device: torch.device) -> SeenTokens:
    """The distinct tokens of each sequence so far."""
    tokens = [np.unique(sequence.known()) for sequence in sequences]
    rows = np.arange(len(tokens)).repeat([len(t) for t in tokens])
    return SeenTokens(
        torch.from_numpy(rows).to(device), torch.from_numpy(np.concatenate(tokens)).to(device)
    )


def check_room(config: Any, pages: int, page_bytes: int, longest: int) -> None:
    """Raise UserError when a sequence of that many tokens has no place in the model of a
    transformers config, or in a cache of that many pages."""
    limit, needed = config.max_position_embeddings, -(-longest // PAGE)
    if longest > limit:
        raise UserError(
            "a sequence would be longer than the model can place",
            where="rollout.max_new_tokens",
            found=f"{longest} tokens, prompt and completion",
            expected=f"at most {limit} (the model's max_position_embeddings)",
            next="lower rollout.max_new_tokens; or data.max_prompt_tokens, with data.long_prompts=drop",
        )
    if needed > pages:
        raise UserError(
            "the key/value cache cannot hold one sequence",
            where="rollout.cache_mb",
            found=f"{pages * page_bytes / 2**20:.0f} MiB",
            expected=f"at least {-(-needed * page_bytes >> 20)} MiB for {longest} tokens",
            next="raise rollout.cache_mb, or lower rollout.max_new_tokens",
        )
