"""The exact rollout engine: continuous batching over the trainer's own weights.

    submit --> Scheduler.schedule --> _forward: chunks of prompts, and one token of each other
                    ^                    |      sequence, in one pass
                    |                    v
                  _end <-------------- sample: one addressed uniform a token
         (stop token, stop string, length)

A completion depends on its request and the weights only, never on its neighbours, the batch size,
chunks, shared prefixes, preemption or order. On a GPU decode steps run ahead of the host
(lookahead.py); nothing that can be seen here changes by it. One thread calls the engine. It does
not know problems, rewards or losses.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tandem.engine.ending import find_ending
from tandem.engine.page_cache import PageCache
from tandem.engine.sampler import sample, sampling_key
from tandem.engine.scheduler import Parts, RunningSequence, Scheduler, Work
from tandem.model.expert_choices import RecordedExperts
from tandem.model.load import ExactModel
from tandem.model.logprobs import SeenTokens
from tandem.model.paged_attention import PAGE, Runs
from tandem.model.rope import positions_of
from tandem.registry import find
from tandem.runtime import watchdog
from tandem.runtime.errors import UserError, require_range
from tandem.runtime.image_tokens import text_tokens
from tandem.runtime.rng import uniforms
from tandem.types import Array, Completion, CompletionStop, Request
from tandem.weights.hashing import Digest, tensor_digest, tensor_digests, weight_hash

ANY = (0, np.inf)
# of SamplingParams
LIMITS = {"max_new_tokens": (1, np.inf), "temperature": ANY, "top_k": ANY, "top_p": (0, 1)}

if TYPE_CHECKING:
    from tandem.engine.lookahead import Lookahead, Sampled


def make_engine(model: ExactModel, decode: Callable[[np.ndarray], str], **sizes: Any) -> "Engine":
    """Make the engine of a model, of the class that its path names. sizes: as Engine's."""
    engine: Engine = find("model_engines", model.engine, key="model.path")(model, decode, **sizes)
    return engine


