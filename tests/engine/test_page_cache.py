"""The page cache: what is found again, what is shared, copied, evicted, and that nothing is lost
count of."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from tandem.config.schema import Config
from tandem.engine.page_cache import EMPTY_PREFIX, PageCache, hash_page
from tandem.jobs.engines import prepare_process
from tandem.model.paged_attention import PAGE
from tests.support.tiny import exact_model

MODEL = exact_model("qwen3")
SIZE = PageCache(MODEL, 1 << 24).page_bytes


def cache_of(pages):
    return PageCache(MODEL, pages * SIZE)


def tokens(count, seed=0):
    return np.random.default_rng(seed).integers(0, 90, count).astype(np.int64)


def write(cache, sequence, shared=()):
    """Fill pages for a sequence behind the shared ones, as if it had run; return all its pages."""
    pages = list(shared)
    while (start := len(pages) * PAGE) < len(sequence):
        pages.append(cache.allocate(cache.next_prefix_hash(pages[-1]) if pages else EMPTY_PREFIX))
        cache.reserve(pages, sequence[: start + PAGE], start)
    at = np.arange(len(shared) * PAGE, len(sequence))
    places, offsets = np.array(pages)[at // PAGE], at % PAGE
    cache.fill(places, offsets, sequence[at])
    for page, offset, token in zip(places, offsets, sequence[at].tolist(), strict=True):
        cache.keys[0][page, :, offset] = token
        cache.values[0][page, :, offset] = -token
    return pages


def test_the_bytes_are_those_of_the_arithmetic():
    cache = cache_of(7)
    layers, (_, kv_heads, size) = MODEL.config.num_hidden_layers, MODEL.heads
    assert cache.page_bytes == layers * 2 * kv_heads * size * 4 * 128
    assert sum(t.numel() * 4 for t in (*cache.keys, *cache.values)) == 7 * cache.page_bytes
    assert PageCache(MODEL, 8 * SIZE - 1).count == 7


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_cache_takes_the_memory_of_written_pages_alone_after_another_one_too():
    """By the settings of a job malloc keeps what is freed, and would write zeros into all of it."""
    prepare_process(Config())
    before, size = resident(), 256 << 20
    for _ in range(2):
        cache = PageCache(MODEL, size)
        assert not any(layer.any() for layer in cache.keys[0][:2])
        write(cache, tokens(2 * PAGE))
        del cache
        assert resident() < before + size // 4


def resident():
    """Bytes in memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_sequence_is_found_again_but_for_its_last_token():
    cache, sequence = cache_of(4), tokens(300)
    pages = write(cache, sequence)
    match = cache.match(sequence)
    assert (match.pages, match.tail) == (pages[:2], pages[2])
    assert (match.tail_length, match.length) == (43, 299)
    assert cache.match(sequence[:129]).pages == pages[:1]
    longer = np.concatenate([sequence, tokens(200, 1)])
    assert [cache.match(longer[:count]).length for count in (500, 128, 1)] == [300, 127, 0]


def test_the_first_different_token_ends_a_match():
    sequence = tokens(300)
    for at in (0, 1, 127, 128, 200):
        cache, other = cache_of(8), sequence.copy()
        write(cache, sequence)
        other[at] += 1
        assert cache.match(other).length == at
        write(cache, other)  # and a second sequence beside it is told apart
        assert cache.match(other).length == 299


def test_copies_of_pages_have_their_keys_values_and_tokens():
    cache, sequence, another = cache_of(4), tokens(100), tokens(100, 1)
    [page], [other] = write(cache, sequence), write(cache, another)
    first, target = cache.allocate(EMPTY_PREFIX), cache.allocate(EMPTY_PREFIX)
    cache.copy(page, first, 50)
    cache.copy(first, target, 40)  # of a page that is itself copied by the same call
    cache.release([page])
    assert cache.allocate(EMPTY_PREFIX) == page
    cache.copy(other, page, 30)  # into the first one's source, which was evicted
    cache.make_copies()
    for copied, held in (first, sequence[:50]), (target, sequence[:40]), (page, another[:30]):
        assert cache._tokens[copied, : cache._filled[copied]].tolist() == held.tolist()
        assert cache.keys[0][copied, 0, : len(held), 0].tolist() == held.tolist()
        assert cache.values[0][copied, 0, : len(held), 0].tolist() == (-held).tolist()


