"""Differences of weights: exact by elements, and made against the right base."""

from collections import deque

import numpy as np
import pytest
import torch

from tandem.plugins.cluster.object_weights import ObjectWeights
from tandem.weights.delta import BLOCK, decode, encode
from tandem.weights.hashing import combine, tensor_digest, tensor_digests
from tandem.weights.shared import SharedWeights
from tandem.weights.transports import receive_offers
from tests.support.objects import Host, Store

SHAPES = {"embed": (300, 257), "up": (64, 48), "norm": (7,), "scalar": ()}


def tensors(seed=0, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(shape, generator=generator).to(dtype) for n, shape in SHAPES.items()}


def random_bits(dtype, count, seed=0):
    """Every pattern of bits may come: NaNs with any payload, infinities, zeros of both signs."""
    data = np.random.default_rng(seed).bytes(count * dtype.itemsize)
    return torch.frombuffer(bytearray(data), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_few_changed_elements_are_sent_alone_and_exactly(dtype):
    base = random_bits(dtype, 3 * BLOCK + 5)
    new = base.clone()
    places = torch.tensor([0, 1, BLOCK - 1, BLOCK, 3 * BLOCK + 4])
    new[places] = random_bits(dtype, 5, seed=1)
    encoded = encode(base, new)
    assert encoded.dtype == torch.uint8 and encoded.nbytes == 4 * 4 + 5 * (dtype.itemsize + 2)
    assert tensor_digest(decode(base, encoded)) == tensor_digest(new) != tensor_digest(base)


def test_a_zero_of_the_other_sign_and_another_nan_are_changes():
    base = torch.zeros(100).bfloat16()
    base[1] = float("nan")
    new = base.clone()
    new[0], new[1] = -0.0, -new[1]
    assert encode(base, base.clone()) is None
    found = decode(base, encode(base, new))
    assert found.view(torch.int16).tolist() == new.view(torch.int16).tolist()


@pytest.mark.parametrize("shape", [(40, 6), (), (7,)], ids=str)
def test_what_changed_in_most_elements_is_sent_whole(shape):
    base, new = torch.randn(shape), torch.randn(shape)
    assert encode(base, new) is new


def test_a_tensor_of_other_strides_keeps_its_elements():
    base, changed = torch.randn(30, 50).t(), torch.randn(30, 50).t()
    new = torch.where(torch.rand(50, 30) < 0.05, changed, base)
    encoded = encode(base, new)
    assert encoded.nbytes < new.nbytes / 5 and torch.equal(decode(base, encoded), new)


def test_bytes_that_were_overwritten_are_no_difference():
    """Released memory is written again, perhaps while a late worker reads it."""
    base = torch.zeros(BLOCK + 9)
    new = base.clone()
    new[[3, BLOCK + 8]] = 1.0
    encoded = encode(base, new)
    for start, data in ((0, 2), (0, 255), (len(encoded) - 2, 255)):
        torn = encoded.clone()
        torn[start : start + 2] = data
        with pytest.raises(RuntimeError, match="overwritten"):
            decode(base, torn)


class Engine:
    """A worker's end of a transport; `version` is what it runs."""

    def __init__(self, layout, receive, host=None):
        self.tensors, self.version, self.host = layout.staging()[1], -1, host
        self.receive = receive

    def load(self, store, version):
        [(source, descriptor)] = store.offer(version, [self])
        found = self.receive(source, deque([descriptor]))
        if "parts" in source:
            found = {name: decode(self.tensors[name], part) for name, part in found.items()}
        for name, tensor in found.items():
            self.tensors[name].copy_(tensor)
        self.version = version
        return source


def opened(kind, delta, first):
    """A store, and what makes a worker of it."""
    if kind == "shm":
        store = SharedWeights(first, delta)
        return store, lambda: Engine(store.layout, receive_offers(store.layout))
    objects = Store()
    store = ObjectWeights(first, delta, put=objects.put, get=objects.get)

    def engine():
        host = Host(objects, "a")
        return Engine(store.layout, host._receiver(store.layout), host)

    return store, engine


@pytest.mark.parametrize("delta", [True, "elements"])
@pytest.mark.parametrize("kind", ["shm", "objects"])
def test_a_difference_goes_only_to_a_worker_of_its_base(kind, delta):
    weights = tensors()
    store, engine = opened(kind, delta, weights)
    late, steady, sent = engine(), engine(), []
    for version in range(4):
        store.publish(version, weights)
        store.release(below=version)  # as without staleness: the base is gone when it is offered
        for worker in [steady] + [late] * (version != 1):
            before = store.sent_bytes
            source = worker.load(store, version)
            assert combine(tensor_digests(worker.tensors)) == store.hash_of(version)
            sent.append(("parts" in source, store.sent_bytes - before))
        weights = {n: w.clone() for n, w in weights.items()}
        weights["embed"][version, :50] += 1
    parts, whole, embed = delta == "elements", store.layout.tensor_bytes, 2 * 300 * 257
    some = 2 * 4 + 50 * 4 if parts else embed
    assert sent[:4] == [(False, whole), (False, whole), (parts, some), (parts, some)]
    assert sent[4:] == [(False, embed), (parts, some), (parts, some)]
    store.close()


def test_a_worker_that_is_offered_an_object_twice_reads_each_offer():
    old, new = tensors(), {**tensors(), "up": torch.zeros(64, 48).bfloat16()}
    store, engine = opened("objects", True, old)
    store.publish(0, old)
    store.publish(1, new)
    worker = engine()
    worker.load(store, 0)
    [(first, _)] = store.offer(1, [worker])
    worker.version = -1
    [(second, _)] = store.offer(1, [worker])
    assert set(worker.receive(first, None)) == {"up"}
    assert tensor_digests(worker.receive(second, None)) == tensor_digests(new)
    store.publish(2, new)
    worker.version = 1
    [(nothing, _)] = store.offer(2, [worker])
    assert worker.receive(nothing, None) == {}
    store.close()