class Engine:
    """Generator of completions with an ExactModel.

    decode: turns token ids into text, for results and stop strings; cache_bytes: budget of the
    key/value cache; max_batch: most sequences that run together; max_queue: most that wait;
    chunk_tokens: most prompt tokens of one pass; record_experts: completions report experts.
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
        record_experts: bool = False,
    ):
        self.model, self.decode = model, decode
        self.weight_version = 0
        sizes = {"max_batch": max_batch, "max_queue": max_queue, "chunk_tokens": chunk_tokens}
        self._open_cache(cache_bytes, record_experts, **sizes)
        # most tokens of one sequence, by the model's positions and by the cache
        self.longest = min(positions_of(model.config), self.cache.count * PAGE)
        # sequences that ended in `apply`; the next step returns them
        self._ended: list[RunningSequence] = []
        self._arrivals = self._generated = 0
        # of the completions by these weights the one with the least key
        self._to_check: RunningSequence | None = None
        self._stamp = self._weights_stamp()

    def _open_cache(self, cache_bytes: int, record_experts: bool, **sizes: int) -> None:
        """Make the cache, and what plans passes within it."""
        self.cache = PageCache(self.model, cache_bytes, record_experts)
        self.scheduler = Scheduler(self.cache, **sizes)
        self.lookahead: Lookahead | None = None  # a CPU that computes has nothing to wait for
        if self.model.kernels.runs_ahead:
            from tandem.engine.lookahead import lookahead_for

            self.lookahead = lookahead_for(self.model, self.cache, sizes["max_batch"])

    # ---- requests

    def submit(self, request: Request) -> RunningSequence:
        """Queue a request. Raises UserError if it can never run and QueueFull if too many wait."""
        self.check(request)
        return self._submit(request)

    def _submit(self, request: Request) -> RunningSequence:
        if not self.has_work:
            self._to_check = None  # earlier completions belong to another caller: an evaluation
        sequence = RunningSequence.of(request, self._arrivals)
        self.scheduler.submit(sequence)
        self._arrivals += 1
        return sequence

    def cancel(self, sequence: RunningSequence) -> None:
        """End a request now with the tokens it has, unless it has ended, and free its pages."""
        if sequence.completion is None:
            self._end(sequence, self.decode(np.array(sequence.tokens, np.int64)), "cancelled")

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting or self._ended)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Run every request to its end; return completions in order. Raises as `submit`, first."""
        ran = self.run(requests)
        return [sequence.completion for sequence in ran if sequence.completion is not None]

    def run(self, requests: Sequence[Request]) -> list[RunningSequence]:
        """Run every request to its end, as `generate`; return the sequences. After an error none of
        them is left."""
        for request in requests:
            self.check(request)
        pending, sequences = deque(requests), list[RunningSequence]()
        try:
            while pending or any(sequence.completion is None for sequence in sequences):
                while pending and len(self.scheduler.waiting) < self.scheduler.max_queue:
                    sequences.append(self._submit(pending.popleft()))
                self.step()
        finally:  # after Ctrl-C, too
            for sequence in sequences:
                self.cancel(sequence)
        return sequences

    def check(self, request: Request) -> None:
        """Raise UserError for a request that can never run."""
        check_tokens(request.prompt, self.model.config, "the prompt")
        likeliest = (0, self.model.config.vocab_size)
        limits = dict.fromkeys(("top_logprobs", "prompt_logprobs"), likeliest)
        require_range(request.params, LIMITS | limits)
        if "" in request.params.stop:
            raise UserError("a stop string is empty", where="stop")
        longest = len(request.prompt) + request.params.max_new_tokens
        if longest > self.longest:
            check_room(self.model.config, self.cache.count, self.cache.page_bytes, longest)

    # ---- weights

    def apply(self, version: int, load: Callable[[], None] | None = None) -> None:
        """Switch to weights of that version; load writes them into the model, unless they are there
        already.

        Requests that have tokens are finished by the old weights first; the next step returns them.
        No cached key survives.
        """
        scheduler = self.scheduler
        while scheduler.running or any(sequence.tokens for sequence in scheduler.waiting):
            ready = Engine.step(self, only_started=True)  # self.step may be wrapped
            self._ended = [sequence for sequence in ready if sequence.completion is not None]
        if load is not None:
            load()
        self.weight_version = version
        self._forget()

    def weight_hash(self) -> str:
        """Hash names, shapes and bytes of the weights in use by SHA-256, as checkpoints do."""
        return weight_hash(self.model.named_weights().items())

    def weight_digests(self, digest: Digest = tensor_digest) -> dict[str, str]:
        """Return the digest of each of the weights in use, by name. digest: of hashing.DIGESTS."""
        return tensor_digests(self.model.named_weights(), digest)

    def _weights_stamp(self) -> tuple[int, int, int]:
        return self.weight_version, self.model.changes(), id(self.model.kernels)

    def _check_weights(self) -> None:
        """Drop every cached key and value if other weights computed it."""
        if self._stamp == self._weights_stamp():
            return
        if any(sequence.tokens for sequence in (*self.scheduler.running, *self.scheduler.waiting)):
            raise RuntimeError("the weights changed under running requests; call Engine.apply")
        for sequence in list(self.scheduler.running):
            self.scheduler.preempt(sequence)
        self._forget()

    def _forget(self) -> None:
        self.cache.flush()
        if self.lookahead is not None:
            self.lookahead.renew()
        self._to_check = None
        self._stamp = self._weights_stamp()

    # ---- a check of itself

    def rest(self) -> None:
        """Give cache and captured steps' memory back until the next step. No request may run."""
        if self.lookahead is not None:
            self.lookahead.clear()
        self.cache.give_back()

    def logprob_gap(self) -> float:
        """Compare a completion of these weights with the trainer's packed pass over it: the largest
        difference of its log-probs in nats. 0 if none has ended since the engine was last idle."""
        from tandem.engine.packed import packed_gap

        checked = self._to_check
        if checked is None:
            return 0.0
        assert checked.completion is not None
        own = replace(  # as sampled, whatever became of the completion since
            checked.completion,
            logprobs=np.array(checked.logprobs, np.float32),
            weight_versions=np.array(checked.weight_versions),
        )
        return packed_gap(self.model, checked.request, own, self.weight_version)

    def score(self, tokens: np.ndarray) -> np.ndarray:
        """Return the log-probs of all tokens but the first, float32 nats, by the packed pass."""
        from tandem.engine.packed import packed_logprobs

        return packed_logprobs(self.model, tokens[:1], tokens[1:])

    # ---- one pass

    @torch.no_grad()
    def step(self, *, only_started: bool = False) -> list[RunningSequence]:
        """Run one forward pass; return the sequences that got a token, with `completion` set on
        those that ended. only_started: admit only sequences that have sampled before."""
        watchdog.heartbeat()
        ended, self._ended = self._ended, []
        self._check_weights()
        if not self.cache.keys:  # given back for an update
            self.cache.restore()
        work = self.scheduler.schedule(only_started=only_started)
        if not work.sequences:
            return ended
        ahead = self.lookahead
        taken = () if ahead is None else ahead.take(work)
        ready, logits = self._forward(work, taken)
        sampled = []
        if logits is not None:
            sampled = self._sample([s for s in ready if s not in taken], logits)
        if ahead is not None:
            sampled += ahead.launch(sampled)
        for members, results in sampled:
            tokens, logprobs = results.tokens.tolist(), results.logprobs.tolist()
            for sequence, token, logprob in zip(members, tokens, logprobs, strict=True):
                sequence.tokens.append(token)
                sequence.logprobs.append(logprob)
                sequence.weight_versions.append(self.weight_version)
            if results.top_tokens.shape[1]:
                top = results.top_tokens.tolist(), results.top_logprobs.tolist()
                for sequence, *likeliest in zip(members, *top, strict=True):
                    sequence.top.append(tuple(likeliest))
        self._generated += len(ready)
        for sequence in work.may_have_ended() if work.ends else ready:
            params = sequence.request.params
            ending = find_ending(params, sequence.tokens, sequence.pause_at, self.decode)
            if ending is not None:
                self._end(sequence, *ending)
        return ended + ready

    def _forward(
        self, work: Work, taken: Collection[RunningSequence]
    ) -> tuple[list[RunningSequence], Tensor | None]:
        """Run the new tokens, whose keys and values go into the cache, but for those of sequences
        that ran ahead, `taken`. Return the sequences without further tokens to run, and the logits
        [B, V] of those that ran here, or None for none."""
        cache, runs = self.cache, Runs(work.table, work.starts, work.counts)
        if len(taken) == len(work.sequences):
            cache.fill(runs.pages, runs.offsets, work.tokens)
            self.scheduler.advance(work)
            return work.sequences, None
        parts = list(zip(work.sequences, work.counts.tolist(), strict=True))
        tokens = work.tokens.repeat(work.counts)
        for n in np.flatnonzero(work.counts > 1 if work.ends else work.counts).tolist():
            sequence, count = parts[n]
            tokens[runs.firsts[n] :][:count] = sequence.next_tokens(count)
        here = [part for part in parts if part[0] not in taken]
        if here:
            rows = np.array([sequence not in taken for sequence in work.sequences])
            own = Runs(work.table[rows], work.starts[rows], work.counts[rows])
            own_tokens = tokens[rows.repeat(work.counts)]
            plan = self.model.paged_plan(cache.keys, cache.values, own)
            inputs = torch.from_numpy(own_tokens), torch.from_numpy(own.positions), plan
            recorded = None
            if cache.experts is not None:
                pair = (torch.from_numpy(part) for part in (own.pages, own.offsets))
                places = (part.to(cache.experts.device) for part in pair)
                recorded = RecordedExperts(cache.experts, *places)
            hidden = self.model.hidden(*inputs, recorded)
            if any(sequence.scored for sequence, _ in here):
                self._score_prompts(here, hidden)
        cache.fill(runs.pages, runs.offsets, tokens)
        self.scheduler.advance(work)
        ready = [s for s in work.sequences if work.ends or s.num_cached == s.length]
        ends = np.cumsum([count for _, count in here]) - 1
        last = [row for (s, _), row in zip(here, ends, strict=True) if s.num_cached == s.length]
        if not last:
            return ready, None
        at = torch.tensor(last).to(self.model.device)
        return ready, self.model.head(hidden.index_select(0, at))

    def _score_prompts(self, work: Parts, hidden: Tensor) -> None:
        """Score the prompt tokens that hidden states [T, D] of a pass predict, where asked for."""
        ends = np.cumsum([count for _, count in work])
        for (sequence, count), end in zip(work, ends, strict=True):
            first = sequence.num_cached + 1
            targets = sequence.request.prompt[first : first + count]
            if sequence.scored and not sequence.tokens and len(targets):
                from tandem.engine.prompt_scores import score_tokens

                states, aims = hidden[end - count :][: len(targets)], torch.from_numpy(targets)
                top = sequence.request.params.prompt_logprobs or 0
                sequence.prompt_scores += score_tokens(self.model.head, states, aims, top)

    def _sample(self, sequences: list[RunningSequence], logits: Tensor) -> "list[Sampled]":
        """Sample the next token of each sequence from its logits [B, V]; one call for those that
        are sampled alike."""
        keys = np.array([s.request.key for s in sequences], np.uint64)
        positions = np.array([s.request.num_sampled + len(s.tokens) for s in sequences])
        draws = torch.from_numpy(uniforms(keys, positions)).to(logits.device)
        if any(sequence.masked for sequence in sequences):
            from tandem.engine.masks import mask_logits

            mask_logits(sequences, logits)
        rows_by_sampling: dict[tuple[float, ...], list[int]] = defaultdict(list)
        for row, sequence in enumerate(sequences):
            rows_by_sampling[sampling_key(sequence.request.params)].append(row)
        sampled = []
        for rows in rows_by_sampling.values():
            members = [sequences[row] for row in rows]
            sampling = members[0].request.params
            part = slice(None) if len(rows) == len(sequences) else torch.tensor(rows)
            seen = _seen(members, logits.device) if sampling.repetition_penalty != 1.0 else None
            results = sample(logits[part], sampling, draws[part], seen, sampling.top_logprobs)
            sampled.append((members, results))
        return sampled

    def _end(self, sequence: RunningSequence, text: str, reason: CompletionStop) -> None:
        rows = sequence.length - 1 if sequence.tokens else 0
        experts = self.cache.experts_of(sequence.page_table, min(rows, sequence.num_cached))
        self.scheduler.remove(sequence)
        checked = sequence.tokens and not sequence.masked  # the trainer knows no masks
        if checked and sequence.weight_versions[-1] == self.weight_version:
            either = (self._to_check or sequence, sequence)
            self._to_check = min(either, key=lambda one: one.request.key)
        shape = (len(sequence.top), sequence.request.params.top_logprobs)
        top_tokens = np.array([tokens for tokens, _ in sequence.top], np.int64)
        top_logprobs = np.array([logprobs for _, logprobs in sequence.top], np.float32)
        sequence.completion = Completion(
            tokens=np.array(sequence.tokens, np.int64),
            logprobs=np.array(sequence.logprobs, np.float32),
            weight_versions=np.array(sequence.weight_versions, np.int32),
            text=text,
            stop_reason=reason,
            top_tokens=top_tokens.reshape(shape),
            top_logprobs=top_logprobs.reshape(shape),
            experts=experts,
        )

    def stats(self) -> dict[str, float]:
        """Return gauges, and counters since the start; pages are of 128 tokens."""
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
    """Collect the distinct tokens of each sequence so far."""
    tokens = [text_tokens(np.unique(sequence.all_tokens())) for sequence in sequences]
    rows = np.arange(len(tokens)).repeat([len(t) for t in tokens])
    pairs = rows, np.concatenate(tokens)
    return SeenTokens(*(torch.from_numpy(each).to(device) for each in pairs))


