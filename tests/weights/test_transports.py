"""Transports of weights: whichever it is, workers run the bytes that were published, all of them or
none.

The workers are real processes under the real pool, with an engine that has weights and no model.
"""

import importlib.util
import os
import signal
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tandem.plugins.cluster.collective import CollectiveWeights
from tandem.registry import find
from tandem.rollout_workers.pool import EngineSpec
from tandem.weights.shared import SharedWeights
from tandem.weights.worker_sync import ProcessSync
from tandem.workers.pool import Limits
from tests.support.waiting import WAIT_S
from tests.support.weight_worker import COMMAND, LOAD_S, FileIpc, on_files, token_of
from tests.support.working import all_idle, open_workers, processes, request, run, until

FAILED_JOIN_S = 10.0  # where a worker does not come; one that comes late is offered them again
TRANSPORTS = [
    "shm",
    "cuda_ipc",
    "collective",
    pytest.param(
        "rdma",
        marks=pytest.mark.skipif(
            importlib.util.find_spec("nixl") is None, reason="NIXL is not installed"
        ),
    ),
]


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(1000, 257, generator=generator),
        "norm": torch.randn(7, generator=generator).bfloat16(),
        "scalar": torch.full((), float("nan")),
        "up": torch.randn(500, 300, generator=generator).t(),
        "down": torch.randn(3_000_000, generator=generator).half(),
    }


def some_changed(weights, draws, share=0.02):
    """The tensors with a share of the elements of each given other bits: NaNs and zeros of both
    signs among them."""
    changed = {}
    for name, weight in weights.items():
        new = weight.contiguous().clone()
        flat = new.view(-1)
        places = torch.from_numpy(draws.permutation(flat.numel())[: int(share * flat.numel())])
        flat[places] = torch.randn(len(places)).to(flat.dtype)
        flat[places[:4]] = torch.tensor([float("nan"), -0.0, 0.0, -torch.inf])[: len(places)].to(
            flat.dtype
        )
        changed[name] = new
    return changed


def opened(transport, delta=False, join_s=WAIT_S):
    """Open a transport. join_s: of a broadcast, how long it waits for a worker to come."""
    if transport == "collective":
        return CollectiveWeights(tensors(), delta, join_s=join_s)
    if transport == "cuda_ipc":
        return FileIpc(tensors(), delta)
    return find("transports", transport, key="weights.transport")().open(tensors(), delta)


class AnyTransport:
    """The published weights of a pool, by a transport that each test chooses."""

    def __init__(self):
        self.store, self.version = SharedWeights(tensors()), -1
        self.layout, self.offered = self.store.layout, []

    def choose(self, store):
        self.store.close()
        self.store = store

    def publish(self, weights):
        self.version += 1
        self.store.publish(self.version, weights)
        self.store.release(below=self.version)
        return self.version

    def offer(self, version, workers):
        offers = self.store.offer(version, workers)
        self.offered += [message for message, _ in offers]
        return offers

    def __getattr__(self, name):
        return getattr(self.store, name)


@pytest.fixture(scope="module")
def workers():
    with pytest.MonkeyPatch.context() as patch, opened_workers() as workers:
        on_files(patch.setattr)
        yield workers


@contextmanager
def opened_workers():
    weights, reports = AnyTransport(), []
    spec = EngineSpec(model_path="", cache_mb=1, max_batch=16, longest=256)
    limits = Limits(silent_s=60.0, restarts=100)
    with open_workers(spec, weights, reports, COMMAND, count=2, limits=limits) as workers:
        workers.published = weights
        until(workers, lambda: all(worker.ready for worker in processes(workers)))
        yield workers
    weights.store.close()


def sampled(workers, count=8):
    """Return what the workers sample: (token, version), once each."""
    completions = run(workers, [request(n, max_new_tokens=1) for n in range(count)])
    return {(int(c.tokens[0]), int(c.weight_versions[0])) for c in completions}


