"""The trainer's ranks after 0 on the nodes of a Ray cluster: their places, starts and ends.

    driver, rank 0                                 a node
    --------------                                 ------
    TrainerRanks     a placement group: on the driver's node, else packed
    .start(place) -> RankHost                 -->  RankProcess.run: the process of a local rank
    processes.py: orders, signs of life       <->  the same rank loop (jobs/follow.py)
    RankHost.poll    its exit code            <--  Ray: the end of the call, the actor or the node
    LogFiles                                       its file has stdout and stderr of the process

Knows nothing of what the ranks do.
"""

import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.plugins.cluster.ray_cluster import RayCluster, ray
from tandem.plugins.cluster.this_machine import last_line
from tandem.runtime import numerics, watchdog
from tandem.runtime.errors import UserError
from tandem.runtime.place import NODE, Place, without_place
from tandem.runtime.processes import STARTER

PLACE_S = 10.0  # for Ray to find room, by each strategy
PIN = 0.001  # of the resource that a node alone has
KILL_S = 5.0  # for a process to be killed, or an actor to end


class RankProcess:
    """A rank's process on a node; Ray calls its methods."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def run(
        self, command: Sequence[str], folder: str, environment: dict[str, str], log: str
    ) -> int:
        """Run Python with these arguments in a folder; return the exit code. environment: replaces
        this process's settings of arithmetic."""
        own = without_place(os.environ)
        rest = {name: own[name] for name in own.keys() - numerics.environment().keys()}
        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, *command],
                cwd=folder,
                env=rest | environment | {STARTER: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        return self._process.wait()

    def end(self) -> None:
        """Kill the process."""
        if self._process is not None:
            self._process.kill()


class RankHost:
    """A rank's actor, as the driver holds it: what processes.py asks of a Popen."""

    def __init__(self, actor: Any, ended: Any, log: Path):
        self._actor, self._ended, self._log = actor, ended, log
        self.returncode: str | None = None

    def poll(self) -> str | None:
        """Return how it ended; None as long as it has not."""
        if self.returncode is None and ray.wait([self._ended], timeout=0)[0]:
            try:
                code = str(ray.get(self._ended))
            except ray.exceptions.RayError as error:
                code = f"none: {last_line(str(error))}"
            self.returncode = f"{code}; its output is in {self._log}"
        return self.returncode

    def wait(self, timeout: float | None = None) -> None:
        """Wait for its end. Raises TimeoutExpired after a given timeout."""
        ended, _ = ray.wait([self._ended], timeout=timeout or KILL_S)
        if timeout and not ended:
            raise subprocess.TimeoutExpired("a rank on a Ray node", timeout)

    def kill(self) -> None:
        """Kill the process, then the actor, which could do so no more if it had ended before."""
        ray.wait([self._actor.end.options(concurrency_group="side").remote()], timeout=KILL_S)
        ray.kill(self._actor, no_restart=True)


class TrainerRanks:
    """Room for ranks 1 to count on the nodes of a cluster, which `close` gives back. command: of a
    rank, for Python; report: told where they are, if not with the driver."""

    def __init__(
        self, cluster: RayCluster, command: Sequence[str], count: int, report: Callable[[str], None]
    ):
        self._cluster, self._command = cluster, command
        self.address = cluster.address_of(cluster.home)
        as_actor: Any = ray.remote
        self._actor = as_actor(concurrency_groups={"side": 1})(RankProcess)
        self._group, packed = self._reserve(count)
        places = ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        self._nodes = [cluster.address_of(places[number]) for number in range(count)]
        if not packed:
            where = ", ".join(f"{rank} on {node}" for rank, node in enumerate(self._nodes, 1))
            report(f"no room for all ranks on the driver's node {self.address}; rank {where}")

    def _reserve(self, count: int) -> tuple[Any, bool]:
        """Reserve room on the driver's node, else on as few nodes as there can be; return the
        placement group, and whether it is the former."""
        bundle = {"CPU": 1.0} | ({"GPU": 1.0} if self._cluster.gpus else {})
        for strategy in ("STRICT_PACK", "PACK"):
            own = {f"node:{self.address}": PIN} if strategy == "STRICT_PACK" else {}
            group = ray.util.placement_group([bundle | own] * count, strategy=strategy)
            with watchdog.waiting_for("Ray", "room for the trainer's ranks"):
                if group.wait(PLACE_S):
                    return group, strategy == "STRICT_PACK"
            ray.util.remove_placement_group(group)
        needs = " and ".join(f"{amount:g} {what}" for what, amount in bundle.items())
        raise UserError(
            "the Ray cluster has no room for the trainer's ranks",
            where="cluster.trainers = ray",
            found=self._cluster.free(),
            expected=f"{needs} for each of {count} ranks after rank 0",
            next="look with `ray status`; free some, start other nodes, or cluster.trainers=driver",
        )

    def meet(self, place: Place) -> Place:
        """Return rank 0's place on the cluster. Its token tells this run's ranks from others."""
        return replace(place, address=self.address, node=self.address, job=secrets.token_hex(16))

    def start(self, place: Mapping[str, str]) -> RankHost:
        """Start the rank of a place, given by the environment."""
        rank, logs = int(place["RANK"]), self._cluster.logs
        node, name = self._nodes[rank - 1], f"trainer rank {rank}"
        assert logs is not None
        own = {n: os.environ[n] for n in numerics.environment() if n in os.environ}
        strategies = ray.util.scheduling_strategies
        bundle = strategies.PlacementGroupSchedulingStrategy(self._group, rank - 1)
        actor = self._actor.options(
            num_cpus=1, num_gpus=self._cluster.gpus, scheduling_strategy=bundle
        ).remote()
        environment, log = own | {**place, NODE: node}, logs.begin(name, node)
        ended = actor.run.remote(self._command, os.getcwd(), environment, log)
        return RankHost(actor, ended, logs.path(name))

    def close(self) -> None:
        with suppress(ray.exceptions.RayError):
            ray.util.remove_placement_group(self._group)
