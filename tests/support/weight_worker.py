"""A rollout worker whose engine has tensors and no model: what it samples tells which weights it
runs.

    python tests/support/weight_worker.py PARENT < SOCKET

No GPU is needed for weights.transport = cuda_ipc: a file without a name is the GPU's memory here.
"""

import mmap
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from tandem.plugins.cluster import device_weights
from tandem.rollout_workers.worker import run
from tandem.weights.hashing import combine, tensor_digests
from tandem.weights.shared import Layout, SharedWeights
from tandem.workers.fork_server import start
from tests.support.odd_worker import LightEngine
from tests.support.scripted import said

COMMAND = (sys.executable, str(Path(__file__)))
LOAD_S = 0.02  # of each tensor


def token_of(tensors):
    """Return the token that an engine with these weights samples."""
    return int(combine(tensor_digests(tensors))[:8], 16)


class WeightEngine(LightEngine):
    """One token is a completion."""

    def __init__(self, start):
        super().__init__()
        torch.set_num_threads(1)
        self.tensors = dict(Layout.from_json(start["layout"]).staging()[1])
        self.model = SimpleNamespace(load_weights=self.load, named_weights=lambda: self.tensors)

    def load(self, weights):
        for name, weight in weights.items():
            self.tensors[name].copy_(weight)
            time.sleep(LOAD_S)

    def apply(self, version, load):
        load()
        self.version = version

    def weight_digests(self, digest):
        return tensor_digests(self.tensors, digest)

    def sample(self, running):
        self.running.remove(running)
        running.completion = said([token_of(self.tensors)], "", "length", version=self.version)


class FileIpc(device_weights.IpcWeights):
    """IpcWeights whose device has files for memory; opened by the process and the descriptor."""

    def _new_memory(self):
        memory = SharedWeights._new_memory(self)
        FILES[memory.mapped.data_ptr()] = memory.descriptor
        return memory

    _end_memory = SharedWeights._end_memory


FILES = {}


def on_files(patch):
    """Let both ends take files for the memory of one GPU. patch: sets an attribute."""
    patch(device_weights, "share", lambda memory: [os.getpid(), FILES[memory.data_ptr()]])
    patch(device_weights, "attach", opened_file)
    patch(device_weights, "gpu_id", lambda device: "GPU-1")
    patch(torch.cuda, "device_count", lambda: 1)


def opened_file(number, handle):
    assert number == 0
    with open("/proc/{}/fd/{}".format(*handle), "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return torch.frombuffer(memory, dtype=torch.uint8)


if __name__ == "__main__":
    on_files(setattr)
    start(lambda channel, _: run(channel, WeightEngine))
