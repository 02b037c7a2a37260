"""TransferQueue as the way of a step's groups: stream.kind = transfer_queue."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from tandem.choices import Report, StreamBackend
from tandem.config.schema import Config
from tandem.runtime.errors import not_installed

if TYPE_CHECKING:
    from tandem.plugins.cluster.transfer_queue import Servers, TransferQueueStream
    from tandem.trainer.ranks import Ranks

START_S = 240.0  # for Ray to place and start three processes that import torch, under load
MIN_STALL_S = 20


class TransferQueue(StreamBackend):
    """Rows in storage units on a Ray cluster, of which the driver holds the metadata alone."""

    shares_files = False
    needs_nodes = True

    def conflicts(self, config: Config) -> Iterator[str]:
        if config.run.stall_s < MIN_STALL_S:
            yield (
                "run.stall_s: must be at least 20 with stream.kind=transfer_queue, whose transfers "
                "have half of it"
            )
        if config.rl.router_replay:
            yield (
                "rl.router_replay: experts do not travel by stream.kind=transfer_queue, and a step "
                "is not packed by lengths alone; use memory"
            )

    def check(self, config: Config) -> None:
        for package in ("ray", "transfer_queue"):
            if find_spec(package) is None:
                where = "stream.kind = transfer_queue"
                raise not_installed(
                    package, "transfer-queue", where=where, instead="stream.kind=memory"
                )

    def describe(self, config: Config) -> str:
        return "episodes by transfer_queue"

    @contextmanager
    def open(
        self, config: Config, ranks: "Ranks", report: Report
    ) -> Iterator["TransferQueueStream"]:
        from tandem.plugins.cluster.ray_cluster import open_ray
        from tandem.plugins.cluster.transfer_queue import start_servers

        with open_ray():
            servers, handles = start_servers(config.cluster.nodes, START_S)
            ips = ", ".join(sorted({str(one["ip"]) for one in servers}))
            report(
                f"TransferQueue listens on {ips} without authentication: whoever reaches its "
                "ports, other users of these machines too, runs code as you"
            )
            ranks.order("join_stream", servers=servers)
            with closing(self.join(config, ranks, servers)) as stream:
                yield stream
            del handles  # with them Ray ends the processes

    def join(self, config: Config, ranks: "Ranks", servers: "Servers") -> "TransferQueueStream":
        from tandem.plugins.cluster.transfer_queue import TransferQueueStream

        return TransferQueueStream(
            servers,
            name=f"rank {ranks.rank}",
            capacity=config.rollout.staleness + 1,
            timeout_s=config.run.stall_s / 2,  # so that its error comes before the watchdog's
            wait_for_all=ranks.wait_for_all,
        )
