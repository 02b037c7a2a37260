"""Sections [stream], [weights] and [cluster]: a run on several machines."""

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from tandem.config.section import Section, name_of


class Stream(Section):
    """The way of samples from the rollouts to the processes that train."""

    kind: Annotated[str, name_of("streams")] = Field(
        "memory",
        description="memory: the trainer's own; the other ranks read the run folder. "
        "transfer_queue: TransferQueue on a Ray cluster, where the driver holds metadata only",
    )


class Weights(Section):
    """The way of weights from the trainer to rollout workers."""

    transport: Annotated[str, name_of("transports", "auto")] = Field(
        "auto",
        description="shm: shared memory of one machine; cuda_ipc: memory of the trainer's GPU; "
        "ray: Ray's object store; collective: a broadcast by torch.distributed (gloo, NCCL between "
        "GPUs); rdma: each worker reads from the trainer's memory (NIXL); auto: shm on one "
        "machine, ray on a cluster",
    )
    delta: bool | Literal["elements"] = Field(
        False,
        description="true: send only the tensors that have changed; elements: of these only the "
        "elements that have, where that is shorter",
    )


class Cluster(Section):
    """The Ray cluster that a run starts or joins."""

    nodes: int = Field(
        0, ge=0, description="nodes of the Ray cluster that rollout workers run on; 0: no Ray"
    )
    address: str = Field(
        "", description="a running Ray cluster, as HOST:PORT; empty: started on this machine"
    )

    reward_workers: int = Field(
        0,
        ge=0,
        description="most Ray actors that score, each with reward.workers processes; one joins "
        "when calls wait and leaves when idle; 0: the driver's machine scores",
    )
    env_workers: int = Field(
        0,
        ge=0,
        description="most Ray actors that run the environments of episodes; one joins when new "
        "episodes wait and leaves when idle; 0: the trainer's own process runs them",
    )
    placement: Literal["spread", "pack"] | list[str] = Field(
        "spread",
        description="rollout workers: spread over the nodes; pack: on the driver's node first; or "
        "the names or addresses of their nodes",
    )
    trainers: Literal["driver", "ray"] = Field(
        "driver",
        description="ranks after 0 of [parallel]. driver: processes of the driver's machine, or "
        "those of torchrun or Slurm; ray: processes on the nodes, the driver's first",
    )

    def contradictions(self) -> Iterator[str]:
        if self.placement == []:
            yield "cluster.placement: a list names at least one node"
        if self.address and not re.fullmatch(r"[^\s:/]+:[0-9]{1,5}", self.address):
            yield "cluster.address: expected HOST:PORT, as `ray start --head` prints it"
