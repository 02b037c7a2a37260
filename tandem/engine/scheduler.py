"""Who runs in the next forward pass: first come, first served, within the page budget.

    submit --> waiting --admit: pages for all its known tokens--> running --end or cancel--> gone
                  ^                                                  |
                  +--preempt: the youngest gives up its pages -------+

Every running sequence gets its next token, or the next chunk of its prompt, in each pass. The
oldest is never preempted, and whoever waits is older than all who come later, so nobody starves. A
preempted sequence keeps its tokens and computes their keys and values again. It does not know the
model.
"""

from bisect import insort
from dataclasses import dataclass, field, replace

import numpy as np

from tandem.engine.page_cache import BEGINNING, Match, PageCache, past_after
from tandem.model.logprobs import SamplingDistribution
from tandem.model.paged_attention import PAGE
from tandem.types import Completion, Request


class QueueFull(RuntimeError):
    """The waiting queue has no room; the request was not taken."""


@dataclass(eq=False, slots=True, kw_only=True)
class RunningSequence:
    """One request on its way. `completion` is set when it has ended."""

    request: Request
    arrival: int
    how: SamplingDistribution
    pause_at: int = 0  # tokens at which it pauses; 0: never
    tokens: list[int] = field(default_factory=list)  # sampled so far
    logprobs: list[float] = field(default_factory=list)  # nats, float32 values
    weight_versions: list[int] = field(default_factory=list)
    # likeliest tokens, if asked for
    top: list[tuple[list[int], list[float]]] = field(default_factory=list)
    completion: Completion | None = None
    pages: list[int] = field(default_factory=list)
    cached: int = 0  # tokens whose keys and values are in its pages

    @classmethod
    def of(cls, request: Request, arrival: int) -> "RunningSequence":
        """One that goes on from what had begun is as if it had been preempted there."""
        new, begun = (
            cls(request=request, arrival=arrival, how=SamplingDistribution.of(request.params)),
            request.begun,
        )
        if begun is not None:
            new.tokens, new.logprobs = begun.tokens.tolist(), begun.logprobs.tolist()
            new.weight_versions = begun.weight_versions.tolist()
            new.top = list(zip(begun.top_tokens.tolist(), begun.top_logprobs.tolist(), strict=True))
        new.pause_at = len(new.tokens) + request.max_tokens_now if request.max_tokens_now else 0
        return new

    @property
    def length(self) -> int:
        return len(self.request.prompt) + len(self.tokens)

    def known(self) -> np.ndarray:
        """int64 [T]: the prompt and what was sampled."""
        return np.concatenate([self.request.prompt, np.array(self.tokens, np.int64)])

    def next_tokens(self, count: int) -> list[int]:
        """The known tokens that come after those in the cache."""
        before = len(self.request.prompt)
        if self.cached >= before:
            return self.tokens[self.cached - before : self.cached - before + count]
        return self.known()[self.cached : self.cached + count].tolist()


Work = list[tuple[RunningSequence, int]]  # a sequence and how many of its tokens run


class Scheduler:
    """Admits, preempts and shares; chunk_tokens bounds the prompt tokens of a pass, max_queue those
    who wait."""

    def __init__(self, cache: PageCache, *, max_batch: int, max_queue: int, chunk_tokens: int):
        self.cache = cache
        self.max_batch, self.max_queue, self.chunk_tokens = max_batch, max_queue, chunk_tokens
        self.waiting: list[RunningSequence] = []  # by arrival
        self.running: list[RunningSequence] = []  # by arrival
        self.preemptions = self.prompt_tokens = self.prompt_tokens_cached = 0

    def submit(self, sequence: RunningSequence) -> None:
        if len(self.waiting) >= self.max_queue:
            raise QueueFull(
                f"{len(self.waiting)} requests are waiting, at most {self.max_queue} may"
            )
        insort(self.waiting, sequence, key=_arrival)

    def remove(self, sequence: RunningSequence) -> None:
        """It has ended or was cancelled: its pages are free for others at once."""
        if sequence in self.running:
            self._give_up_pages(sequence)
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def schedule(self, *, only_started: bool = False) -> Work:
        """The next pass. only_started: admit none but those that have sampled before."""
        work: Work = []
        budget, preempted, at = self.chunk_tokens, self.preemptions, 0
        while at < len(self.running):  # whom _grow preempts stands behind
            sequence = self.running[at]
            if self._grow(sequence):
                count = min(sequence.length - sequence.cached, max(budget, 1))
                work.append((sequence, count))
                budget -= count - 1
                at += 1
        # room was short a moment ago: let those who run come first
        if preempted == self.preemptions:
            work += self._admit(budget, only_started)
        return work

    def preempt_all(self) -> None:
        """Back to the queue with every running sequence, its tokens kept: its keys and values are
        out of date."""
        for sequence in list(self.running):
            self._preempt(sequence)

    def _admit(self, budget: int, only_started: bool) -> Work:
        work: Work = []
        for sequence in list(self.waiting):
            if budget <= 0 or len(self.running) >= self.max_batch:
                break
            if only_started and not sequence.tokens:
                continue
            known = sequence.known()
            match = self.cache.match(known)
            if 2 * (match.coming - match.length) > len(known) - match.length:
                continue  # another one is computing most of what it needs: take it from there
            if not self._place(sequence, known, match) and not self._place(
                sequence, known, replace(match, tail_length=0)
            ):
                break
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=_arrival)
            if not sequence.tokens:
                self.prompt_tokens += len(known)
                self.prompt_tokens_cached += sequence.cached
            count = min(len(known) - sequence.cached, budget)
            budget -= count
            work.append((sequence, count))
        return work

    def _place(self, sequence: RunningSequence, known: np.ndarray, match: Match) -> bool:
        """Give it pages for all it knows, the shared ones held and the rest new; False when there
        are too few."""
        cache, shared, tail_length = self.cache, match.pages, match.tail_length
        needed = -(-len(known) // PAGE) - len(shared)
        source = [match.tail] if tail_length else []
        cache.hold([*shared, *source])  # so that taking new pages evicts none of them
        enough = cache.available >= needed
        if enough:
            sequence.pages, sequence.cached = list(shared), len(shared) * PAGE + tail_length
            past = cache.past_of_next(shared[-1]) if shared else BEGINNING
            for at in range(len(shared) * PAGE, len(known), PAGE):
                sequence.pages.append(cache.take(past))
                past = past_after(past, known[at : at + PAGE])
            if tail_length:
                cache.copy(match.tail, sequence.pages[len(shared)], tail_length)
            cache.plan(sequence.pages, known, len(shared) * PAGE)
        cache.release(source if enough else [*shared, *source])
        return enough

    def _grow(self, sequence: RunningSequence) -> bool:
        """A page for its next token, taken from the youngest if need be; False when it was itself
        the youngest."""
        if sequence.length <= len(sequence.pages) * PAGE:
            return True
        while not self.cache.available:
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        sequence.pages.append(self.cache.take(self.cache.past_of_next(sequence.pages[-1])))
        return True

    def _preempt(self, sequence: RunningSequence) -> None:
        self.preemptions += 1
        self._give_up_pages(sequence)
        self.running.remove(sequence)
        insort(self.waiting, sequence, key=_arrival)

    def _give_up_pages(self, sequence: RunningSequence) -> None:
        self.cache.release(sequence.pages)
        sequence.pages, sequence.cached = [], 0


def _arrival(sequence: RunningSequence) -> int:
    return sequence.arrival
