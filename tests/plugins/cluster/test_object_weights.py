"""Weights as objects of a store, from the publisher to a worker of a node: without Ray."""

from types import SimpleNamespace

import pytest
import torch

from tandem.plugins.cluster.object_weights import ObjectWeights
from tandem.weights.hashing import tensor_digest
from tests.support.objects import Host, Store

TENSORS = {"embed": torch.randn(7, 3), "norm": torch.ones(5).bfloat16(), "up": torch.randn(4, 6)}
WHOLE = 4 * 21 + 2 * 5 + 4 * 24  # bytes


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def weights(store):
    opened = ObjectWeights(TENSORS, True, put=store.put, get=store.get)
    yield opened
    opened.close()


def worker(store, version, node="a"):
    return SimpleNamespace(version=version, host=Host(store, node))


def offered(weights, version, target):
    [(message, descriptor)] = weights.offer(version, [target])
    assert message["transport"] == "ray" and descriptor == -1
    return message


def received(weights, version, target, message=None):
    """The tensors that a worker loads of an offer."""
    receive = target.host._receiver(weights.layout)
    return receive(message or offered(weights, version, target), None)


def same(found, expected):
    return {n: tensor_digest(t) for n, t in found.items()} == {
        n: tensor_digest(t) for n, t in expected.items()
    }


def test_a_worker_without_weights_gets_all_of_them(store, weights):
    weights.publish(0, TENSORS)
    assert same(received(weights, 0, worker(store, -1)), TENSORS)
    assert weights.sent_bytes == WHOLE


def test_the_object_of_a_delta_has_the_changed_tensors_alone(store, weights):
    changed = {**TENSORS, "norm": torch.zeros(5).bfloat16()}
    weights.publish(0, TENSORS)
    weights.publish(1, changed)
    assert same(received(weights, 1, worker(store, 0)), {"norm": changed["norm"]})
    assert store.objects[-1].nbytes == weights.layout.only(["norm"]).size == 64
    assert weights.sent_bytes == 2 * 5
    weights.publish(2, changed)
    assert received(weights, 2, worker(store, 1)) == {} and weights.sent_bytes == 2 * 5


def test_workers_of_a_node_share_an_object_and_its_bytes_are_counted_once(store, weights):
    weights.publish(0, TENSORS)
    weights.offer(0, [worker(store, -1, node) for node in "aabab"])
    assert weights.sent_bytes == 2 * WHOLE and len(store.objects) == 1


def test_a_worker_that_is_offered_a_version_twice_reads_each_offer(store, weights):
    new, target = {**TENSORS, "up": torch.zeros(4, 6)}, worker(store, 0)
    weights.publish(0, TENSORS)
    weights.publish(1, new)
    first = offered(weights, 1, target)
    target.version = -1
    second = offered(weights, 1, target)
    assert same(received(weights, 1, target, first), {"up": new["up"]})
    assert same(received(weights, 1, target, second), new)