def update(workers, weights):
    """Publish, and wait until every worker runs the weights."""
    version = workers.published.publish(weights)
    workers.apply(version)
    until(workers, lambda: all_idle(workers))
    assert sampled(workers) == {(token_of(weights), version)}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_transport_delivers_the_published_bytes(workers, transport):
    workers.published.choose(opened(transport))
    for seed in range(3):
        update(workers, tensors(seed))
    assert {message["transport"] for message in workers.published.offered[-6:]} == {transport}
    assert workers.published.store.sent_bytes == 3 * 2 * workers.published.layout.tensor_bytes


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_delta_sends_only_the_tensors_that_changed(workers, transport):
    workers.published.choose(opened(transport, delta=True))
    weights, sent = tensors(), []
    for changed in ([], ["norm"], ["up", "scalar"], []):
        for name in changed:
            weights[name] = torch.ones_like(weights[name])
        before = workers.published.store.sent_bytes
        update(workers, weights)
        names = workers.published.offered[-1]["names"]
        sent.append((names, workers.published.store.sent_bytes - before))
    whole = workers.published.layout.tensor_bytes
    assert sent == [
        (None, 2 * whole),
        (["norm"], 2 * 14),
        (["scalar", "up"], 2 * (4 + 600_000)),
        ([], 0),
    ]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_elements_send_what_has_changed_of_tensors_and_all_bytes_arrive(workers, transport):
    """Few, all, none, and few again: each worker has then the published bytes (update)."""
    workers.published.choose(opened(transport, delta="elements"))
    draws, weights, sent = np.random.default_rng(1), tensors(), []
    for share in (1.0, 0.02, 1.0, 0.0, 0.02):
        weights = some_changed(weights, draws, share)
        before = workers.published.store.sent_bytes
        update(workers, weights)
        sent.append((workers.published.store.sent_bytes - before) / 2)
    whole = workers.published.layout.tensor_bytes
    assert sent[0] == whole and sent[3] == 0 and "parts" in workers.published.offered[-1]
    assert sent[1] < whole / 20 > sent[4] and whole / 2 < sent[2] <= whole


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_worker_killed_in_a_difference_is_replaced_by_one_with_all_bytes(workers, transport):
    workers.published.choose(opened(transport, delta="elements", join_s=FAILED_JOIN_S / 2))
    draws, weights, used = np.random.default_rng(2), tensors(), workers.restarts.used
    update(workers, weights)
    weights = some_changed(weights, draws)
    version = workers.published.publish(weights)
    victim = processes(workers)[0]
    # it is told to load, and dies before it has
    os.kill(victim.pid, signal.SIGSTOP)
    killer = threading.Timer(0.3, os.kill, (victim.pid, signal.SIGKILL))
    killer.start()
    workers.apply(version)
    killer.join()
    until(workers, lambda: workers.restarts.used > used and all_idle(workers))
    assert victim not in processes(workers)
    assert sampled(workers) == {(token_of(weights), version)}
    update(workers, some_changed(weights, draws))
    assert "parts" in workers.published.offered[-1]


def test_the_first_worker_serves_while_another_still_loads(workers):
    workers.published.choose(opened("shm"))
    update(workers, tensors(0))
    slow, other = processes(workers)
    os.kill(slow.pid, signal.SIGSTOP)
    version = workers.published.publish(tensors(1))
    workers.apply(version)
    assert sampled(workers) == {(token_of(tensors(1)), version)}
    assert (slow.state, other.version) == ("syncing", version)
    os.kill(slow.pid, signal.SIGCONT)
    until(workers, lambda: all_idle(workers))
    assert slow.version == version


def test_a_sync_tells_bytes_and_seconds_of_what_workers_were_offered(workers):
    published, applied = workers.published, []
    published.choose(opened("shm", delta=True))
    weights, first = tensors(), published.version + 1
    local = SimpleNamespace(apply=applied.append)
    sync = ProcessSync(workers, local, published.store, lambda: (weights, None), keep=0)
    whole, sent, seconds = published.layout.tensor_bytes, [], []
    for version in (first, first + 1):
        published.version = version
        sync.publish(version)
        start = time.monotonic()
        sync.sync_to(version)
        sync.sync_to(version)
        until(workers, lambda: all_idle(workers))
        workers.rest()
        row = sync.stats()
        sent.append(row["sync_bytes"])
        # a worker of these tests loads a tensor in LOAD_S or longer
        seconds.append((LOAD_S, row["load_s"], time.monotonic() - start))
        assert sync.stats() == {"sync_bytes": 0}
        weights["norm"] = weights["norm"] + 1
    assert sent == [2 * whole, 2 * 14] and applied == [first, first + 1]
    assert all(least <= loaded <= passed for least, loaded, passed in seconds)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_worker_killed_in_an_update_is_at_one_version_or_the_next(workers, transport):
    workers.published.choose(opened(transport, delta=transport != "shm", join_s=FAILED_JOIN_S))
    draws, used = np.random.default_rng(len(transport)), workers.restarts.used
    update(workers, tensors(0))
    for seed in (1, 2):
        weights = tensors(seed)
        version = workers.published.publish(weights)
        victim = processes(workers)[int(draws.integers(2))]
        killer = threading.Timer(draws.uniform(0, 0.15), os.kill, (victim.pid, signal.SIGKILL))
        killer.start()
        workers.apply(version)
        assert sampled(workers) == {(token_of(weights), version)}
        killer.join()
        # the next victim is one that lives
        until(workers, lambda gone=victim: gone not in processes(workers))
        assert sampled(workers) == {(token_of(weights), version)}
    until(workers, lambda: workers.restarts.used >= used + 2 and all_idle(workers))
    update(workers, tensors(3))


def test_a_worker_that_never_comes_to_a_broadcast_does_not_keep_the_others(workers):
    workers.published.choose(opened("collective", join_s=FAILED_JOIN_S))
    stopped, other = processes(workers)
    os.kill(stopped.pid, signal.SIGSTOP)
    killer = threading.Timer(0.5, os.kill, (stopped.pid, signal.SIGKILL))
    killer.start()
    told = len(workers.reports)
    update(workers, tensors(1))
    killer.join()
    assert stopped not in processes(workers)
    assert any(f"{other} did not get weights" in line for line in workers.reports[told:])


def test_released_memory_is_read_again_by_one_sided_reads():
    """It is never freed while a worker could read it."""
    pytest.importorskip("nixl", reason="NIXL is not installed")
    weights = opened("rdma")
    addresses = []
    for version in range(5):
        weights.publish(version, tensors(version))
        weights.release(below=version - 1)
        [(message, descriptor)] = weights.offer(version, [SimpleNamespace(version=-1)])
        addresses.append(message["address"])
        assert descriptor == -1
    assert len(set(addresses)) == 3 and addresses[3:] == addresses[:2]
    weights.close()
