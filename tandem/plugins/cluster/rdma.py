"""Weight publication by one-sided reads: each worker reads the trainer's memory itself (NIXL).

    trainer's thread             pool's thread                     each worker
    ----------------             -------------                     -----------
    publish(v): copy into   -->  offer(v): the agent's      -->    registers a staging copy,
      registered memory            metadata, the address           reads past the trainer's code,
                                                                   releases; then it loads the copy

NIXL's UCX backend chooses the way: InfiniBand or RoCE where there are such cards, else shared
memory or TCP, where a thread of UCX in the trainer's process answers. No registered memory is freed
before `close`, so a late reader finds other bytes and never memory that is gone. The only user of
NIXL.
"""

import base64
import logging
import os
import time
import uuid
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tandem.weights.shared import Delta, Layout, Memory, SharedWeights, Target

TIMEOUT_S = 600.0  # of one read
POLL_S = 0.0005


class RdmaWeights(SharedWeights):
    """SharedWeights in registered memory."""

    def __init__(self, tensors: dict[str, Tensor], delta: Delta = False):
        super().__init__(tensors, delta)
        self._agent = open_agent(answers=True)
        self._registrations: dict[int, Any] = {}  # by descriptor
        self._metadata = ""

    def offer(self, version: int, workers: Sequence[Target]) -> list[tuple[dict[str, Any], int]]:
        """Tell workers where to read a version; as SharedWeights.offer."""
        offers = []
        for worker in workers:
            sent = self.sent(version, [worker])
            message = self._message("rdma", version, sent)
            with self._lock:
                address = self._published[version].mapped.data_ptr() + sent.at
            offers.append(({**message, "agent": self._metadata, "address": address}, -1))
        return offers

    def _new_memory(self) -> Memory:
        memory = super()._new_memory()
        registration = _register(self._agent, memory.mapped)
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        with self._lock:
            self._registrations[memory.descriptor] = registration
            self._metadata = metadata
        return memory

    def _end_memory(self, memory: Memory) -> None:
        self._agent.deregister_memory(self._registrations.pop(memory.descriptor))
        super()._end_memory(memory)


class Reader:
    """A worker's agent, which reads published weights."""

    def __init__(self) -> None:
        self._agent = open_agent(answers=False)

    def read(self, source: dict[str, Any], layout: Layout) -> dict[str, Tensor]:
        """Read the tensors of an offer. Raises RuntimeError if the trainer's process is gone or
        does not answer."""
        wanted = layout.only(source["names"])
        memory, tensors = wanted.staging()
        try:
            if tensors:
                self._read(source, layout, wanted, memory)
        except Exception as error:  # those of NIXL have no class in common
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        return tensors

    def _read(self, source: dict[str, Any], layout: Layout, wanted: Layout, memory: Tensor) -> None:
        here, there = wanted.offsets(), layout.offsets()
        local = [(memory.data_ptr() + here[n], nbytes, 0) for n, nbytes in wanted.lengths()]
        remote = [(source["address"] + there[n], nbytes, 0) for n, nbytes in wanted.lengths()]
        agent = self._agent
        trainer = agent.add_remote_agent(base64.b64decode(source["agent"]))
        registration = _register(agent, memory)
        try:
            transfer = agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs(local, "DRAM"),
                agent.get_xfer_descs(remote, "DRAM"),
                trainer,
            )
            try:
                ends, state = time.monotonic() + TIMEOUT_S, agent.transfer(transfer)
                while state == "PROC" and time.monotonic() < ends:
                    time.sleep(POLL_S)
                    state = agent.check_xfer_state(transfer)
                if state != "DONE":
                    raise RuntimeError(f"a read of the trainer's memory ended as {state}")
            finally:
                agent.release_xfer_handle(transfer)
        finally:
            agent.deregister_memory(registration)


def _register(agent: Any, memory: Tensor) -> Any:
    return agent.register_memory([(memory.data_ptr(), memory.numel(), 0, "")], "DRAM")


def open_agent(answers: bool) -> Any:
    """Open an agent of NIXL. answers: have a thread that serves others' reads where no card
    does."""
    from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

    if "NIXL_LOG_LEVEL" not in os.environ:
        logging.getLogger("nixl").setLevel(logging.WARNING)
    # the trainer's thread registers while the pool's offers
    config = nixl_agent_config(
        enable_prog_thread=answers,
        backends=["UCX"],
        sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
    )
    return nixl_agent(f"tandem-{uuid.uuid4().hex}", config)
