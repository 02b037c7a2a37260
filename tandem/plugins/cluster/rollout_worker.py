"""A rollout worker on a node of a cluster, and weights that come beside its connection."""

import threading
import warnings
from collections import deque

import torch
from torch import Tensor

from tandem.plugins.cluster.node_worker import NodeWorker
from tandem.rollout_workers.worker import Receive, load_engine, run
from tandem.types import Array
from tandem.weights.shared import Layout, offered_layout
from tandem.weights.transports import receive_offers
from tandem.workers.channel import Channel, Message

TAKE_S = 600.0  # for weights to reach a node


class RolloutWorker(NodeWorker):
    """A NodeWorker that runs rollout_workers/worker.py."""

    role = "rollout worker"

    def __init__(self) -> None:
        super().__init__()
        self._taken: dict[int, Array] = {}  # weights, by the number that an offer names
        self._change = threading.Condition()

    def run(self, channel: Channel) -> None:
        run(channel, load_engine, self._receiver)

    def take(self, number: int, buffer: Array) -> None:
        """Take weights, which Ray has mapped here: uint8, the bytes of the tensors offered."""
        with self._change:
            self._taken[number] = buffer
            self._change.notify_all()

    def _receiver(self, layout: Layout) -> Receive:
        others = receive_offers(layout)

        def receive(source: Message, descriptors: deque[int]) -> dict[str, Tensor]:
            if "object" not in source:
                return others(source, descriptors)
            number = source["object"]
            with self._change:
                if not self._change.wait_for(lambda: number in self._taken, TAKE_S):
                    raise RuntimeError(f"the weights did not come within {TAKE_S:g} s")
                buffer = self._taken.pop(number)
            with warnings.catch_warnings():  # the pages are read only, and are only read
                warnings.simplefilter("ignore")
                memory = torch.from_numpy(buffer)
            return dict(offered_layout(source, layout).only(source["names"]).views(memory))

        return receive
