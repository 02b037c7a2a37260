"""The key/value cache: pages of 128 tokens within a byte budget, shared by reference and found
again by their tokens.

A page is addressed by its own tokens and its prefix hash, a digest of all tokens before it. Full
pages are shared as they are. Of a partly equal page the equal part is copied, because its owner
goes on writing there. Equal pages may exist twice, when two sequences computed them at once.

    free --allocate--> in use (by ref_count sequences) --release--> cached
                          ^                                            |
                          +-- retain; allocate, least recent first <---+

The cache holds one weight version: `flush` empties it when the weights change. From `give_back` to
`restore` an update on the same device may use its memory. It does not know requests.
"""

import hashlib
import heapq
import math
import mmap
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.model.load import ExactModel
from tandem.model.paged_attention import PAGE, page_numbers, page_tensors
from tandem.runtime.errors import UserError

EMPTY_PREFIX = b""  # the prefix hash of a first page


@dataclass(frozen=True, kw_only=True)
class Match:
    """Cached part of a sequence: `pages` in full, then `tail_length` tokens of page `tail`."""

    pages: list[int]
    tail: int
    tail_length: int
    # tokens it will hold once the running sequences have computed their prompts
    will_be_cached: int

    @property
    def length(self) -> int:
        return len(self.pages) * PAGE + self.tail_length


NO_MATCH = Match(pages=[], tail=0, tail_length=0, will_be_cached=0)


def page_bytes(config: Any, element_size: int = 4) -> int:
    """Return the bytes of a page of a model (transformers config), 1 for one without keys."""
    return max(1, element_size * page_numbers(config.get_text_config()))


