"""The stream of a run, from its config: rank 0's, and that of a rank after it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.config.schema import Config
from tandem.run_folder.journal import Journal
from tandem.runtime.errors import UserError
from tandem.stream.stream import MemoryStream, Plan, Stream
from tandem.train.ranks import Ranks
from tandem.types import Group

if TYPE_CHECKING:
    from tandem.plugins.cluster.transfer_queue import Servers, TransferQueueStream

START_S = 240.0  # for Ray to place and start three processes that import torch, under load


@contextmanager
def open_stream(config: Config, ranks: Ranks, report: Callable[[str], None]) -> Iterator[Stream]:
    """Open rank 0's end of the stream; have the other ranks join it."""
    if config.stream.kind == "memory":
        yield MemoryStream()
        return
    from tandem.plugins.cluster.ray_cluster import open_ray
    from tandem.plugins.cluster.transfer_queue import start_servers

    with open_ray():
        servers, handles = start_servers(config.cluster.nodes, START_S)
        ips = ", ".join(sorted({str(one["ip"]) for one in (servers.controller, *servers.units)}))
        report(
            f"TransferQueue listens on {ips} without authentication: whoever reaches its ports, "
            "other users of these machines too, runs code as you"
        )
        ranks.order("join_stream", servers=asdict(servers))
        with closing(_join(config, servers, ranks)) as stream:
            yield stream
        del handles  # with them Ray ends the processes


def join_stream(config: Config, ranks: Ranks, servers: Mapping[str, Any]) -> "TransferQueueStream":
    """Join the stream that rank 0 has opened; close it in the end."""
    from tandem.plugins.cluster.transfer_queue import Servers

    return _join(config, Servers(**servers), ranks)


def _join(config: Config, servers: "Servers", ranks: Ranks) -> "TransferQueueStream":
    from tandem.plugins.cluster.transfer_queue import TransferQueueStream

    return TransferQueueStream(
        servers,
        name=f"rank {ranks.rank}",
        capacity=config.rollout.staleness + 1,
        timeout_s=config.run.stall_s / 2,  # so that its error comes before the watchdog's
        wait_for_all=ranks.wait_for_all,
    )


class JournalStream:
    """The stream of a rank after 0 without a data plane: the file that rank 0 has written."""

    def __init__(self, journal: Journal, folder: Path):
        self.journal, self.folder = journal, folder

    def take(self, step: int, kept: list[Group], plan: Plan) -> list[Group]:
        """Read the groups of a step. Raises UserError if its file is not there."""
        recorded = self.journal.read(step + 1)
        if recorded is None:
            raise _not_shared(self.folder, step + 1)
        return recorded[0]


def _not_shared(folder: Path, step: int) -> UserError:
    return UserError(
        "a rank cannot read what rank 0 has written",
        where=str(folder / "episodes"),
        found=f"no file of this run for step {step}",
        expected="one run folder for all ranks, on a shared file system",
        next="share it, or stream.kind=transfer_queue",
    )
