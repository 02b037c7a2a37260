"""The engine of models that cannot be exact: transformers' own cache, in batches of one length.

    schedule: a new prompt         runs alone, in one pass; what transformers keeps of it is
                                   repeated for the samples, ROWS in a batch
              running sequences    one token for each batch, in a pass of its own

No padding is needed so, and any state that transformers keeps of a sequence will do. Every pass has
the same number of rows, those of sequences that have ended among them, because transformers'
operators may have other bits for another number. So a completion depends on its request and the
weights only, as engine.py's do, whose `step`, sampling, ends and checks these are. An exception are
operators on rows whose width is no multiple of 4: torch computes their last numbers in another way.
Log-probs differ from the trainer's by rounding. Nothing is reused from turn to turn, and a
paused or preempted sequence is computed again.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from tandem.engine.engine import Engine
from tandem.engine.page_cache import page_bytes
from tandem.engine.scheduler import Queue, RunningSequence, Work
from tandem.model.inexact import InexactModel, SequenceStates
from tandem.model.paged_attention import PAGE
from tandem.types import Array

ROWS = 8  # of every pass of running sequences


class InexactEngine(Engine):
    """Generator of completions with an InexactModel, as Engine."""

    model: InexactModel

    def _open_cache(self, cache_bytes: int, record_experts: bool, **sizes: int) -> None:
        assert not record_experts, "refused by jobs/models.py"
        self.cache = ReservedPages(self.model, cache_bytes)  # type: ignore[assignment]
        self.scheduler = BatchScheduler(self.cache, **sizes)  # type: ignore[assignment]
        self.lookahead = None
        self._batches: list[Batch] = []

    def _forward(
        self, work: Work, taken: Collection[RunningSequence]
    ) -> tuple[list[RunningSequence], Tensor | None]:
        ready = work.sequences
        running = set(ready)
        self._batches = [batch for batch in self._batches if batch.keep(running)]
        passes = [(batch, batch.extend()) for batch in self._batches]
        by_tokens = defaultdict(list)
        for sequence in ready:
            if not sequence.num_cached:
                by_tokens[sequence.all_tokens().tobytes()].append(sequence)
        for members in by_tokens.values():
            passes += self._begin(members)
        self._batches = [batch for batch, _ in passes]
        states: dict[RunningSequence, Tensor] = {}
        for batch, hidden in passes:
            own = zip(batch.members, hidden, strict=True)
            states |= {sequence: state for sequence, state in own if sequence is not None}
        work.advance()
        for sequence in ready:
            sequence.num_cached = sequence.length
        return ready, self.model.head(torch.stack([states[sequence] for sequence in ready]))

    def _begin(self, members: list[RunningSequence]) -> "list[tuple[Batch, Tensor]]":
        """Run all tokens of sequences that have the same; return their batches, and the last hidden
        states [ROWS, D] of each."""
        states, tokens = SequenceStates(self.model), torch.from_numpy(members[0].all_tokens())
        [hidden] = states.extend(tokens[None])
        for sequence in members:
            self._score_prompts([(sequence, len(tokens))], hidden)
        parts = [members[first : first + ROWS] for first in range(0, len(members), ROWS)]
        return [(Batch(part, states.repeated(ROWS)), hidden[-1].expand(ROWS, -1)) for part in parts]


class Batch:
    """At most ROWS sequences of one length, and what transformers keeps of ROWS of them."""

    def __init__(self, members: Sequence[RunningSequence], states: SequenceStates):
        self.members: list[RunningSequence | None] = [*members, *[None] * (ROWS - len(members))]
        self._newest, self._states = [0] * ROWS, states

    def keep(self, running: set[RunningSequence]) -> bool:
        """Forget the sequences that no longer run; tell whether one is left. One that was preempted
        begins again, in another batch."""
        self.members = [s if s in running and s.num_cached else None for s in self.members]
        return any(sequence is not None for sequence in self.members)

    def extend(self) -> Tensor:
        """Run the newest token of each; return the last hidden states [ROWS, D]."""
        for row, sequence in enumerate(self.members):
            if sequence is not None:
                self._newest[row] = sequence.tokens[-1]
        return self._states.extend(torch.tensor(self._newest)[:, None])[:, -1]


class ReservedPages:
    """The budget of the cache in place of a PageCache: a sequence reserves room for all tokens that
    it may get, as attention would need it; states of a fixed size are not counted."""

    keys = "kept by transformers"

    def __init__(self, model: InexactModel, budget: int):
        self.page_bytes = page_bytes(model.config, model.dtype.itemsize)
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


class BatchScheduler(Queue):
    """Scheduler in place of scheduler.Scheduler: first come, first served, within the reserved
    pages. A sequence that runs keeps running; its prompt runs in one pass."""

    cache: ReservedPages

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
            self._admit(sequence, len(tokens))
            self.cache.reserved += pages
            work.append((sequence, len(tokens)))
        return Work(work)

    def _give_up_pages(self, sequence: RunningSequence) -> None:
        self.cache.reserved -= pages_of(sequence)
        sequence.num_cached = 0


def pages_of(sequence: RunningSequence) -> int:
    """Count the pages of the longest that a sequence may become."""
    request = sequence.request
    return -(-(len(request.prompt) + request.params.max_new_tokens) // PAGE)