class PageCache:
    """Pages of the weights' type, as many as the byte budget holds; raises UserError if it holds
    none.

    keys and values: of each layer [pages, K, PAGE, E], as `page_tensors`. experts: int16 [pages,
    PAGE, layers, k], those of each token, if `record_experts`; not counted in the budget. window:
    last tokens read; None: all.
    """

    def __init__(self, model: ExactModel, budget: int, record_experts: bool = False):
        layers, weight = int(model.config.num_hidden_layers), model.head.weight
        self.page_bytes = page_bytes(model.config, weight.element_size())
        count = budget // self.page_bytes
        if not count:
            raise UserError(
                "the key/value cache cannot hold one page",
                where="rollout.cache_mb",
                found=f"{budget / 2**20:.1f} MiB",
                expected=f"at least {-(-self.page_bytes >> 20)} MiB for {PAGE} tokens",
                next="raise rollout.cache_mb",
            )
        self._config, self._like = model.config, weight
        self.keys: tuple[Tensor, ...] = ()
        self.values: tuple[Tensor, ...] = ()
        self.allocations = 0  # a captured graph that reads the pages is stale once it has grown
        self.count = count
        self.restore()
        self.window = None if record_experts else model.window
        self.experts: Tensor | None = None
        if record_experts:
            each = (layers, model.config.num_experts_per_tok)
            self.experts = torch.zeros(count, PAGE, *each, dtype=torch.int16, device=weight.device)
        self.ref_count = np.zeros(count, np.int64)  # sequences that hold the page
        self._tokens = np.zeros((count, PAGE), np.int64)
        self._filled = np.zeros(count, np.int64)  # tokens whose keys and values are there
        self._reserved = np.zeros(count, np.int64)  # tokens that will be there; at least _filled
        self._prefix_hash = [EMPTY_PREFIX] * count
        # clock time when it was last held; later pages of a sequence first
        self._last_used = np.zeros(count, np.int64)
        self._clock = 0
        # a heap: the lowest is taken first, so that pages in use stay beside each other
        self._free = list(range(count))
        # pages by the hash of the tokens before them; full pages, reserved or filled, by the hash
        # that includes them. Keys of a dict are in order, so that equal pages give way to one page.
        self._following: dict[bytes, dict[int, None]] = defaultdict(dict)
        self._full: dict[bytes, dict[int, None]] = defaultdict(dict)
        # the last page of a sequence as it was admitted, by the hash of the tokens that `match`
        # looks for: the other samples of a prompt find it without a look at every page
        self._last: dict[bytes, int] = {}
        self._last_hash = [b""] * count
        self._copies: dict[int, int] = {}  # source by target page, until `make_copies`

    # ---- memory

    def give_back(self) -> None:
        """Forget every page and give their memory back until `restore`. None may be held."""
        self.flush()
        self.keys, self.values = (), ()
        _empty_allocator(self._like)

    def restore(self) -> None:
        """Take the memory of the pages, if they have none."""
        if self.keys:
            return
        _empty_allocator(self._like)
        # zeros, not empty: masked keys are multiplied by probability 0, which must not meet a NaN
        zeros = partial(_zeros, like=self._like)
        self.keys, self.values = page_tensors(self._config, self.count, zeros)
        self.allocations += 1

    # ---- finding

    def match(self, tokens: np.ndarray) -> Match:
        """Find the longest cached prefix of tokens int64 [T] without the last one, whose logits
        must be computed."""
        limit, prefix_hash = len(tokens) - 1, EMPTY_PREFIX
        pages: list[int] = []
        while (at := len(pages) * PAGE) + PAGE <= limit:
            longer = hash_page(prefix_hash, tokens[at : at + PAGE])
            if not (equal := self._full.get(longer)):
                break
            pages.append(max(equal, key=lambda page: (self._filled[page], self.ref_count[page])))
            prefix_hash = longer
        tail, tail_length, will_be_cached = self._match_tail(tokens[at:limit][:PAGE], prefix_hash)
        will_be_cached += at
        for number, page in enumerate(pages):
            if self._filled[page] < PAGE:  # a running sequence is still computing it
                pages, tail, tail_length = pages[:number], page, int(self._filled[page])
                break
        return Match(pages=pages, tail=tail, tail_length=tail_length, will_be_cached=will_be_cached)

    def _match_tail(self, rest: np.ndarray, prefix_hash: bytes) -> tuple[int, int, int]:
        """Return (page behind the prefix that holds most of the tokens, number it holds, most that
        a page will hold)."""
        if not len(rest) or prefix_hash not in self._following:
            return 0, 0, 0
        page = self._last.get(hash_page(prefix_hash, rest), -1)
        if page >= 0 and self._filled[page] >= len(rest):
            return page, len(rest), len(rest)
        candidates = np.fromiter(self._following[prefix_hash], np.int64)
        same = self._tokens[candidates, : len(rest)] == rest
        equal = np.where(same.all(1), len(rest), same.argmin(1))
        held = np.minimum(equal, self._filled[candidates])
        best = int(held.argmax())
        reserved = np.minimum(equal, self._reserved[candidates])
        return int(candidates[best]), int(held[best]), int(reserved.max())

    # ---- holding

    @property
    def available(self) -> int:
        """Pages that can be allocated: free ones and cached ones that no sequence holds."""
        return self.count - int(np.count_nonzero(self.ref_count))

    @property
    def cached(self) -> int:
        return self.available - len(self._free)

    def retain(self, pages: Sequence[int]) -> None:
        """Hold pages for one more sequence."""
        self.ref_count[pages] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Give up a sequence's pages; filled ones stay cached until the room is needed."""
        self.ref_count[pages] -= 1
        self._clock += len(pages)
        self._last_used[pages] = self._clock - np.arange(len(pages))
        for page in pages:
            if self.ref_count[page]:
                continue
            if self._reserved[page] > self._filled[page]:
                self._forget_full(page)
                self._reserved[page] = self._filled[page]
            if not self._filled[page]:
                self._evict(page)

    def allocate(self, prefix_hash: bytes) -> int:
        """Allocate a page behind that prefix, held once. One must be available."""
        if not self._free:
            cached = np.flatnonzero(self.ref_count == 0)
            self._evict(int(cached[self._last_used[cached].argmin()]))
        page = heapq.heappop(self._free)
        self.ref_count[page] = 1
        self._prefix_hash[page] = prefix_hash
        self._following[prefix_hash][page] = None
        return page

    def next_free(self, count: int) -> list[int]:
        """List the pages that the next allocations take, at most `count`; nothing is cached in
        them. Fewer if cached pages would have to be evicted."""
        pages = [heapq.heappop(self._free) for _ in range(min(count, len(self._free)))]
        for page in pages:
            heapq.heappush(self._free, page)
        return pages

    def next_prefix_hash(self, page: int) -> bytes:
        """Return the prefix hash of the page that follows a full page."""
        return hash_page(self._prefix_hash[page], self._tokens[page])

    def reserve(self, pages: Sequence[int], tokens: np.ndarray, start: int) -> None:
        """Announce the tokens that will fill a sequence's pages from position start on; tokens is
        the whole sequence."""
        for at in range(start // PAGE, -(-len(tokens) // PAGE)):
            page, part = pages[at], tokens[at * PAGE : (at + 1) * PAGE]
            self._tokens[page, : len(part)] = part
            self._reserved[page] = len(part)
            if len(part) == PAGE:
                self._full[self.next_prefix_hash(page)][page] = None
        at = (len(tokens) - 1) // PAGE  # of the page in which `match` ends
        page, part = pages[at], tokens[at * PAGE : -1]
        self._last_hash[page] = hash_page(self._prefix_hash[page], part)
        self._last.setdefault(self._last_hash[page], page)

    def fill(self, pages: np.ndarray, offsets: np.ndarray, tokens: np.ndarray) -> None:
        """Record tokens int64 [T] in their pages, at these offsets (ascending within a page)."""
        self._tokens[pages, offsets] = tokens
        self._filled[pages] = offsets + 1
        self._reserved[pages] = np.maximum(self._reserved[pages], self._filled[pages])
        for page in pages[offsets == PAGE - 1].tolist():
            self._full[self.next_prefix_hash(page)][page] = None

    def experts_of(self, pages: Sequence[int], count: int) -> np.ndarray:
        """Return the experts of the first tokens of a sequence, int16 [count, layers, k]; none if
        they are not recorded."""
        if self.experts is None:
            return np.zeros((0, 0, 0), np.int16)
        at, table = np.arange(count), np.array(pages, np.int64)
        places = torch.from_numpy(table[at // PAGE]), torch.from_numpy(at % PAGE)
        return self.experts[places].cpu().numpy()

    def merge(self, page: int) -> int:
        """Give up a page that has just been filled if another holds the same tokens; return the
        page that its sequence holds from now on."""
        same = self._full[self.next_prefix_hash(page)]
        others = [other for other in same if other != page and self._filled[other] == PAGE]
        if not others or self.ref_count[page] > 1:
            return page
        kept = max(others, key=lambda other: int(self.ref_count[other]))
        self.retain([kept])
        self.ref_count[page] = 0
        self._evict(page)
        return kept

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first tokens of a page into another; keys and values follow in `make_copies`."""
        self._copies[target] = self._copies.get(source, source)
        self._tokens[target, :length] = self._tokens[source, :length]
        self._filled[target] = self._reserved[target] = length

    def make_copies(self) -> None:
        """Copy the keys and values of all calls of `copy` since the last pass. Every source is read
        before a target is written: an evicted source may have become a target."""
        if not self._copies:
            return
        pairs = torch.tensor(list(self._copies.items()), device=self._like.device)
        targets, sources = pairs.unbind(1)
        for layer in (*self.keys, *self.values):
            if len(layer):  # whole pages, as kernels lay one out in their own way
                layer.index_copy_(0, targets, layer.index_select(0, sources))
        if self.experts is not None:
            self.experts[targets] = self.experts[sources]
        self._copies.clear()

    def flush(self) -> None:
        """Forget every page when the weights change. None may be held."""
        assert not self.ref_count.any(), "a page is held across a change of weights"
        self._free = list(range(self.count))
        self._following.clear()
        self._full.clear()
        self._last.clear()
        self._filled[:] = self._reserved[:] = 0

    def _evict(self, page: int) -> None:
        self._forget_full(page)
        _discard(self._following, self._prefix_hash[page], page)
        if self._last.get(self._last_hash[page]) == page:
            del self._last[self._last_hash[page]]
        self._filled[page] = self._reserved[page] = 0
        heapq.heappush(self._free, page)

    def _forget_full(self, page: int) -> None:
        if self._reserved[page] == PAGE:
            _discard(self._full, self.next_prefix_hash(page), page)


def hash_page(prefix_hash: bytes, tokens: np.ndarray) -> bytes:
    """Hash a prefix and one more page of tokens int64 [n]."""
    return hashlib.blake2b(prefix_hash + tokens.tobytes(), digest_size=16).digest()


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Make zeros of like's type and device; on a CPU the memory is taken when it is first written,
    and given back with the tensor. malloc would keep it, and write zeros into all of it for the
    next cache."""
    if like.is_cuda:
        return like.new_zeros(shape, requires_grad=False)
    size, private = math.prod(shape) * like.element_size(), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        memory = mmap.mmap(-1, size, flags=private)
    except OSError as error:
        raise MemoryError(f"{size:,} bytes for the key/value cache: {error.strerror}") from None
    return torch.frombuffer(memory, dtype=like.dtype).view(shape)


def _empty_allocator(like: Tensor) -> None:
    """Return the GPU's free blocks, whose sizes fit the other user of the memory badly."""
    if like.is_cuda:
        torch.cuda.empty_cache()


def _discard(index: dict[bytes, dict[int, None]], key: bytes, page: int) -> None:
    index[key].pop(page, None)
    if not index[key]:
        del index[key]
