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

from collections.abc import Collection
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tandem.engine.decode import DecodeStep
from tandem.engine.graphs import HostCopy, NewCapture, cuda_capture, upload
from tandem.engine.page_cache import PageCache
from tandem.engine.sampler import SampledTokens, sampling_key
from tandem.engine.scheduler import RunningSequence, Work
from tandem.model.load import ExactModel
from tandem.model.paged_attention import PAGE, Runs

Sampled = tuple[list[RunningSequence], SampledTokens]  # sequences and their next tokens


class Row(NamedTuple):
    """The place of a sequence in a decode step."""

    sequence: RunningSequence
    sampled: int  # tokens it has sampled, the step's input included
    table: list[int]  # its page table, this very list: a sequence that comes back has another
    page: int  # takes the key of the input

    @property
    def position(self) -> int:
        """Position of the step's input."""
        return len(self.sequence.request.prompt) + self.sampled - 1

    @property
    def place(self) -> tuple[int, int]:
        """Page of the key, and its number in the sequence: one that a sequence gives up, as an
        equal one is there, may come back at once as its next."""
        return self.page, self.position // PAGE

    def is_next(self) -> bool:
        """Tell, after `schedule`, whether the sequence has just this to run: it still holds its
        pages, and the page of the key is the one that was foreseen."""
        held = self.table is self.sequence.page_table
        return held and self.page == self.table[self.position // PAGE]


class Lookahead:
    """The decode step in flight and its rows."""

    def __init__(
        self, model: ExactModel, cache: PageCache, max_batch: int, capture: NewCapture | None
    ):
        self.cache = cache
        self._step = DecodeStep(model, cache, max_batch, capture)
        self._rows: list[Row] = []
        self._copy: HostCopy | None = None
        self._taken: dict[RunningSequence, int] = {}

    def clear(self) -> None:
        """Drop the step in flight and every captured one: the weights have changed."""
        self._rows = []
        self._step.graphs.clear()

    def take(self, work: Work) -> Collection[RunningSequence]:
        """Return the sequences of the schedule that the step in flight runs. If it has none, and
        one step can run the whole schedule, run that."""
        self._taken = {row.sequence: n for n, row in enumerate(self._rows) if row.is_next()}
        sequences = [] if self._taken else [sequence for sequence, _ in work]
        one_each = all(s.length - s.num_cached == 1 for s in sequences)
        if sequences and one_each and _alike(sequences):
            tokens = np.array([s.next_tokens(1) for s in sequences])[:, 0]
            self._taken = {sequence: n for n, sequence in enumerate(sequences)}
            self._start(
                [Row(s, len(s.tokens), s.page_table, s.page_table[-1]) for s in sequences],
                upload(tokens, self._step.tokens.device),
            )
        return self._taken

    def launch(self, plain: list[Sampled]) -> list[Sampled]:
        """Start the next step for the sequences that get a token now, taken or in the plain pass,
        unless that is their last by its number; then wait for the results of those taken.

        None is started if they are sampled in different ways, or if pages are needed that are not
        free.
        """
        taken, before, copy = self._taken, self._rows, self._copy
        self._rows = []
        joined = [sequence for members, _ in plain for sequence in members]
        rows = [*taken.items()]
        rows += [(sequence, len(before) + number) for number, sequence in enumerate(joined)]
        rows = [(sequence, source) for sequence, source in rows if not _is_last(sequence)]
        if joined:  # sequences that share pages stand beside each other
            rows.sort(key=lambda row: row[0].page_table)
        sequences, sources = [s for s, _ in rows], [source for _, source in rows]
        pages = self._next_pages(sequences)
        if pages and _alike(sequences):
            following = [
                Row(s, len(s.tokens) + 1, s.page_table, page)
                for s, page in zip(sequences, pages, strict=True)
            ]
            tokens, moved = None, [row.place for row in following] != [row.place for row in before]
            if moved or sources != [*range(len(before))]:
                known = [
                    self._step.tokens[: len(before)],
                    *(results.tokens for _, results in plain),
                ]
                tokens = torch.cat(known)[upload(np.array(sources), known[0].device)]
            self._start(following, tokens)
        if not taken or copy is None:
            return []
        tokens, logprobs = (column[list(taken.values())] for column in copy.wait())
        no_top = tokens.new_empty(len(tokens), 0)
        return [(list(taken), SampledTokens(tokens, logprobs, no_top, no_top))]

    def _next_pages(self, sequences: list[RunningSequence]) -> list[int]:
        """List the pages of the next keys; empty if one cannot be known.

        A new page is the one that the scheduler will allocate if nothing else happens.
        """
        without = [s for s in sequences if s.length == len(s.page_table) * PAGE]
        without.sort(key=lambda s: s.arrival)  # the scheduler's order
        free = self.cache.next_free(len(without))
        if len(free) < len(without):
            return []
        new = dict(zip(without, free, strict=True))
        return [new[s] if s in new else s.page_table[s.length // PAGE] for s in sequences]

    def _start(self, rows: list[Row], tokens: Tensor | None) -> None:
        """Run a step for the rows. tokens: its input int64 [n] on the device, or None for the rows
        of the step before, which left everything in place."""
        if tokens is not None:
            positions = np.array([row.position for row in rows])
            tables = [[*row.table[: row.position // PAGE], row.page] for row in rows]
            requests = [row.sequence.request for row in rows]
            draws = [r.num_sampled + row.sampled for r, row in zip(requests, rows, strict=True)]
            keys = np.array([r.key for r in requests], np.uint64).view(np.int64)
            runs = Runs(tables, positions, np.ones(len(rows), np.int64))
            self._step.load(tokens, runs, np.array(draws), keys)
        longest = max(row.position for row in rows) + 1
        self._rows = rows
        self._copy = self._step.run(len(rows), longest, rows[0].sequence.request.params)


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


def _is_last(sequence: RunningSequence) -> bool:
    """Tell whether a sequence ends or pauses with its next token, whichever that is."""
    count = len(sequence.tokens) + 1
    return count >= sequence.request.params.max_new_tokens or count == sequence.pause_at
