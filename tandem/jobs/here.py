"""This machine as the place of a run's workers and ranks: cluster.nodes = 0."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from tandem.choices import Machine, Report, transport_of
from tandem.config.schema import Config
from tandem.runtime import numerics
from tandem.runtime.errors import UserError
from tandem.runtime.place import Place, here

PROCESSES_PER_CORE = 4  # of a mesh on one machine


class Here(Machine):
    """This machine; what it opens needs no closing of its own."""

    usual_transport = "shm"

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
                "(docs/parallel.md)",
            )

    def open(
        self, config: Config, folder: Path, *, only_ranks: bool = False
    ) -> AbstractContextManager[Machine]:
        return nullcontext(self)

    @contextmanager
    def open_weights(self, config: Config, tensors: Any) -> Iterator[tuple[Any, None]]:
        with closing(transport_of(config).open(tensors, config.weights.delta)) as weights:
            yield weights, None

    def open_envs(self, config: Config, local: Any, report: Report) -> AbstractContextManager[Any]:
        return closing(local)

    def open_rewards(
        self, config: Config, local: Any, report: Report
    ) -> AbstractContextManager[Any]:
        return nullcontext(local)

    @contextmanager
    def start_ranks(
        self, config: Config, command: Sequence[str], place: Place, report: Report
    ) -> Iterator[tuple[Callable[..., Any], Place]]:
        from tandem.train.parallel.processes import start_here

        self.check_ranks(config)
        yield start_here([sys.executable, *command]), place
