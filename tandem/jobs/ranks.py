"""The trainer's processes of a command, as rank 0 sees them: it runs the command as one process
would, and the others do their part of each step, on its orders (follow.py).

    rank 0                                      the others
    ------                                      ----------
    open_ranks: starts them  -- "begin" ----->  the same config, inputs and models
    a step: rollouts, journal
    before_updates           -- "learn" ----->  the same groups, out of the stream
    learn_step  <---- gradients, log-probs ---> learn_step
    Learner.publish          -- "publish" --->  send their parts
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING

import torch

from tandem.config.schema import Config
from tandem.jobs.input_hashes import function_hashes
from tandem.jobs.models import placement
from tandem.run_folder.folder import RunFolder
from tandem.runtime import numerics
from tandem.runtime.errors import UserError
from tandem.runtime.place import here
from tandem.train.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from tandem.plugins.cluster.ray_cluster import RayCluster
    from tandem.train.parallel.processes import Processes

PROCESSES_PER_CORE = 4  # of a mesh on one machine


def is_follower(config: Config) -> bool:
    """Tell whether this process is one of the ranks after 0."""
    return config.parallel.processes > 1 and here(os.environ, config.parallel.processes).rank > 0


@contextmanager
def open_ranks(
    config: Config,
    run: RunFolder,
    report: Callable[[str], None],
    run_id: str = "",
    cluster: "RayCluster | None" = None,
) -> Iterator[Ranks]:
    """Open the trainer's processes as rank 0 sees them. Unless torchrun or Slurm has started the
    others, they are started on this machine, or on the cluster (cluster.trainers). run_id: of its
    journal, which only this process computes, as it hashes all inputs."""
    if config.parallel.processes == 1 and config.train.backend == "tandem":
        require_size(here(os.environ, 1).size, 1)
        yield ALONE
        return
    from tandem.train.parallel.processes import join, start_here

    place = here(os.environ, config.parallel.processes)
    require_size(place.size, config.parallel.processes)
    with ExitStack() as opened:
        start = None
        if place.port == 0:
            require_cores(config)
            command = ["-m", "tandem", run.command, str(run.path.absolute() / "config.toml")]
            start = start_here([sys.executable, *command])
            if cluster is not None and config.cluster.trainers == "ray":
                others = cluster.open_ranks(command, place.size - 1, report)
                start, place = opened.enter_context(closing(others)).start, others.meet(place)
        join_others = join(
            place,
            timeout_s=config.parallel.timeout_s,
            stall_s=config.run.stall_s,
            start=start,
            log=run.path / "log.txt",
        )
        processes = opened.enter_context(join_others)
        functions = function_hashes(config)
        processes.order("begin", folder=str(run.path), run_id=run_id, functions=functions)
        yield make_ranks(config, processes)


def make_ranks(config: Config, processes: "Processes") -> Ranks:
    """Make the mesh of the joined processes, for the models of train.backend."""
    from tandem.train.parallel.mesh import make_mesh

    device = placement(config).device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    mesh = make_mesh(config.parallel, device, processes.announce, processes.stall_s)
    if config.train.backend == "megatron":
        from tandem.plugins.megatron.ranks import MegatronRanks

        return MegatronRanks(mesh, processes)
    from tandem.train.parallel.ranks import ParallelRanks

    return ParallelRanks(mesh, processes)


def require_cores(config: Config) -> None:
    """Raise UserError if the processes of a mesh would be started here and are far more than this
    machine has cores: they would wait for one another till nobody answers."""
    size, most = config.parallel.processes, PROCESSES_PER_CORE * numerics.cores()
    is_here = config.cluster.trainers == "driver" and here(os.environ, size).port == 0
    if size > most and is_here:
        raise UserError(
            "the mesh has more processes than this machine can run",
            where="the sizes in [parallel]",
            found=f"{size} processes on {numerics.cores()} cores",
            expected=f"at most {most}",
            next="take a smaller mesh, or start it on more machines with torchrun "
            "(docs/parallel.md)",
        )


def require_size(found: int, expected: int) -> None:
    """Raise UserError unless as many processes were started as the mesh has."""
    if found != expected:
        raise UserError(
            "the number of processes is not that of the mesh",
            where="torchrun or Slurm",
            found=f"{found} processes",
            expected=f"{expected}, the product of the sizes in [parallel]",
        )
