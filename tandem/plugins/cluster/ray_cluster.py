"""Workers on the nodes of a Ray cluster.

    driver                                               a node
    ------                                               ------
    RayCluster.spawn(number) an actor on the living  --> RolloutWorker.serve(log)
                             node with the fewest          |
    RayHost._send, _receive  bytes of the channel    <-->  write, read
    JSON lines of rollout_workers                    <-->  worker.run(channel, load_engine, receive)
    RayHost.give             an object of weights    --> RolloutWorker.take(number, buffer)

Ray places workers, and moves messages and weights (object_weights.py). All else (heartbeats,
restarts, requests served again) is the pool's (rollout_workers), as on one machine. A lost worker
is replaced by a new actor, on another node if there is one. Ray's calls are not encrypted, and
guarded by its token: a cluster is on a network that is trusted.

A cluster of this machine (`start_cluster`) has nodes of its own on loopback addresses. If the
driver dies, the kernel ends them.
"""

import ipaddress
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import ray as ray  # the other files have it from here
import ray._raylet
import torch
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor

from tandem.plugins.cluster.logs import LogFiles
from tandem.plugins.cluster.node_worker import CHUNK, NodeWorker
from tandem.plugins.cluster.object_weights import ObjectWeights
from tandem.plugins.cluster.rollout_worker import RolloutWorker
from tandem.plugins.cluster.this_machine import (
    environment,
    keeping_sigterm,
    last_line,
    not_joined,
    own_token,
    require_listener,
    short_folder,
    start_nodes,
)
from tandem.rollout_workers.pool import ENVIRONMENT
from tandem.runtime import numerics
from tandem.runtime.errors import UserError
from tandem.runtime.processes import descendants
from tandem.weights.shared import Delta
from tandem.workers.channel import Channel
from tandem.workers.fork_server import die_with_starter
from tandem.workers.host import EXIT_S, LAST_LINES

STACK_S = 2.0
NAMES = ("NodeManagerAddress", "NodeName", "NodeManagerHostname", "NodeID")  # of a node, by Ray
RAY_CONFIG: Any = ray._raylet.Config  # type: ignore[attr-defined]
NODES_S = 60.0  # for the nodes of a cluster that is joined
NODE_CPUS = 64  # of a node on this machine, for Ray's books: workers share its cores
SPARE_BYTES = 80 << 20  # the least that Ray takes for a node's objects
HEAD: dict[str, Any] = {
    "include_dashboard": False,
    "include_log_monitor": False,
    "no_monitor": True,
    "_system_config": {"prestart_worker_first_driver": False},
}
# of Ray's workers: Ray itself ends those of a killed node only where orphans are init's
END_WITH_NODE = f"{die_with_starter.__module__}.{die_with_starter.__name__}"


def own_place(_: Any) -> tuple[str, int]:
    """Return the node and the process of the actor that this is called in."""
    return ray.get_runtime_context().get_node_id(), os.getpid()


def worker_variables() -> dict[str, str]:
    """Return the environment variables of a worker's process."""
    return {**ENVIRONMENT, **numerics.environment()}


class RayHost:
    """A worker's actor, as the pool holds it. Implements process.Host."""

    def __init__(self, cluster: "RayCluster", actor: Any, node_id: str, name: str):
        self.cluster, self.actor, self.node_id, self.name = cluster, actor, node_id, name
        self.node, self.pid = cluster.address_of(node_id), 0
        self._channel: Channel | None = None
        self._place = self._beside("__ray_call__", own_place)
        log = cluster.logs.begin(name, self.node) if cluster.logs else ""
        self._ended = actor.serve.remote(log)

    def _beside(self, method: str, *arguments: Any, group: str = "side") -> Any:
        """Call a method of the actor while it serves."""
        return getattr(self.actor, method).options(concurrency_group=group).remote(*arguments)

    def connect(self) -> Channel | None:
        if self._channel is None and ray.wait([self._place], timeout=0)[0]:
            try:
                self.node_id, self.pid = ray.get(self._place)
            except ray.exceptions.RayError:
                raise EOFError from None
            self.node = self.cluster.address_of(self.node_id)
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            self._channel = Channel(ours)
            for carry in (self._send, self._receive):
                thread = threading.Thread(target=carry, args=(theirs,), name=self.name, daemon=True)
                thread.start()
        return self._channel

    def _send(self, theirs: socket.socket) -> None:
        with suppress(OSError, ray.exceptions.RayError), theirs:
            while data := theirs.recv(CHUNK):
                ray.get(self._beside("write", data, group="in"))

    def _receive(self, theirs: socket.socket) -> None:
        with suppress(OSError, ray.exceptions.RayError):
            while data := ray.get(self._beside("read", group="out")):
                theirs.sendall(data)
        with suppress(OSError):
            theirs.shutdown(socket.SHUT_RDWR)

    def stack(self) -> str:
        if self._channel is None:
            return f"Ray has not started it: {self.cluster.free()}"
        try:
            return str(ray.get(self._beside("stack"), timeout=STACK_S))
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
            return ""

    def last_words(self) -> str:
        error, logs = self._error(), self.cluster.logs
        written = logs.last_lines(self.name, LAST_LINES) if logs else ""
        return written or "\n".join(error.strip().splitlines()[-LAST_LINES:])

    def how_it_ended(self) -> str:
        return last_line(self._error()) or "it closed its connection"

    def _error(self) -> str:
        try:
            ray.get(self._ended, timeout=EXIT_S)
        except ray.exceptions.GetTimeoutError:
            return ""
        except ray.exceptions.RayError as error:
            return str(error)
        return ""

    def give(self, number: int, stored: Any) -> None:
        self._beside("take", number, stored)

    def end(self) -> None:
        self.cluster.forget(self)
        ray.kill(self.actor, no_restart=True)
        if self._channel is not None:
            self._channel.close()


