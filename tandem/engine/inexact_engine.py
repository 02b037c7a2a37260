"""The engine of models that cannot be exact: transformers' own cache, in batches of one length.

    schedule: new sequences of one length   one pass over their different prompts; then what
                                            transformers keeps is taken once for every sample
              running sequences             one token for each batch, in a pass of its own; who has
                                            ended leaves the batch

No padding is needed so, and any state that transformers keeps of a sequence will do. Sampling,
ends, weights and checks are those of engine.py, whose `step` this runs. Log-probs differ from the
trainer's by rounding. Nothing is reused from turn to turn, and a paused or preempted sequence is
computed again.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.engine.engine import Engine
from tandem.engine.lookahead import Taken
from tandem.engine.page_cache import page_bytes
from tandem.engine.scheduler import QueueFull, RunningSequence, Work
from tandem.model.inexact import InexactModel, SequenceStates
from tandem.model.load import ExactModel
from tandem.model.paged_attention import PAGE
from tandem.types import Array


def make_engine(model: ExactModel, decode: Callable[[Array], str], **sizes: Any) -> Engine:
    """Make the engine of a model. sizes: as Engine's."""
    return (InexactEngine if model.inexact else Engine)(model, decode, **sizes)


class InexactEngine(Engine):
    """Generator of completions with an InexactModel, as Engine."""

    model: InexactModel

    def _open_cache(self, cache_bytes: int, record_experts: bool, **sizes: int) -> None:
        assert not record_experts, "refused by jobs/models.py"
        self.cache = ReservedPages(self.model, cache_bytes)  # type: ignore[assignment]
        self.scheduler = BatchScheduler(self.cache, **sizes)  # type: ignore[assignment, arg-type]
        self.lookahead = None
        self._batches: list[Batch] = []

    def _forward(self, work: Work, taken: Taken) -> tuple[list[RunningSequence], Tensor | None]:
        ready = [sequence for sequence, _ in work]
        at = {sequence: row for row, sequence in enumerate(ready)}
        self._batches = [batch for batch in self._batches if batch.keep(at)]
        rows, states = [], []
        for batch in self._batches:
            rows += [at[sequence] for sequence in batch.members]
            states.append(batch.extend())
        by_length = defaultdict(list)
        for sequence, count in work:
            if not sequence.num_cached:
                by_length[count].append(sequence)
        for members in by_length.values():
            batch, hidden = self._begin(members)
            rows += [at[sequence] for sequence in members]
            states.append(hidden)
            self._batches.append(batch)
        for sequence in ready:
            sequence.num_cached = sequence.length
        order = torch.tensor(rows).argsort().to(self.model.device)
        return ready, self.model.head(torch.cat(states).index_select(0, order))

    def _begin(self, members: list[RunningSequence]) -> "tuple[Batch, Tensor]":
        """Run all tokens of sequences of one length; return their batch and their last hidden
        states [B, D]."""
        tokens = [sequence.all_tokens() for sequence in members]
        places: dict[bytes, int] = {}  # of different ones
        own = [places.setdefault(one.tobytes(), len(places)) for one in tokens]
        different = [tokens[own.index(place)] for place in range(len(places))]
        states = SequenceStates(self.model)
        hidden = states.extend(torch.from_numpy(np.stack(different)))
        for sequence, place in zip(members, own, strict=True):
            self._score_prompts([(sequence, len(tokens[0]))], hidden[place])
        states.take(own)
        return Batch(members, states), hidden[own, -1]


class Batch:
    """Sequences of one length, and what transformers keeps of them."""

    def __init__(self, members: list[RunningSequence], states: SequenceStates):
        self.members, self._states = members, states

    def keep(self, running: dict[RunningSequence, int]) -> bool:
        """Drop the sequences that no longer run; tell whether one is left. One that was preempted
        begins again, in another batch."""
        rows = [
            row
            for row, sequence in enumerate(self.members)
            if sequence in running and sequence.num_cached
        ]
        if rows and len(rows) < len(self.members):
            self._states.take(rows)
        self.members = [self.members[row] for row in rows]
        return bool(rows)

    def extend(self) -> Tensor:
        """Run the newest token of each; return the last hidden states [B, D]."""
        newest = [sequence.tokens[-1:] for sequence in self.members]
        return self._states.extend(torch.tensor(newest))[:, -1]


class ReservedPages:
    """The budget of the cache in place of a PageCache: a sequence reserves room for all tokens that
    it may get, as attention would need it; states of a fixed size are not counted."""

    keys = "kept by transformers"

    def __init__(self, model: InexactModel, budget: int):
        self.page_bytes = max(1, page_bytes(model.config, model.dtype.itemsize))
        self.count, self.reserved, self.cached = budget // self.page_bytes, 0, 0

    @property
    def available(self) -> int:
        return self.count - self.reserved

    def flush(self) -> None:
        """Do nothing: no key outlives its sequence."""

    def give_back(self) -> None:
        """Do nothing: without sequences it takes no memory."""

    def experts_of(self, table: list[int], rows: int) -> Array:
        return np.zeros((0, 0, 0), np.int16)


class BatchScheduler:
    """Scheduler in place of scheduler.Scheduler: first come, first served, within the reserved
    pages. A sequence that runs keeps running; its prompt runs in one pass."""

    def __init__(self, cache: ReservedPages, *, max_batch: int, max_queue: int, chunk_tokens: int):
        self.cache, self.max_batch, self.max_queue = cache, max_batch, max_queue
        self.chunk_tokens = chunk_tokens
        self.waiting: list[RunningSequence] = []  # by arrival
        self.running: list[RunningSequence] = []
        self.preemptions = self.prompt_tokens = self.prompt_tokens_cached = 0

    def submit(self, sequence: RunningSequence) -> None:
        if len(self.waiting) >= self.max_queue:
            waiting = len(self.waiting)
            raise QueueFull(f"{waiting} requests are waiting, at most {self.max_queue} may")
        self.waiting.append(sequence)

    def remove(self, sequence: RunningSequence) -> None:
        """Drop a sequence that has ended or was cancelled."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.cache.reserved -= pages_of(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def schedule(self, *, only_started: bool = False) -> Work:
        """Plan the next pass. only_started: admit only sequences that have sampled before."""
        work = [(sequence, 1) for sequence in self.running]
        budget, before = self.chunk_tokens, b""
        for sequence in list(self.waiting):
            if only_started and not sequence.tokens:
                continue
            tokens, pages = sequence.all_tokens(), pages_of(sequence)
            if budget <= 0 or len(self.running) >= self.max_batch or pages > self.cache.available:
                break
            if (own := tokens.tobytes()) != before:  # samples of a prompt run it once
                budget -= len(tokens)
                before = own
            self.waiting.remove(sequence)
            self.running.append(sequence)
            self.cache.reserved += pages
            self.prompt_tokens += 0 if sequence.tokens else len(tokens)
            work.append((sequence, len(tokens)))
        return work

    def preempt_all(self) -> None:
        """Put every running sequence back into the queue with its tokens."""
        self.preemptions += len(self.running)
        for sequence in self.running:
            sequence.num_cached = 0
            self.cache.reserved -= pages_of(sequence)
            if not sequence.tokens:  # its prompt runs again, perhaps with other weights
                sequence.prompt_scores.clear()
        self.waiting = sorted([*self.running, *self.waiting], key=lambda one: one.arrival)
        self.running = []


def pages_of(sequence: RunningSequence) -> int:
    """Count the pages of the longest that a sequence may become."""
    request = sequence.request
    return -(-(len(request.prompt) + request.params.max_new_tokens) // PAGE)
