"""The stream through TransferQueue: a partition for each step, a row for each episode, in storage
units on a Ray cluster; the driver keeps nothing of it. The only file that imports transfer_queue.

    rank 0                    controller (metadata)        storage units (arrays)
    ------                    ---------------------        ----------------------
    put    tags of all   -->  train_000012: 0/0, 0/1, ..
           arrays of what can be trained            ---->  rows
    take   tags          <--
    (all   plan by lengths
    ranks) arrays of the own share                  <----  rows
    clear                -->  forget the partition  ---->  forget the rows

Partitions, shares and the end of a step are this layer's: TransferQueue has rows. A call of it
waits forever for a dead process, so each runs in a loop of its own, with a deadline, while the
addresses are watched. Needs Ray to be running (cluster/).
"""

import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from tandem.plugins.cluster.ray_cluster import ray
from tandem.plugins.cluster.rows import (
    Tag,
    groups_of,
    key_of,
    pack_arrays,
    place_of,
    places_to_store,
    tag_of,
)
from tandem.rollout.stream import Place, Plan
from tandem.runtime import watchdog
from tandem.runtime.errors import UserError
from tandem.types import Array, Group

# TransferQueue sets torch's threads around each transfer, for the whole process: to this number
os.environ.setdefault("TQ_NUM_THREADS", str(torch.get_num_threads()))
from safetensors import SafetensorError
from safetensors.numpy import load
from tensordict import NonTensorStack, TensorDict
from transfer_queue.client import AsyncTransferQueueClient
from transfer_queue.controller import TransferQueueController
from transfer_queue.storage.simple_storage import SimpleStorageUnit
from transfer_queue.utils.common import get_node_round_robin_scheduling_strategies
from transfer_queue.utils.enum_utils import Role
from transfer_queue.utils.zmq_utils import ZMQServerInfo

LOOK_S = 1.0  # between two looks whether the processes still listen
CONNECT_S = 2.0  # for one of them to take a connection
MIN_UNITS = 2  # storage units
FIELD = "arrays"  # of a row

# id, ip and ports of each process of TransferQueue, the controller first; JSON
Servers = Sequence[Mapping[str, Any]]


def start_servers(units: int, timeout_s: float) -> tuple[Servers, list[Any]]:
    """Start a controller and storage units on the running Ray cluster, one CPU each; return their
    addresses, and the handles that keep them alive, the controller's first.

    Raises UserError if they do not start, or Ray has not placed them after `timeout_s`.
    """
    units = max(MIN_UNITS, units)
    try:
        # without names, so that runs on one Ray cluster have each its own
        handles = [TransferQueueController.remote(polling_mode=True)]
        for strategy in get_node_round_robin_scheduling_strategies(units):
            unit = SimpleStorageUnit.options(scheduling_strategy=strategy)
            handles.append(unit.remote({"num_data_storage_units": units}))
        with watchdog.waiting_for("Ray", "the processes of TransferQueue"):
            asked = [handle.get_zmq_server_info.remote() for handle in handles]
            infos = ray.get(asked, timeout=timeout_s)
    except Exception as error:  # Ray has one for each way in which an actor fails
        raise UserError(
            "TransferQueue did not start",
            where="stream.kind = transfer_queue",
            found=f"{type(error).__name__}: {error}"[:300],
            expected=f"a Ray cluster with {units + 1} free CPUs",
            next="ray status; free the CPUs, or stream.kind=memory",
        ) from error
    return [{"id": i.id, "ip": i.ip, "ports": dict(i.ports)} for i in infos], handles


