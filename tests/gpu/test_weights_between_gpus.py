"""Weights that go from the trainer's GPU to another process, by CUDA IPC and by NCCL."""

import multiprocessing
from types import SimpleNamespace

import pytest
import torch

from tandem.plugins.cluster.transports import Collective, CudaIpc
from tandem.weights.hashing import device_digest, tensor_digests
from tandem.weights.shared import Layout

OLD = SimpleNamespace(version=-1)


def tensors(seed, device):
    torch.manual_seed(seed)
    long, short = torch.randn(3_000_001).bfloat16(), torch.randn(7, 5)
    return {"long": long.to(device), "short": short.to(device)}


def worker(reader, device, layout, channel):
    torch.cuda.set_device(device)
    read = reader()
    while (source := channel.recv()) is not None:
        found = {name: tensor.clone() for name, tensor in read(source, layout, None).items()}
        channel.send(tensor_digests(found, device_digest))


@pytest.mark.parametrize(
    ("transport", "device"), [(CudaIpc, "cuda:0"), (CudaIpc, "cuda:1"), (Collective, "cuda:1")]
)
def test_another_process_has_the_published_bytes(transport, device):
    if torch.cuda.device_count() <= int(device[-1]):
        pytest.skip("needs that GPU")
    weights = transport().open(tensors(0, "cuda:0"), True)
    here, there = multiprocessing.Pipe()
    arguments = transport().reader, device, Layout(weights.layout.parts), there
    process = multiprocessing.get_context("spawn").Process(target=worker, args=arguments)
    process.start()
    for version in range(3):
        weights.publish(version, tensors(version, "cuda:0"))
        weights.release(below=version)
        [(source, _)] = weights.offer(version, [OLD])
        here.send(source)
        assert here.recv() == source["digests"]
    here.send(None)
    process.join()
    weights.close()
    assert process.exitcode == 0
