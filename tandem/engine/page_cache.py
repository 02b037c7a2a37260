"""The key/value cache: pages of 128 tokens, shared by reference, found again by their tokens,
within a byte budget.

A page is known by its past and its tokens: the past is a digest of all tokens before it. That
answers: which pages already hold the beginning of this sequence? Full pages are shared as they are;
of a partly equal page the equal part is copied, because its owner goes on writing there. Equal
pages may exist twice, when two sequences computed them at once; either serves.

    free --take--> in use (counted by the sequences that hold it) --release--> cached --take, least recent first--> in use
                                                                         +-----match--------------------------------^

The cache holds one weight version: `flush` empties it when the weights change. It does not know
requests.
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.model.load import ExactModel, head_size
from tandem.model.paged_attention import PAGE
from tandem.runtime.errors import UserError

BEGINNING = b""  # the past of a first page


@dataclass(frozen=True, kw_only=True)
class Match:
    """What the cache holds of a sequence: `pages` in full, then `tail_length` tokens of page
    `tail`."""

    pages: list[int]
    tail: int
    tail_length: int
    coming: int  # length it will hold when those who run now have computed their prompts

    @property
    def length(self) -> int:
        return len(self.pages) * PAGE + self.tail_length


def page_bytes(config: Any, element_size: int = 4) -> int:
    """The bytes of a page, of the model of a transformers config."""
    return int(
        config.num_hidden_layers
        * 2
        * config.num_key_value_heads
        * head_size(config)
        * element_size
        * PAGE
    )


class PageCache:
    """As many pages as the budget in bytes holds, of the weights' type; raises UserError when it
    holds none.

    keys and values: [layers, pages, K, PAGE, E].
    """

    def __init__(self, model: ExactModel, budget: int):
        layers, (_, kv_heads, size), weight = (
            int(model.config.num_hidden_layers),
            model.heads,
            model.head.weight,
        )
        self.page_bytes = page_bytes(model.config, weight.element_size())
        count = budget // self.page_bytes
        if not count:
            raise UserError(
                "the key/value cache cannot hold one page",
                where="rollout.cache_mb",
                found=f"{budget / 2**20:.1f} MiB",
                next="raise rollout.cache_mb",
                expected=f"at least {-(-self.page_bytes >> 20)} MiB for {PAGE} tokens of this model",
            )
        # zeros, not empty: masked keys are multiplied by probability 0, which must not meet a NaN
        self._keys, self._values = _zeros((2, layers, count, kv_heads, PAGE, size), weight)
        self.keys, self.values = self._keys.unbind(), self._values.unbind()
        self.count = count
        self.holders = np.zeros(count, np.int64)  # sequences that hold the page
        self._tokens = np.zeros((count, PAGE), np.int64)
        self._filled = np.zeros(count, np.int64)  # tokens whose keys and values are there
        self._planned = np.zeros(count, np.int64)  # tokens that are known to come; at least filled
        self._past = [BEGINNING] * count
        # a clock's time when it was last held; later pages of a sequence first
        self._used = np.zeros(count, np.int64)
        self._clock = 0
        self._free = list(range(count - 1, -1, -1))
        # the pages that follow a past, and those that end at one: full pages, planned or filled
        self._after: dict[bytes, set[int]] = defaultdict(set)
        self._full: dict[bytes, set[int]] = defaultdict(set)

    # ---- finding

    def match(self, tokens: np.ndarray) -> Match:
        """The longest known beginning of tokens int64 [T], its last token left out: someone must
        compute its logits."""
        limit, past = len(tokens) - 1, BEGINNING
        pages: list[int] = []
        while (at := len(pages) * PAGE) + PAGE <= limit:
            longer = past_after(past, tokens[at : at + PAGE])
            if not (holders := self._full.get(longer)):
                break
            pages.append(max(holders, key=lambda page: (self._filled[page], self.holders[page])))
            past = longer
        tail, held, coming = self._match_tail(tokens[len(pages) * PAGE : limit][:PAGE], past)
        coming += len(pages) * PAGE
        for number, page in enumerate(pages):
            if self._filled[page] < PAGE:  # someone is still at work on this one
                return Match(
                    pages=pages[:number],
                    tail=page,
                    tail_length=int(self._filled[page]),
                    coming=coming,
                )
        return Match(pages=pages, tail=tail, tail_length=held, coming=coming)

    def _match_tail(self, rest: np.ndarray, past: bytes) -> tuple[int, int, int]:
        """(page after the past that holds most of the tokens, how many it holds, how many one will
        hold)"""
        candidates = np.fromiter(self._after.get(past, ()), np.int64)
        if not len(rest) or not len(candidates):
            return 0, 0, 0
        same = self._tokens[candidates, : len(rest)] == rest
        equal = np.where(same.all(1), len(rest), same.argmin(1))
        held = np.minimum(equal, self._filled[candidates])
        best = int(held.argmax())
        return (
            int(candidates[best]),
            int(held[best]),
            int(np.minimum(equal, self._planned[candidates]).max()),
        )

    # ---- holding

    @property
    def available(self) -> int:
        """Pages that can be taken: free ones and cached ones that nobody holds."""
        return self.count - int(np.count_nonzero(self.holders))

    @property
    def cached(self) -> int:
        return self.available - len(self._free)

    def hold(self, pages: Sequence[int]) -> None:
        self.holders[pages] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Give up a sequence's pages; they stay cached until they are needed, as far as they were
        filled."""
        self.holders[pages] -= 1
        self._clock += len(pages)
        self._used[pages] = self._clock - np.arange(len(pages))
        for page in pages:
            if self.holders[page]:
                continue
            if self._planned[page] > self._filled[page]:
                self._forget_full(page)
                self._planned[page] = self._filled[page]
            if not self._filled[page]:
                self._evict(page)

    def take(self, past: bytes) -> int:
        """A page to follow that past, held once. There must be one available."""
        if not self._free:
            cached = np.flatnonzero(self.holders == 0)
            self._evict(int(cached[self._used[cached].argmin()]))
        page = self._free.pop()
        self.holders[page] = 1
        self._past[page] = past
        self._after[past].add(page)
        return page

    def past_of_next(self, page: int) -> bytes:
        """What a full page and all before it are, as the past of the page after it."""
        return past_after(self._past[page], self._tokens[page])

    def plan(self, pages: Sequence[int], tokens: np.ndarray, start: int) -> None:
        """Say which tokens will be written to a sequence's pages from position start on; tokens is
        the whole sequence."""
        for at in range(start // PAGE, -(-len(tokens) // PAGE)):
            page, part = pages[at], tokens[at * PAGE : (at + 1) * PAGE]
            self._tokens[page, : len(part)] = part
            self._planned[page] = len(part)
            if len(part) == PAGE:
                self._full[self.past_of_next(page)].add(page)

    def fill(self, pages: np.ndarray, offsets: np.ndarray, tokens: np.ndarray) -> None:
        """Tokens int64 [T] are now in their pages, at these offsets (ascending within a page)."""
        self._tokens[pages, offsets] = tokens
        self._filled[pages] = offsets + 1
        self._planned[pages] = np.maximum(self._planned[pages], self._filled[pages])
        for page in pages[offsets == PAGE - 1].tolist():
            self._full[self.past_of_next(page)].add(page)

    def copy(self, source: int, target: int, length: int) -> None:
        """The first tokens of a page into another page."""
        for side in (self._keys, self._values):
            side[:, target, :, :length] = side[:, source, :, :length]
        self._tokens[target, :length] = self._tokens[source, :length]
        self._filled[target] = self._planned[target] = length

    def flush(self) -> None:
        """Forget everything: the weights changed. Nobody may hold a page."""
        assert not self.holders.any(), "a page is held across a change of weights"
        self._free = list(range(self.count - 1, -1, -1))
        self._after.clear()
        self._full.clear()
        self._filled[:] = self._planned[:] = 0

    def _evict(self, page: int) -> None:
        self._forget_full(page)
        _discard(self._after, self._past[page], page)
        self._filled[page] = self._planned[page] = 0
        self._free.append(page)

    def _forget_full(self, page: int) -> None:
        if self._planned[page] == PAGE:
            _discard(self._full, self.past_of_next(page), page)


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Of the type and on the device of like; on a CPU, memory that is only taken when it is first
    written."""
    if like.is_cuda:
        return like.new_zeros(shape, requires_grad=False)
    raw = torch.from_numpy(np.zeros(math.prod(shape) * like.element_size(), np.uint8))
    return raw.view(like.dtype).view(shape)


def past_after(past: bytes, tokens: np.ndarray) -> bytes:
    """The digest of a past and one more full page of tokens int64 [PAGE]."""
    return hashlib.blake2b(past + tokens.tobytes(), digest_size=16).digest()


def _discard(index: dict[bytes, set[int]], key: bytes, page: int) -> None:
    index[key].discard(page)
    if not index[key]:
        del index[key]
