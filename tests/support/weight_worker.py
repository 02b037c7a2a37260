"""A rollout worker whose engine has tensors and no model: what it samples tells which weights it
runs.

    python tests/support/weight_worker.py PARENT < SOCKET
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from tandem.rollout_workers.worker import run
from tandem.types import Completion
from tandem.weights.hashing import combine, tensor_digests
from tandem.weights.shared import Layout
from tandem.workers.fork_server import start

COMMAND = (sys.executable, str(Path(__file__)))
LOAD_S = 0.02  # of each tensor


def token_of(tensors):
    """Return the token that an engine with these weights samples."""
    return int(combine(tensor_digests(tensors))[:8], 16)


@dataclass(eq=False)
class WeightRunning:
    request: object
    completion: Completion | None = None


class WeightEngine:
    """Engine, as far as a worker uses it."""

    def __init__(self, start):
        torch.set_num_threads(1)
        self.tensors = dict(Layout.from_json(start["layout"]).staging()[1])
        self.running, self.version = [], -1
        self.model = SimpleNamespace(load_weights=self.load, named_weights=lambda: self.tensors)

    @property
    def has_work(self):
        return bool(self.running)

    def load(self, weights):
        for name, weight in weights.items():
            self.tensors[name].copy_(weight)
            time.sleep(LOAD_S)

    def apply(self, version, load):
        load()
        self.version = version

    def weight_digests(self):
        return tensor_digests(self.tensors)

    def submit(self, request):
        self.running.append(WeightRunning(request))
        return self.running[-1]

    def cancel(self, running):
        self.running.remove(running)

    def step(self):
        ended, self.running = self.running, []
        for running in ended:
            running.completion = Completion(
                tokens=np.array([token_of(self.tensors)], np.int64),
                logprobs=np.zeros(1, np.float32),
                weight_versions=np.full(1, self.version, np.int32),
                text="",
                stop_reason="length",
            )
        return ended


if __name__ == "__main__":
    start(lambda channel, _: run(channel, WeightEngine))