def check_room(config: Any, pages: int, page_bytes: int, longest: int) -> None:
    """Raise UserError if a sequence of that many tokens does not fit the positions of the model
    (config: transformers) or a cache of that many pages."""
    limit, needed = positions_of(config), -(-longest // PAGE)
    if longest > limit:
        beyond = "original_" * (limit < getattr(config, "max_position_embeddings", limit))
        raise UserError(
            "a sequence would be longer than the model can place",
            where="rollout.max_new_tokens",
            found=f"{longest} tokens, prompt and completion",
            expected=f"at most {limit} (the model's {beyond}max_position_embeddings)",
            next="lower rollout.max_new_tokens; "
            "or data.max_prompt_tokens, with data.long_prompts=drop",
        )
    if needed > pages:
        raise UserError(
            "the key/value cache cannot hold one sequence",
            where="rollout.cache_mb",
            found=f"{pages * page_bytes / 2**20:.0f} MiB",
            expected=f"at least {-(-(needed * page_bytes) >> 20)} MiB for {longest} tokens",
            next="raise rollout.cache_mb, or lower rollout.max_new_tokens",
        )


def check_tokens(tokens: Any, config: Any, where: str) -> Array:
    """Return tokens as int64 [T]. Raises UserError unless they are some ids of the vocabulary, or
    of images. config: ExactModel's."""
    found, size = np.asarray(tokens), config.vocab_size
    ids = text_tokens(found)
    if not found.size or found.dtype.kind not in "iu" or ((ids < 0) | (ids >= size)).any():
        given, expected = f"{tokens!r:.99}", f"at least one id, from 0 to {size - 1}"
        raise UserError("no tokens of the model", where=where, found=given, expected=expected)
    return found.astype(np.int64, copy=False)