class TransferQueueStream:
    """One process's end of the stream.

    servers: of `start_servers`; name: of this process; capacity: steps that may be put and not
    cleared; timeout_s: of a transfer, and of the wait for room; wait_for_all: for the other ranks,
    so that none clears what another has not fetched.
    """

    def __init__(
        self,
        servers: Servers,
        *,
        name: str,
        capacity: int,
        timeout_s: float,
        wait_for_all: Callable[[], object] = lambda: None,
    ):
        self.servers, self.capacity, self.timeout_s = servers, capacity, timeout_s
        self.wait_for_all = wait_for_all
        self._steps: set[int] = set()  # put by this process and not cleared
        self._room = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="stream", daemon=True)
        self._thread.start()
        controller, *units = (
            ZMQServerInfo(Role.STORAGE if number else Role.CONTROLLER, **one)
            for number, one in enumerate(servers)
        )
        self._client = AsyncTransferQueueClient(name, controller)
        try:  # which greets the controller
            self._client.initialize_storage_manager(
                "SimpleStorage", {"zmq_info": {unit.id: unit for unit in units}}
            )
        except (RuntimeError, TimeoutError) as error:
            raise self._failed("join the stream", str(error)) from error

    def put(self, step: int, groups: list[Group]) -> list[Group]:
        """Store the groups of a step; keep nothing of them. Raises UserError if there is no room,
        or no answer, in time."""
        self._wait_for_room(step)
        tags = {
            (row, number): tag_of(group, episode)
            for row, group in enumerate(groups)
            for number, episode in enumerate(group.episodes)
        }
        stored = places_to_store(groups)
        rows = {(row, number): pack_arrays(groups[row].episodes[number]) for row, number in stored}
        self._call(f"the episodes of step {step + 1}", self._put(step, tags, rows))
        return []

    def take(self, step: int, kept: list[Group], plan: Plan) -> list[Group]:
        """Return the groups of a step with the arrays planned, and placeholders for the others,
        once every rank has what it needs."""
        what = f"the episodes of step {step + 1}"
        tags = self._call(what, self._tags(step))
        if not tags:
            raise self._failed(what, f"no partition {_partition(step)}")
        places = sorted(plan(groups_of(tags, {})))
        arrays = self._call(what, self._arrays(step, places)) if places else {}
        self.wait_for_all()
        return groups_of(tags, arrays)

    def clear(self, step: int) -> None:
        """Drop the partition of a step; `put` of the next one goes on."""
        self._call(
            f"the end of step {step + 1}", self._client.async_clear_partition(_partition(step))
        )
        with self._room:
            self._steps.discard(step)
            self._room.notify_all()

    def close(self) -> None:
        """End this process's connections. A call under way fails."""
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(LOOK_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LOOK_S)
        self._client.close()

    def _wait_for_room(self, step: int) -> None:
        waits = watchdog.waiting_for("trainer", f"room in the stream for step {step + 1}")
        with self._room, waits:
            if not self._room.wait_for(lambda: len(self._steps) < self.capacity, self.timeout_s):
                raise UserError(
                    "the stream has no room for a step's episodes",
                    where=f"step {step + 1}",
                    found=f"{len(self._steps)} steps that are not trained after "
                    f"{self.timeout_s:g} s",
                    expected=f"fewer than {self.capacity} (rollout.staleness + 1)",
                    next="run the same command again to resume; raise run.stall_s if an update "
                    "takes so long",
                )
            self._steps.add(step)

    # In the loop's thread.

    async def _put(self, step: int, tags: Mapping[Place, Tag], rows: Mapping[Place, bytes]) -> None:
        """Store arrays, then tags: who sees a tag finds the arrays."""
        partition = _partition(step)
        meta = await self._client.async_kv_retrieve_meta(
            [key_of(place) for place in tags], partition, create=True
        )
        if rows:
            numbers = {place: number for number, place in enumerate(tags)}
            stored = meta.select_samples([numbers[place] for place in rows])
            column = {FIELD: NonTensorStack(*rows.values())}
            await self._client.async_put(TensorDict(column, batch_size=len(rows)), stored)
        meta.update_custom_meta(metadata_of(tags.values()))
        await self._client.async_set_custom_meta(meta)

    async def _tags(self, step: int) -> dict[Place, Tag]:
        found = await self._client.async_kv_list(_partition(step))
        rows = found.get(_partition(step), {})
        return {place_of(key): json.loads(row["tag"]) for key, row in rows.items()}

    async def _arrays(self, step: int, places: Sequence[Place]) -> dict[Place, dict[str, Array]]:
        """Fetch the arrays of some episodes."""
        meta = await self._client.async_kv_retrieve_meta(
            [key_of(place) for place in places], _partition(step)
        )
        if len(meta) != len(places) or FIELD not in meta.field_names:
            raise RuntimeError(f"{len(meta)} rows with {meta.field_names}, not {len(places)}")
        found = await self._client.async_get_data(meta.select_fields([FIELD]))
        return {place: load(row) for place, row in zip(places, found[FIELD], strict=True)}

    # A call, its deadline and its end.

    def _call(self, what: str, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the loop and return its result. Raises UserError if a process of
        TransferQueue is gone, answers with an error, or not in time."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        until, looks_gone = time.monotonic() + self.timeout_s, 0
        with watchdog.waiting_for("TransferQueue", what):
            while True:
                try:
                    return future.result(min(LOOK_S, self.timeout_s))
                except (RuntimeError, OSError, KeyError, ValueError, SafetensorError):
                    if future.done() and (error := future.exception()) is not None:
                        raise self._failed(what, f"{type(error).__name__}: {error}") from error
                looks_gone = looks_gone + 1 if self._gone() else 0
                if looks_gone == 2 or time.monotonic() > until:
                    future.cancel()
                    raise self._failed(what, f"no answer in {self.timeout_s:g} s")

    def _gone(self) -> list[str]:
        """Return the names of the processes that take no connection."""
        gone = list[str]()
        for number, server in enumerate(self.servers):
            name = f"storage unit {number - 1}" if number else "controller"
            port = server["ports"]["put_get_socket" if number else "request_handle_socket"]
            try:
                socket.create_connection((server["ip"], port), CONNECT_S).close()
            except OSError:
                gone.append(f"{name} at {server['ip']}:{port}")
        return gone

    def _failed(self, what: str, found: str) -> UserError:
        gone = self._gone()
        return UserError(
            "TransferQueue has lost a process" if gone else "TransferQueue has failed",
            where=what,
            found=f"{' and '.join(gone)} is gone" if gone else found,
            next="run the same command again to resume: the journal has the episodes",
        )


def metadata_of(tags: Iterable[Tag]) -> list[dict[str, str]]:
    """Return the metadata of rows: each tag as text, as TransferQueue copies value by value."""
    return [{"tag": json.dumps(tag, separators=(",", ":"))} for tag in tags]


async def _cancel_others() -> None:
    """Cancel what else the loop runs, and wait for its end."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _partition(step: int) -> str:
    return f"train_{step + 1:06d}"
