"""Decode one step ahead of the host, so that a GPU never waits for it.

    Engine.step n:    take: step n runs since Engine.step n - 1; which of the schedule does it have?
                        |
                      the plain pass of what it has not: prompts, other ways to sample
                        |
                      launch: step n + 1, fed with tokens that the host has not seen yet; then it
                      waits for step n, whose tokens are recorded, and sequences end

Engine, scheduler and cache are at every moment as without it: a step in flight is a guess at what
the next one has to run, and a result counts only if the schedule asks for it. The guess for a
sequence that ended, was cancelled, preempted or given another page is dropped. It has written one
key behind the filled part of its own page, or into a free page; whoever gets that place later
writes it first.
"""

from collections.abc import Collection, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tandem.engine.decode import DecodeStep
from tandem.engine.graphs import HostCopy, NewCapture, cuda_capture, upload
from tandem.engine.page_cache import PageCache
from tandem.engine.sampler import SampledTokens, sampling_key
from tandem.engine.scheduler import Rows, RunningSequence, Work, with_pages
from tandem.model.load import ExactModel
from tandem.model.paged_attention import PAGE, Runs, padded_tables

Sampled = tuple[list[RunningSequence], SampledTokens]  # sequences and their next tokens


class DecodeInputs(Rows):
    """The rows of a decode step.

    ahead: tokens of each sequence that the host has yet to see. All int64 [n]: positions, of the
    step's inputs; limits, RunningSequence.limit; draws and keys, of the next tokens. table int64
    [n, M]: the page tables, with the pages that take the keys of the inputs. new: the rows whose
    inputs begin a page. places: each sequence's row.
    """

    columns = "positions", "limits", "draws", "keys"

    def __init__(self, sequences: list[RunningSequence], ahead: int):
        self.sequences = sequences
        self.places = {sequence: n for n, sequence in enumerate(sequences)}
        self.new: list[int] = []
        # these very lists: a sequence that comes back has another
        self.tables = [sequence.page_table for sequence in sequences]
        positions = [s.length - 1 for s in sequences]
        draws = [s.request.num_sampled + len(s.tokens) for s in sequences]
        columns = positions, [s.limit() for s in sequences], draws
        self.positions, self.limits, self.draws = np.array(columns, np.int64)
        self.keys = np.array([s.request.key for s in sequences], np.uint64).view(np.int64)
        self.table = padded_tables(self.tables)
        self.positions += ahead
        self.draws += ahead

    def going(self, rows: list[int]) -> list[int]:
        """List those of the rows whose next token, whichever that is, is not their last."""
        going = self.positions + 2 < self.limits
        return rows if going.all() else [n for n in rows if going[n]]

    def held(self) -> list[int]:
        """List the rows whose sequences still hold their pages, new ones as they were foreseen."""
        foreseen = self.table[self.new, self.positions[self.new] // PAGE].tolist()
        pages = zip(self.new, foreseen, strict=True)
        other = {n for n, page in pages if self.tables[n][-1] != page}
        pairs = enumerate(zip(self.sequences, self.tables, strict=True))
        return [n for n, (s, table) in pairs if s.page_table is table and n not in other]

    def advance(self, kept: list[int]) -> None:
        """Make them the rows of the next step, of those kept, without its new pages."""
        if len(kept) < len(self.sequences):
            self.select(kept)
        self.positions += 1
        self.draws += 1

    def add(self, joined: "DecodeInputs") -> list[int]:
        """Add rows; return the new order of all: those that share pages stand beside each other."""
        self.append(joined)
        self.tables = self.tables + joined.tables
        order = sorted(range(len(self.tables)), key=lambda n: self.tables[n])
        self.select(order)
        return order

    def select(self, order: Sequence[int]) -> None:
        super().select(order)
        self.places = {sequence: n for n, sequence in enumerate(self.sequences)}
        self.tables = [self.tables[n] for n in order]

    def add_pages(self, cache: PageCache) -> bool:
        """Add the pages of inputs that begin one; tell whether all are known: a page is the one
        that the scheduler will allocate if nothing else happens."""
        self.new = np.flatnonzero(self.positions % PAGE == 0).tolist()
        self.new.sort(key=lambda n: self.sequences[n].arrival)  # the scheduler's order
        free = cache.next_free(len(self.new))
        if len(free) < len(self.new):
            return False
        if self.new:
            # the page before may have given way to an equal one
            pages = [self.tables[n][-1] for n in self.new], free
            self.table = with_pages(self.table, self.new, self.positions[self.new] // PAGE, pages)
        return True


class Lookahead:
    """The decode step in flight and its rows."""

    def __init__(
        self, model: ExactModel, cache: PageCache, max_batch: int, capture: NewCapture | None
    ):
        self.cache = cache
        self._step = DecodeStep(model, cache, max_batch, capture)
        self._rows: DecodeInputs | None = None
        self._copy: HostCopy | None = None
        self._taken: dict[RunningSequence, int] = {}

    def renew(self) -> None:
        """Drop the step in flight: the weights have changed."""
        self._rows = None
        graphs = self._step.graphs
        kept = all(pack.kept for pack in self._step.model.packs())
        (graphs.renew if kept else graphs.clear)()

    def clear(self) -> None:
        """Drop the step in flight and every captured one."""
        self._rows = None
        self._step.graphs.clear()

    def take(self, work: Work) -> Collection[RunningSequence]:
        """Return the sequences of the schedule that the step in flight runs. If it has none, and
        one step can run the whole schedule, run that."""
        self._taken, rows = {}, self._rows
        if rows is not None:
            held = rows.held()
            whole = len(held) == len(rows.sequences)
            self._taken = rows.places if whole else {rows.sequences[n]: n for n in held}
        one_each = not self._taken and work.ends and (work.counts == 1).all()
        if one_each and _alike(work.sequences):
            rows = DecodeInputs(work.sequences, 0)
            self._taken = rows.places
            self._start(rows, upload(work.tokens, self._step.tokens.device))
        return self._taken

    def launch(self, plain: list[Sampled]) -> list[Sampled]:
        """Start the next step for the sequences that get a token now, taken or in the plain pass,
        unless that is their last by its number; then wait for the results of those taken.

        None is started if they are sampled in different ways, or if pages are needed that are not
        free.
        """
        taken, copy = self._taken, self._copy
        rows, self._rows = self._rows or DecodeInputs([], 1), None
        before, sources = rows.sequences, rows.going(list(taken.values()))
        sampled = enumerate((s for members, _ in plain for s in members), len(before))
        joined = {s: source for source, s in sampled if s.length + 1 < s.limit()}
        rows.advance(sources)
        alike = not joined or _alike([*joined, *rows.sequences[:1]])
        if joined:
            sources += joined.values()
            sources = [sources[n] for n in rows.add(DecodeInputs(list(joined), 1))]
        if sources and alike and rows.add_pages(self.cache):
            tokens = None
            if joined or rows.sequences != before:
                own = self._step.tokens[: len(before)]
                known = torch.cat([own, *(results.tokens for _, results in plain)])
                tokens = known[upload(np.array(sources), known.device)]
            self._start(rows, tokens)
        if not taken or copy is None:
            return []
        tokens, logprobs = copy.wait()
        if len(taken) < len(tokens):
            at = torch.tensor([*taken.values()])
            tokens, logprobs = tokens[at], logprobs[at]
        no_top = tokens.new_empty(len(tokens), 0)
        return [(list(taken), SampledTokens(tokens, logprobs, no_top, no_top))]

    def _start(self, rows: DecodeInputs, tokens: Tensor | None) -> None:
        """Run a step for the rows. tokens: its input int64 [n] on the device, or None for the rows
        of the step before, which left everything but new pages in place."""
        if tokens is not None:
            runs = Runs(rows.table, rows.positions, np.ones_like(rows.positions))
            self._step.load(tokens, runs, rows.draws, rows.keys)
            self._step.share(runs)
        elif rows.new:
            self._step.load_tables(rows.table)
        self._rows = rows
        longest, sampling = int(rows.positions.max()) + 1, rows.sequences[0].request.params
        self._copy = self._step.run(len(rows.sequences), longest, sampling)


def lookahead_for(model: ExactModel, cache: PageCache, max_batch: int) -> Lookahead:
    """Make the Lookahead of a model. Experts are not captured: their batches have sizes that the
    host must know."""
    experts = any(layer.sparse for layer in model.module.model.layers)
    captured = model.device.type == "cuda" and not experts
    capture = partial(cuda_capture, model.device) if captured else None
    return Lookahead(model, cache, max_batch, capture)


def _alike(sequences: list[RunningSequence]) -> bool:
    """Tell whether one step can sample for all, without the tokens that they have seen."""
    if any(s.masked for s in sequences):
        return False
    if len({sampling_key(s.request.params) for s in sequences}) != 1:
        return False
    params = sequences[0].request.params
    return params.repetition_penalty == 1.0 and not params.top_logprobs