class RayCluster:
    """A running Ray cluster. `spawn` starts workers of one kind on its nodes. worker: their class;
    gpus, cpus: of each one; runtime_env: Ray's, if a worker's process is not to have the node's
    environment; logs: of what they print."""

    def __init__(
        self,
        gpus: int,
        runtime_env: dict[str, Any] | None,
        worker: type[NodeWorker] = RolloutWorker,
        cpus: int = 1,
        logs: LogFiles | None = None,
    ):
        self.home = str(ray.get_runtime_context().get_node_id())  # the node of this process
        self.gpus, self.logs, self.role = gpus, logs, worker.role
        self.placement: str | list[str] = "spread"
        self._hosts: list[RayHost] = []
        self._last_node: dict[int, str] = {}  # of each worker number
        as_actor: Any = ray.remote
        self._actor = as_actor(concurrency_groups={"side": 2, "in": 1, "out": 1})(worker)
        self._options: dict[str, Any] = {
            "num_cpus": cpus,
            "num_gpus": gpus,
            "max_restarts": 0,
            "runtime_env": runtime_env,
        }

    def for_calls(self, worker: type[NodeWorker]) -> "RayCluster":
        """Return the same nodes for workers of rewards or environments. These ask Ray for nothing,
        so none waits for a rollout worker's CPU."""
        return RayCluster(0, self._options["runtime_env"], worker, 0, self.logs)

    def spawn(self, number: int) -> RayHost:
        """Start the worker of that number where `placement` says: packed it is on this process's
        node as long as that has room, else on the node with the fewest, and not where one of its
        number has been lost. Of equal nodes it takes the first by address."""
        packs, pins = self.placement == "pack", isinstance(self.placement, list)
        node = self.home if packs else self._choose(number)
        self._last_node[number] = node
        # only who asks for nothing has room on the node in any case
        soft = self._options["num_cpus"] > 0 and not pins
        where = NodeAffinitySchedulingStrategy(node, soft=soft, _spill_on_unavailable=packs)
        actor = self._actor.options(**self._options, scheduling_strategy=where).remote()
        host = RayHost(self, actor, node, f"{self.role} {number}")
        self._hosts.append(host)
        return host

    def _choose(self, number: int) -> str:
        here = [host.node_id for host in self._hosts]
        pinned = isinstance(self.placement, list)
        alive = named_nodes(self.placement) if pinned else self.nodes()
        return min(
            alive,
            key=lambda node: (node == self._last_node.get(number), here.count(node), alive[node]),
        )

    def place(self, placement: str | list[str]) -> None:
        """Place workers as `cluster.placement` says. Raises UserError for a node that is none."""
        for name in placement if isinstance(placement, list) else ():
            named_nodes([name])
        self.placement = placement

    def nodes(self) -> dict[str, str]:
        """Return the addresses of the nodes that live, by their ids."""
        return {n["NodeID"]: n["NodeManagerAddress"] for n in ray.nodes() if n["Alive"]}

    def address_of(self, node_id: str) -> str:
        return self.nodes().get(node_id, node_id)

    def free(self) -> str:
        """Describe what the nodes have left."""
        free = ray.available_resources()
        return f"the nodes have {free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs free"

    def own_address(self) -> str:
        """Return the driver's address on the cluster's network."""
        return self.address_of(self.home)

    def open_weights(self, tensors: dict[str, Tensor], delta: Delta) -> ObjectWeights:
        """Open the transport of weights to the workers, through Ray's store."""
        return ObjectWeights(tensors, delta, put=ray.put, get=ray.get)

    def forget(self, host: RayHost) -> None:
        self._hosts.remove(host)


