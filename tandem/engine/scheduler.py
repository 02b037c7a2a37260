"""Sequences of the next forward pass: first come, first served, within the page budget.

    submit --> waiting --admit: pages for all its tokens--> running --end or cancel--> gone
                  ^                                            |
                  +--preempt: the youngest gives up its pages -+

Every running sequence gets its next token, or the next chunk of its prompt, in each pass. The
oldest is never preempted, and a waiting sequence is older than all that come later, so none
starves. A preempted sequence keeps its tokens and computes their keys and values again. The
scheduler does not know the model.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from tandem.engine.page_cache import EMPTY_PREFIX, NO_MATCH, Match, PageCache, hash_page
from tandem.model.paged_attention import PAGE, padded_tables
from tandem.types import Completion, Request

if TYPE_CHECKING:
    from tandem.engine.prompt_scores import PromptScores

_ARRIVAL = attrgetter("arrival")


class QueueFull(RuntimeError):
    """The waiting queue has no room; the request was not taken."""


@dataclass(eq=False, slots=True, kw_only=True)
class RunningSequence:
    """A request on its way. `completion` is set once it has ended."""

    request: Request
    arrival: int
    masked: bool = False  # some token is sampled from a part of the vocabulary
    scored: bool = False  # the passes over its prompt, up to the first token, score that
    pause_at: int = 0  # tokens at which it pauses; 0: never
    tokens: list[int] = field(default_factory=list)  # sampled so far
    logprobs: list[float] = field(default_factory=list)  # nats, float32 values
    weight_versions: list[int] = field(default_factory=list)
    # likeliest tokens, if asked for
    top: list[tuple[list[int], list[float]]] = field(default_factory=list)
    # of all tokens of the prompt but the first, in parts, if asked for
    prompt_scores: "list[PromptScores]" = field(default_factory=list)
    completion: Completion | None = None
    page_table: list[int] = field(default_factory=list)
    num_cached: int = 0  # tokens whose keys and values are in its pages
    num_unseen: int = 0  # first pages of the table that it holds no more: no layer sees them

    @classmethod
    def of(cls, request: Request, arrival: int) -> "RunningSequence":
        """Start a request, from the tokens of `resume_from` as if it had been preempted there."""
        masked = request.params.min_tokens > 0 or request.mask is not None
        scored = request.params.prompt_logprobs is not None
        sequence = cls(request=request, arrival=arrival, masked=masked, scored=scored)
        if (paused := request.resume_from) is not None:
            sequence.tokens, sequence.logprobs = paused.tokens.tolist(), paused.logprobs.tolist()
            sequence.weight_versions = paused.weight_versions.tolist()
            top_tokens, top_logprobs = paused.top_tokens.tolist(), paused.top_logprobs.tolist()
            sequence.top = list(zip(top_tokens, top_logprobs, strict=True))
        if request.max_tokens_now:
            sequence.pause_at = len(sequence.tokens) + request.max_tokens_now
        return sequence

    @property
    def length(self) -> int:
        return len(self.request.prompt) + len(self.tokens)

    def limit(self) -> int:
        """Return the length at which it ends or pauses, whatever its tokens are."""
        most = self.request.params.max_new_tokens
        return len(self.request.prompt) + min(most, self.pause_at or most)

    def all_tokens(self) -> np.ndarray:
        """Return prompt and sampled tokens, int64 [T]."""
        return np.concatenate([self.request.prompt, np.array(self.tokens, np.int64)])

    def next_tokens(self, count: int) -> list[int]:
        """Return the tokens that come after those in the cache."""
        start = self.num_cached - len(self.request.prompt)
        if start >= 0:
            return self.tokens[start : start + count]
        return self.all_tokens()[self.num_cached : self.num_cached + count].tolist()


Parts = list[tuple[RunningSequence, int]]  # a sequence and how many of its tokens run


class Rows:
    """Sequences, and arrays that have a row for each: `columns`, and the page tables, int64 [S, M].
    They follow the sequences without a look at each."""

    columns: tuple[str, ...]
    sequences: list[RunningSequence]
    table: np.ndarray

    def select(self, order: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self.sequences, at = [self.sequences[n] for n in order], np.fromiter(order, np.int64)
        for name in ("table", *self.columns):
            setattr(self, name, getattr(self, name).take(at, 0))

    def append(self, more: "Rows") -> None:
        """Put more rows behind those there are."""
        count, width = len(self.sequences), max(self.table.shape[1], more.table.shape[1])
        self.sequences = self.sequences + more.sequences
        table = np.zeros((len(self.sequences), width), np.int64)
        table[:count, : self.table.shape[1]] = self.table
        table[count:, : more.table.shape[1]] = more.table
        self.table = table
        for name in self.columns:
            setattr(self, name, np.concatenate([getattr(self, name), getattr(more, name)]))


class Work(Rows):
    """The tokens of a pass, in the order of paged attention, where no rows are moved then;
    sequences that share pages stand beside each other.

    Of each sequence, int64 [S]: counts, the tokens that run; starts, those in the cache; tokens,
    its newest; limits, the length at which its end is looked for whatever its token is, 0 with stop
    strings. table int64 [S, M]: the page tables. stops: the stop tokens of any. ends: each sequence
    runs the last of its tokens.
    """

    columns = "counts", "starts", "_limits", "tokens"

    def __init__(self, parts: Parts):
        parts = sorted(parts, key=lambda part: _place_of(part[0]))
        self.sequences = [sequence for sequence, _ in parts]
        limits = [0 if s.request.params.stop else s.limit() for s in self.sequences]
        columns = [count for _, count in parts], [s.num_cached for s in self.sequences], limits
        self.counts, self.starts, self._limits = np.array(columns, np.int64)
        self.tokens = np.array([(s.tokens or s.request.prompt)[-1] for s in self.sequences])
        self.table = padded_tables([s.page_table for s in self.sequences])
        self.ends = all(s.num_cached + count == s.length for s, count in parts)
        stops = {s.request.params.stop_token_ids for s in self.sequences}
        self.stops = np.array([token for own in stops for token in own], np.int64)

    def add_pages(self, new: list[int]) -> None:
        """Read the pages that these sequences have got, and move them to their places."""
        pages = np.array([self.sequences[n].page_table[-2:] for n in new]).T
        self.table = with_pages(self.table, new, self.starts[new] // PAGE, pages)
        self._move(new)

    def add(self, parts: Parts) -> None:
        """Add sequences that join."""
        before, joined = len(self.sequences), Work(parts)
        self.append(joined)
        self.ends, self.stops = joined.ends, np.union1d(self.stops, joined.stops)
        self._move(list(range(before, len(self.sequences))))

    def _move(self, rows: list[int]) -> None:
        """Move sequences to their places among the others."""
        moved = set(rows)
        order = [n for n in range(len(self.sequences)) if n not in moved]
        for n in rows:
            insort(order, n, key=lambda n: _place_of(self.sequences[n]))
        self.select(order)

    def advance(self) -> None:
        """Make it the work of the next pass: the token that each sequence has sampled."""
        self.starts, self.counts = self.starts + self.counts, np.ones_like(self.counts)

    def may_have_ended(self) -> list[RunningSequence]:
        """List the sequences that their newest tokens may have ended, of work that `ends`."""
        self.tokens = np.fromiter([s.tokens[-1] for s in self.sequences], np.int64)
        full = self.starts + self.counts >= self._limits
        found = full | (self.tokens[:, None] == self.stops).any(1)
        return [self.sequences[n] for n in np.flatnonzero(found).tolist()]


def with_pages(table: np.ndarray, rows: list[int], at: np.ndarray, pages: Any) -> np.ndarray:
    """Put pages [2, n] of rows into a table int64 [S, M]: those before `at`, and at it."""
    wider = int(at.max()) + 1 - table.shape[1]
    if wider > 0:
        table = np.pad(table, ((0, 0), (0, wider)))
    table[rows, at - 1], table[rows, at] = pages
    return table


def _place_of(sequence: RunningSequence) -> tuple[int, list[int]]:
    return -len(sequence.page_table), sequence.page_table


class Queue:
    """The sequences that wait and those that run, by arrival. What plans their passes is a
    subclass; chunk_tokens bounds the prompt tokens of a pass, max_queue the waiting sequences."""

    def __init__(self, cache: Any, *, max_batch: int, max_queue: int, chunk_tokens: int):
        self.cache = cache
        self.max_batch, self.max_queue, self.chunk_tokens = max_batch, max_queue, chunk_tokens
        self.waiting: list[RunningSequence] = []
        self.running: list[RunningSequence] = []
        self.preemptions = self.prompt_tokens = self.prompt_tokens_cached = 0
        # the pass to come, if nobody joins: kept while each running sequence has one token to run
        self._next: Work | None = None

    def submit(self, sequence: RunningSequence) -> None:
        if len(self.waiting) >= self.max_queue:
            waiting = len(self.waiting)
            raise QueueFull(f"{waiting} requests are waiting, at most {self.max_queue} may")
        insort(self.waiting, sequence, key=_ARRIVAL)

    def remove(self, sequence: RunningSequence) -> None:
        """Drop a sequence that has ended or was cancelled; its pages are free at once."""
        if sequence in self.running:
            self._give_up_pages(sequence)
            self.running.remove(sequence)
            if self._next is not None:
                others = [n for n, s in enumerate(self._next.sequences) if s is not sequence]
                self._next.select(others)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def preempt(self, sequence: RunningSequence) -> None:
        """Put a running sequence back into the queue with its tokens, without keys and values."""
        self.preemptions += 1
        self._next = None
        self._give_up_pages(sequence)
        if not sequence.tokens:  # its prompt runs again, perhaps with other weights
            sequence.prompt_scores.clear()
        self.running.remove(sequence)
        insort(self.waiting, sequence, key=_ARRIVAL)

    def _admit(self, sequence: RunningSequence, count: int) -> None:
        """Let a waiting sequence run, of whose tokens so many are not cached."""
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_ARRIVAL)
        if not sequence.tokens:
            self.prompt_tokens += count + sequence.num_cached
            self.prompt_tokens_cached += sequence.num_cached

    def _give_up_pages(self, sequence: RunningSequence) -> None:
        raise NotImplementedError


class Scheduler(Queue):
    """Admission, preemption and sharing of pages."""

    cache: PageCache

    def schedule(self, *, only_started: bool = False) -> Work:
        """Plan the next pass. only_started: admit only sequences that have sampled before."""
        if self.running and self._next is not None and self._continues(self._next):
            planned = self._next
            if joined := self._admit_waiting(self.chunk_tokens, only_started):
                planned.add(joined)
        else:
            planned = Work(self._plan(only_started))
        self._next = planned if planned.ends else None
        return planned

    def _plan(self, only_started: bool) -> Parts:
        work: Parts = []
        budget, preempted, at = self.chunk_tokens, self.preemptions, 0
        while at < len(self.running):  # _grow preempts from the end
            sequence = self.running[at]
            if self._grow(sequence):
                count = min(sequence.length - sequence.num_cached, max(budget, 1))
                work.append((sequence, count))
                budget -= count - 1
                at += 1
        # room was short a moment ago: running sequences come first
        if preempted == self.preemptions:
            work += self._admit_waiting(budget, only_started)
        return work

    def _continues(self, work: Work) -> bool:
        """Tell whether the sequences of the last pass are all in the next, and give each that needs
        one a page."""
        [full] = np.nonzero(work.starts % PAGE == 0)
        if len(full) > self.cache.available:
            return False
        for sequence in sorted((work.sequences[n] for n in full.tolist()), key=_ARRIVAL):
            self._grow(sequence)
        if len(full):
            work.add_pages(full.tolist())
        return True

    def advance(self, work: Work) -> None:
        """Count a pass's tokens as cached, keep one of equal full pages, leave those behind."""
        window, starts = self.cache.window, work.starts
        work.advance()
        for sequence, cached in zip(work.sequences, work.starts.tolist(), strict=True):
            sequence.num_cached = cached
        crossed = work.starts // PAGE > starts // PAGE
        for n in np.flatnonzero(crossed | bool(window)).tolist():
            sequence = work.sequences[n]
            for at in range(int(starts[n]) // PAGE, sequence.num_cached // PAGE):
                kept = self.cache.merge(sequence.page_table[at])
                sequence.page_table[at] = work.table[n, at] = kept
            # pages that no further token sees stay in the table; attention masks them
            before = sequence.num_unseen
            if window and (unseen := (sequence.num_cached + 1 - window) // PAGE) > before:
                self.cache.release(sequence.page_table[before:unseen])
                sequence.num_unseen = unseen

    def _admit_waiting(self, budget: int, only_started: bool) -> Parts:
        work: Parts = []
        for sequence in list(self.waiting):
            if budget <= 0 or len(self.running) >= self.max_batch:
                break
            if only_started and not sequence.tokens:
                continue
            tokens = sequence.all_tokens()
            alone = sequence.scored and not sequence.tokens  # all of the prompt has to run
            match = NO_MATCH if alone else self.cache.match(tokens)
            if 2 * (match.will_be_cached - match.length) > len(tokens) - match.length:
                continue  # another sequence is computing most of what it needs: share that
            if not self._place(sequence, tokens, match) and not self._place(
                sequence, tokens, replace(match, tail_length=0)
            ):
                break
            self._admit(sequence, len(tokens) - sequence.num_cached)
            count = min(len(tokens) - sequence.num_cached, budget)
            budget -= count
            work.append((sequence, count))
        self.cache.make_copies()
        return work

    def _place(self, sequence: RunningSequence, tokens: np.ndarray, match: Match) -> bool:
        """Give a sequence pages, shared and new, for all its tokens; False if there are too few."""
        cache, shared, tail_length = self.cache, match.pages, match.tail_length
        needed = -(-len(tokens) // PAGE) - len(shared)
        source = [match.tail] if tail_length else []
        cache.retain([*shared, *source])  # so that no allocation evicts them
        enough = cache.available >= needed
        if enough:
            sequence.page_table = list(shared)
            sequence.num_cached = len(shared) * PAGE + tail_length
            prefix_hash = cache.next_prefix_hash(shared[-1]) if shared else EMPTY_PREFIX
            for at in range(len(shared) * PAGE, len(tokens), PAGE):
                sequence.page_table.append(cache.allocate(prefix_hash))
                prefix_hash = hash_page(prefix_hash, tokens[at : at + PAGE])
            if tail_length:
                cache.copy(match.tail, sequence.page_table[len(shared)], tail_length)
            cache.reserve(sequence.page_table, tokens, len(shared) * PAGE)
        cache.release(source if enough else [*shared, *source])
        return enough

    def _grow(self, sequence: RunningSequence) -> bool:
        """Give a sequence a page for its next token, taken from the youngest if need be; return
        False if that is this one."""
        if sequence.length <= len(sequence.page_table) * PAGE:
            return True
        while not self.cache.available:
            youngest = self.running[-1]
            self.preempt(youngest)
            if youngest is sequence:
                return False
        prefix_hash = self.cache.next_prefix_hash(sequence.page_table[-1])
        sequence.page_table.append(self.cache.allocate(prefix_hash))
        return True

    def _give_up_pages(self, sequence: RunningSequence) -> None:
        self.cache.release(sequence.page_table[sequence.num_unseen :])
        sequence.page_table, sequence.num_cached, sequence.num_unseen = [], 0, 0
