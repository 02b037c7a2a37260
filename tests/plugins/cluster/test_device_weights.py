"""Weights on GPUs, without any: what NCCL is asked for, and what is refused."""

import json
import os
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tandem.config.schema import Config, Model, Rollout, Weights
from tandem.plugins.cluster import collective
from tandem.plugins.cluster.collective import DeviceBroadcasts, broadcast
from tandem.plugins.cluster.device_weights import attach, open_offer, share
from tandem.plugins.cluster.transports import Collective, CudaIpc
from tandem.runtime.errors import UserError
from tandem.weights.shared import Layout
from tests.support.fake_cuda import FakeCuda

JOIN_S = 30.0


def test_buckets_bring_every_byte_to_every_rank(monkeypatch):
    monkeypatch.setattr(collective, "BUCKET", 1000)
    memories = [torch.arange(2345, dtype=torch.int64).to(torch.uint8)]
    memories += [torch.zeros_like(memories[0]) for _ in range(2)]
    store = dist.HashStore()
    ranks = [
        threading.Thread(target=broadcast, args=(store, rank, 3, JOIN_S, memory))
        for rank, memory in enumerate(memories)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert all(torch.equal(memory, memories[0]) for memory in memories)


class Nccl:
    """A process group of NCCL that notes what it is asked for. With `hangs` it never has sent."""

    log, hangs = [], False

    def __init__(self, store, rank, size, timeout):
        self.log.append(("group", rank, size, os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"]))

    def broadcast(self, tensors, options):
        self.log.append(("broadcast", len(tensors[0]), options.rootRank))
        if self.hangs:
            threading.Event().wait(5)
        return SimpleNamespace(wait=lambda: None)

    def abort(self):
        self.log.append(("abort",))

    def shutdown(self):
        self.log.append(("shutdown",))


@pytest.fixture
def nccl(monkeypatch):
    monkeypatch.setattr(Nccl, "log", [])
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(collective, "BUCKET", 1000)
    with FakeCuda() as gpus:
        yield gpus, Nccl.log


def test_memory_of_a_gpu_goes_by_nccl_from_its_own_device(nccl):
    gpus, log = nccl
    memory = torch.zeros(2345, dtype=torch.uint8, device="cuda:1")
    with torch.cuda.device(1):
        broadcast(dist.HashStore(), 0, 1, JOIN_S, memory)
    sent = [("broadcast", size, 0) for size in (1000, 1000, 345)]
    assert log == [("group", 0, 1, "2"), *sent, ("shutdown",)]
    assert (
        gpus.log[-1] == ("synchronize", 1) and "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ
    )


def test_a_broadcast_that_does_not_end_is_given_up(nccl, monkeypatch):
    monkeypatch.setattr(Nccl, "hangs", True)
    monkeypatch.setattr(collective, "NCCL_S", 0.05)
    memory = torch.zeros(10, dtype=torch.uint8, device="cuda:0")
    with pytest.raises(RuntimeError, match="no end in"):
        broadcast(dist.HashStore(), 0, 1, JOIN_S, memory)
    assert nccl[1][-1] == ("abort",)


def test_tensors_of_a_gpu_stay_there_and_are_digested_there(nccl):
    tensors = {"a": torch.randn(5, device="cuda:1"), "b": torch.randn(3, 2, device="cuda:1")}
    weights = Collective().open(tensors, False)
    assert type(weights) is DeviceBroadcasts
    weights.publish(0, tensors)
    memory = weights._published[0].mapped
    assert memory.is_cuda and dict(weights.layout.views(memory))["a"].is_cuda
    assert weights._message("collective", 0, weights.sent(0, []))["digest"] == "device"
    weights.close()


def test_a_worker_that_does_not_see_the_trainers_gpu_says_so():
    source = {"gpu": "GPU-1", "handle": [], "names": None}
    with pytest.raises(RuntimeError, match="GPU-1, and this worker sees none"):
        open_offer(source, Layout(()), None)


def test_gpus_that_a_transport_cannot_use_are_a_users_error():
    rollout, weights = Rollout(workers=1), Weights(transport="cuda_ipc")
    config = Config(model=Model(device="cpu"), rollout=rollout, weights=weights)
    with pytest.raises(UserError, match="memory of a GPU"):
        CudaIpc().check(config)
    for count, devices, fine in (
        (1, ["cuda:1"], True),
        (2, ["cuda:1"], False),
        (1, ["cuda"], False),
        (1, ["cpu"], False),
        (1, [], False),
    ):
        rollout = Rollout(workers=count, devices=devices)
        config = Config(model=Model(device="cuda:0"), rollout=rollout)
        with FakeCuda(), nullcontext() if fine else pytest.raises(UserError, match="a GPU each"):
            Collective().check(config)


def test_a_handle_survives_json(monkeypatch):
    parts = (b"\0handle", 64, 0, b"counter", 3, b"\xffevent", True)
    alias, opened = SimpleNamespace(_share_cuda_=lambda: (1, *parts)), []
    monkeypatch.setattr(torch._C, "_construct_storage_from_data_pointer", lambda *own: alias)

    def open_again(*given):
        opened.append(given)
        return torch.zeros(64, dtype=torch.uint8).untyped_storage()

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", open_again, raising=False)
    handle = json.loads(json.dumps(share(torch.zeros(64, dtype=torch.uint8))))
    assert len(attach(0, handle)) == 64 and opened == [(0, *parts)]