def named_nodes(names: Sequence[str]) -> dict[str, str]:
    """Return the addresses by id of the living nodes that have one of these names. Raises UserError
    if there is none."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    found = [node for node in alive if {node[key] for key in NAMES} & set(names)]
    if found:
        return {node["NodeID"]: node["NodeManagerAddress"] for node in found}
    there = sorted(" = ".join(dict.fromkeys(node[key] for key in NAMES[:3])) for node in alive)
    raise UserError(
        "the Ray cluster has no living node of that name",
        where="cluster.placement",
        found=", ".join(names),
        expected=f"a name of a node: {', '.join(there)}",
        next="start that node (`ray start --address=...`), or name others",
    )


# ---------------------------------------------------------------- a cluster


class LocalNodes:
    """Nodes of a cluster on this machine. object_bytes: of each one's store; gpus: of each one, for
    Ray's books: the nodes share the machine's."""

    def __init__(self, folder: Path, object_bytes: int, gpus: int):
        self._cluster, self._numbers = Cluster(), count()
        self._options: dict[str, Any] = {
            "num_cpus": NODE_CPUS,
            "num_gpus": gpus,
            "object_store_memory": max(SPARE_BYTES, object_bytes),
            "temp_dir": str(folder),
        }

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self) -> Any:
        """Add a node, the first one as head."""
        number = next(self._numbers)
        # not 127.0.0.1, which Ray takes for the machine's own public one
        at = str(ipaddress.IPv4Address("127.0.0.2") + number)
        options = {**self._options, "node_ip_address": at, **(HEAD if number == 0 else {})}
        with environment(worker_variables()):
            return self._cluster.add_node(**options)

    def remove(self, address: str) -> None:
        """Kill the node at that address, with all that runs on it."""
        [node] = [n for n in self._cluster.list_all_nodes() if n.node_ip_address == address]
        self._cluster.remove_node(node, allow_graceful=False)

    def end(self) -> None:
        """End all nodes, and what they have started."""
        started = [
            process.pid
            for node in self._cluster.list_all_nodes()
            for infos in node.all_processes.values()
            for info in infos
            for process in descendants(info.process.pid)
        ]
        self._cluster.shutdown()
        for pid in started:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def local_nodes(nodes: int, object_bytes: int, gpus: int = 0) -> Iterator[LocalNodes]:
    """Start nodes on this machine, on loopback addresses, with token authentication and without a
    dashboard; end them afterwards. Raises UserError."""
    with ExitStack() as ending:
        folder = ending.enter_context(short_folder())
        token, session = folder / "token", folder / "ray"  # Ray opens the latter to every user
        token.touch(0o600)
        token.write_text(own_token())
        session.mkdir()
        variables = {
            "RAY_TMPDIR": str(folder),  # it notes the cluster's address in `ray` there
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            # a loaded machine is slow to import torch and ray, and to start a node's agents
            "RAY_worker_register_timeout_seconds": "120",
            "RAY_raylet_start_wait_time_s": "60",
        }
        ending.enter_context(environment(variables))
        RAY_CONFIG.initialize("")  # it was read with the import
        with keeping_sigterm():
            local = start_nodes(nodes, lambda: LocalNodes(session, object_bytes, gpus))
        ending.callback(local.end)
        yield local


@contextmanager
def start_cluster(nodes: int, object_bytes: int, gpus: int = 0) -> Iterator[RayCluster]:
    """Start a cluster of `local_nodes`, with this process on the first one. gpus: of a worker."""
    here = torch.cuda.device_count() if gpus else 0
    with local_nodes(nodes, object_bytes, here) as local, _connected(local.address):
        yield RayCluster(gpus, None)


@contextmanager
def _connected(address: str) -> Iterator[None]:
    """Connect this process to a cluster, whose node on this machine it finds."""
    host = address.rpartition(":")[0]
    own = host if host.startswith("127.") else None
    try:
        with keeping_sigterm():
            ray.init(
                address=address,
                _node_ip_address=own,
                logging_level=logging.ERROR,
                log_to_driver=False,
                runtime_env={"worker_process_setup_hook": END_WITH_NODE},
            )
        yield
    finally:
        ray.shutdown()


@contextmanager
def join_cluster(address: str, nodes: int, gpus: int = 0) -> Iterator[RayCluster]:
    """Join the cluster at HOST:PORT, which must have so many living nodes, one of them on this
    machine; leave it afterwards. Raises UserError."""
    require_listener(address)
    variables = {"RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "token")}
    with environment(variables), ExitStack() as leaving:
        RAY_CONFIG.initialize("")
        try:
            leaving.enter_context(_connected(address))
        # a wrong token, no node here, another version: Ray has an exception for each
        except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError) as error:
            raise not_joined(address, f"{type(error).__name__}: {error}") from error
        until = time.monotonic() + NODES_S
        while (found := sum(node["Alive"] for node in ray.nodes())) < nodes:
            if time.monotonic() > until:
                raise UserError(
                    "the Ray cluster is smaller than the config says",
                    where=f"cluster.address = {address}",
                    found=f"{found} living nodes",
                    expected=f"cluster.nodes = {nodes}",
                    next="start the other nodes (`ray start --address=...`), or lower "
                    "cluster.nodes",
                )
            time.sleep(0.5)
        yield RayCluster(gpus, {"env_vars": worker_variables()})


@contextmanager
def open_ray() -> Iterator[None]:
    """Have this process in a Ray cluster: the run's own, or a new one on this machine."""
    if ray.is_initialized():
        yield
    else:
        with start_cluster(1, SPARE_BYTES):
            yield
