"""A decode step over static buffers: tokens in, the next tokens out, into the same buffers.

    tokens, positions --> hidden, head --> sample with uniforms of keys, draws
        ^                                                 |
        +------- next tokens, positions + 1, draws + 1 ---+--> logprobs

So a step needs nothing from the host as long as the rows stay who they are and where their pages
are. It runs on the GPU as one CUDA graph for each size of a ladder, and on the CPU as the same
function. Knows no request; `lookahead.py` says which rows there are and when.
"""

import numpy as np
import torch
from torch import Tensor

from tandem.engine.graphs import HostCopy, NewCapture, StepGraphs, upload
from tandem.engine.page_cache import PageCache
from tandem.engine.sampler import device_uniforms, sample, sampling_key
from tandem.model.expert_choices import RecordedExperts
from tandem.model.linear import PackedWeight
from tandem.model.load import ExactModel
from tandem.model.paged_attention import PAGE, DecodeRows, Runs
from tandem.model.rope import positions_of
from tandem.types import SamplingParams

SHORTEST = 512  # least max_length of a step: one split of the Triton kernel


class DecodeStep:
    """The buffers of at most `max_rows` sequences, and the step over them.

    The first of B rows are live, the others padding (count 0).
    """

    def __init__(
        self, model: ExactModel, cache: PageCache, max_rows: int, new_capture: NewCapture | None
    ):
        self.model, self.cache = model, cache
        self.graphs = StepGraphs(new_capture)
        self._places: tuple[int, int] = 0, 0  # where the captured steps find packs and cache
        longest = min(positions_of(model.config), cache.count * PAGE)
        rows, pages = padded_batch(max_rows), -(-longest // PAGE)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=model.device)

        self.tables, self.counts = (zeros(*s, dtype=torch.int32) for s in ((rows, pages), (rows,)))
        # positions of the tokens, and the numbers of the draws of the next ones
        self.tokens, self.positions, self.draws = (zeros(rows) for _ in range(3))
        self.keys = zeros(rows)  # of the draws, uint64 read as int64
        self.logprobs = zeros(rows, dtype=torch.float32)
        # what the live rows read together, as `shared_tiles`, if they share anything
        self.tiles = zeros(4, -(-longest // SHORTEST), rows, dtype=torch.int32)
        self.sharing = False

    def load(self, tokens: Tensor, runs: Runs, draws: np.ndarray, keys: np.ndarray) -> None:
        """Set the live rows: tokens int64 [n] on the device, runs of one token each; number and key
        of each draw, int64 [n]."""
        live, padded = len(tokens), padded_batch(len(tokens))
        buffers = self.counts, self.positions, self.draws, self.keys
        columns = np.zeros((len(buffers), padded), np.int64)
        columns[:, :live] = runs.counts, runs.positions, draws, keys
        for buffer, column in zip(buffers, upload(columns, self.model.device), strict=True):
            buffer[:padded].copy_(column)
        self.tokens[:live].copy_(tokens)
        self.load_tables(runs.table)

    def load_tables(self, table: np.ndarray) -> None:
        """Set the page tables of the live rows, int64 [n, M]."""
        pages = upload(table.astype(np.int32), self.model.device)
        self.tables[: len(table), : table.shape[1]].copy_(pages)

    def share(self, runs: Runs) -> None:
        """Plan what the live rows read together. It stays right while they get new pages."""
        tiles = self.model.kernels.shared_tiles(runs, self.model.heads[0], self.cache.keys[0])
        self.sharing = tiles is not None
        if tiles is not None:
            self.tiles.zero_()  # no tile
            self.tiles[:, : tiles.shape[1], : tiles.shape[2]].copy_(
                upload(tiles, self.tiles.device)
            )

    def run(self, live: int, longest: int, sampling: SamplingParams) -> HostCopy:
        """Run the step for the live rows, all at positions below `longest`; return their next
        tokens int64 [n] and log-probs float32 [n]."""
        rows, max_length = padded_batch(live), max(SHORTEST, 1 << (longest - 1).bit_length())
        places = PackedWeight.moves, self.cache.allocations
        if self._places != places:
            self.graphs.clear()
            self._places = places
        adapted = self.model.changes() % 2 == 0
        self.graphs.run(
            (rows, max_length, self.sharing, sampling_key(sampling), adapted),
            lambda: self._step(rows, max_length, sampling, live),
        )
        return HostCopy(self.tokens[:live], self.logprobs[:live])

    def _step(self, rows: int, max_length: int, sampling: SamplingParams, live: int) -> None:
        tokens, positions, draws = self.tokens[:rows], self.positions[:rows], self.draws[:rows]
        counts, tables = self.counts[:rows], self.tables[:rows]
        places = DecodeRows(
            tables=tables,
            counts=counts,
            positions=positions,
            max_length=max_length,
            tiles=self.tiles[:, : max_length // SHORTEST, :rows] if self.sharing else None,
        )
        kernels, (heads, *_) = self.model.kernels, self.model.heads
        plan = kernels.decode_plan(self.cache.keys, self.cache.values, places, heads)
        choices = None
        if (experts := self.cache.experts) is not None:
            # such a model is not captured, so `live` may differ from step to step
            slots = places.slots()[:live]
            choices = RecordedExperts(experts, slots // PAGE, slots % PAGE)
        logits = self.model.head(self.model.hidden(tokens, positions, plan, choices))
        sampled = sample(logits, sampling, device_uniforms(self.keys[:rows], draws))
        tokens.copy_(sampled.tokens)
        self.logprobs[:rows].copy_(sampled.logprobs)
        positions.add_(counts)
        draws.add_(counts)


def padded_batch(rows: int) -> int:
    """Round up to the ladder of batch sizes: 1, 2, 4, 8, then by 8 up to 128, by 16 up to 256 and
    so on."""
    power = 1 << (rows - 1).bit_length()
    return power if rows <= 8 else rows + -rows % max(8, power // 16)