def test_released_pages_are_evicted_oldest_leaf_first():
    cache, old, new = cache_of(4), tokens(200), tokens(200, 1)
    first, second = write(cache, old), write(cache, new)
    cache.release(first)
    cache.release(second)
    assert (cache.available, cache.cached) == (4, 4)
    cache.allocate(EMPTY_PREFIX)
    assert cache.match(old).length == 128 and cache.match(new).length == 199  # the older leaf went
    cache.allocate(EMPTY_PREFIX)
    assert cache.match(old).length == 0 and cache.match(new).length == 199
    assert (cache.available, cache.cached) == (2, 2)


def test_reserved_tokens_are_forgotten_if_never_computed():
    cache, sequence = cache_of(3), tokens(300)
    pages, prefix_hash = [], EMPTY_PREFIX
    for at in range(0, 300, PAGE):
        pages.append(cache.allocate(prefix_hash))
        prefix_hash = hash_page(prefix_hash, sequence[at : at + PAGE])
    cache.reserve(pages, sequence, 0)
    found = [cache.match(sequence)]
    at = np.arange(150)
    cache.fill(np.array(pages)[at // PAGE], at % PAGE, sequence[at])
    found.append(cache.match(sequence))
    cache.release(pages)
    found.append(cache.match(sequence))
    assert [(one.length, one.will_be_cached) for one in found] == [(0, 299), (150, 299), (150, 150)]
    assert (cache.available, cache.cached) == (3, 2)


def test_what_is_found_is_what_a_look_at_every_page_finds():
    """The samples of a prompt find its page by a hash; the page must be as good as any other."""
    rng = np.random.default_rng(0)
    cache, held, found = cache_of(24), [], 0
    prompts = [tokens(int(rng.integers(2, 300)), seed) for seed in range(6)]
    prompts += [np.concatenate([prompt[:20], tokens(30, 9)]) for prompt in prompts]
    for _ in range(300):
        sequence = prompts[rng.integers(len(prompts))]
        match = cache.match(sequence)
        last, cache._last = cache._last, {}
        plain = cache.match(sequence)
        cache._last = last
        assert (match.pages, match.tail_length) == (plain.pages, plain.tail_length)
        assert match.will_be_cached == plain.will_be_cached
        tail = cache._tokens[match.tail][: match.tail_length]
        assert np.array_equal(tail, sequence[len(match.pages) * PAGE :][: match.tail_length])
        found += match.tail_length > 0 and match.tail_length == plain.tail_length
        if held and (cache.available < 4 or rng.random() < 0.5):
            cache.release(held.pop(rng.integers(len(held))))
        if cache.available >= 4:
            cache.retain(match.pages)
            held.append(write(cache, sequence, match.pages))
    assert found > 100 and len(cache._last) <= cache.count


def test_flush_is_refused_while_a_page_is_held():
    cache, sequence = cache_of(3), tokens(300)
    pages = write(cache, sequence)
    with pytest.raises(AssertionError, match="held across a change of weights"):
        cache.flush()
    cache.release(pages)
    cache.flush()
    assert cache.match(sequence).length == 0 and (cache.available, cache.cached) == (3, 0)
    assert write(cache, sequence) == pages


def test_a_page_filled_twice_is_held_once():
    cache, sequence = cache_of(4), tokens(PAGE)
    [kept], [page] = write(cache, sequence), write(cache, sequence)
    assert cache.merge(page) == kept and cache.ref_count[[kept, page]].tolist() == [2, 0]
    assert (cache.available, cache.cached) == (3, 0)
    assert cache.match(np.append(sequence, 1)).pages == [kept]
    assert cache.merge(kept) == kept  # no other is left
    cache.release([kept])
    assert cache.available == 3
    cache.release([kept])
    assert (cache.available, cache.cached) == (4, 1)
