"""This machine as the place of a run's workers and ranks: cluster.nodes = 0."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import cuda

from tandem.choices import Choice, Report, transport_of
from tandem.config.schema import Config
from tandem.runtime import numerics
from tandem.runtime.errors import UserError
from tandem.runtime.place import Place, here

PROCESSES_PER_CORE = 4  # of a mesh on one machine


class Here(Choice):
    """This machine. plugins/cluster/job.py has the nodes of a cluster in its place."""

    usual_transport = "shm"  # that weights.transport = auto stands for

    def where(self, config: Config) -> str:
        return f"cluster.nodes = {config.cluster.nodes}"

    def own_place(self, config: Config, place: Place) -> Place:
        """Return this process's place among those that see the same GPUs."""
        return place

    def check_ranks(self, config: Config) -> None:
        """Raise UserError if the processes of a mesh would be started here and are far more than
        this machine has cores: they would wait for one another till nobody answers."""
        size, most = config.parallel.processes, PROCESSES_PER_CORE * numerics.cores()
        if size > most and here(os.environ, size).port == 0:
            raise UserError(
                "the mesh has more processes than this machine can run",
                where="the sizes in [parallel]",
                found=f"{size} processes on {numerics.cores()} cores",
                expected=f"at most {most}",
                next="take a smaller mesh, or start it on more machines with torchrun "
                "(docs/guide/parallel.md)",
            )

    def open(
        self, config: Config, folder: Path, *, only_ranks: bool = False
    ) -> AbstractContextManager["Here"]:
        """Open it for a run; the methods below are of what is opened. folder: of the run;
        only_ranks: the run has no workers."""
        return nullcontext(self)

    def worker_devices(self, device: str, ranks: int) -> list[str]:
        """Return the devices that rollout workers take in turn: the GPU of each of so many ranks,
        as rank 0 alone generates without workers. device: the trainer's, e.g. "cuda:3"."""
        gpus = min(ranks, cuda.device_count()) if device.startswith("cuda") else 1
        return [f"cuda:{number}" for number in range(gpus)] if gpus > 1 else [device]

    @contextmanager
    def open_weights(self, config: Config, tensors: Any) -> Iterator[tuple[Any, Any]]:
        """Open the transport of weights to rollout workers; yields the publisher, and what spawns a
        worker elsewhere, or None. tensors: of a version of the weights."""
        with closing(transport_of(config).open(tensors, config.weights.delta)) as weights:
            yield weights, None

    def open_envs(self, config: Config, local: Any, report: Report) -> AbstractContextManager[Any]:
        """Open what runs environments, an EnvPool. local: that of this process, which has found out
        that they can be made."""
        return closing(local)

    def open_rewards(
        self, config: Config, local: Any, report: Report
    ) -> AbstractContextManager[Any]:
        """Open what scores episodes. local: the pool of this machine, which has found out that the
        functions can be loaded."""
        return nullcontext(local)

    @contextmanager
    def start_ranks(
        self, config: Config, command: Sequence[str], place: Place, report: Report
    ) -> Iterator[tuple[Callable[..., Any], Place]]:
        """Open what starts the ranks after 0; yields a function that starts them, and the place
        where they meet. command: of a rank, behind the interpreter."""
        from tandem.trainer.parallel.processes import start_here

        self.check_ranks(config)
        yield start_here([sys.executable, *command]), place
