"""A reward or env worker of a cluster without Ray: the real process, channel and work, on this
machine.

    python tests/support/node_process.py reward PARENT < SOCKET
"""

import sys
from pathlib import Path

from tandem.plugins.cluster.env_actors import EnvWorker
from tandem.plugins.cluster.node_pool import RewardWorker
from tandem.workers.fork_server import prepare
from tandem.workers.host import LocalProcess

WORKERS = {"reward": RewardWorker, "env": EnvWorker}


class Nodes:
    """Starts workers of a kind as processes of this machine, and keeps them."""

    def __init__(self, kind):
        self.hosts, self._command = [], (sys.executable, str(Path(__file__)), kind)

    def spawn(self, number):
        self.hosts.append(LocalProcess(self._command))
        return self.hosts[-1]


if __name__ == "__main__":
    WORKERS[sys.argv[1]]().run(prepare(int(sys.argv[-1])))
