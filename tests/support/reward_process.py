"""A reward worker of a cluster without Ray: the real process, channel and RewardPool, on this
machine.

    python tests/support/reward_process.py PARENT < SOCKET
"""

import sys
from pathlib import Path

from tandem.cluster.reward_worker import RewardWorker
from tandem.engine.worker_pool.process import LocalProcess
from tandem.engine.worker_pool.worker import prepare

COMMAND = (sys.executable, str(Path(__file__)))


class Nodes:
    """Starts reward workers as processes of this machine, and keeps them."""

    def __init__(self):
        self.hosts = []

    def spawn(self, number):
        self.hosts.append(LocalProcess(COMMAND))
        return self.hosts[-1]


if __name__ == "__main__":
    RewardWorker().run(prepare(int(sys.argv[-1])))
