"""A rollout worker whose engine has tensors and no model: what it samples tells which weights it
runs.

    python tests/support/weight_worker.py PARENT < SOCKET
"""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from tandem.rollout_workers.worker import run
from tandem.weights.hashing import combine, tensor_digests
from tandem.weights.shared import Layout
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

    def weight_digests(self):
        return tensor_digests(self.tensors)

    def sample(self, running):
        self.running.remove(running)
        token = token_of(self.tensors)
        running.completion = said([token], "", "length", version=self.version)


if __name__ == "__main__":
    start(lambda channel, _: run(channel, WeightEngine))
