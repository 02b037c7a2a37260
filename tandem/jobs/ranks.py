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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch

from tandem.choices import Report, trainer_of
from tandem.config.schema import Config
from tandem.jobs.here import Here
from tandem.jobs.models import placement
from tandem.run_folder.folder import RunFolder
from tandem.runtime.errors import UserError
from tandem.runtime.place import here
from tandem.trainer.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from tandem.trainer.parallel.processes import Processes


def is_follower(config: Config) -> bool:
    """Tell whether this process is one of the ranks after 0."""
    return config.parallel.processes > 1 and here(os.environ, config.parallel.processes).rank > 0


@contextmanager
def open_ranks(
    config: Config, run: RunFolder, report: Report, machine: Here, run_id: str = ""
) -> Iterator[Ranks]:
    """Open the trainer's processes as rank 0 sees them. Unless torchrun or Slurm has started the
    others, the machine starts them. run_id: of the journal, which only this process computes, as it
    hashes all inputs."""
    place = here(os.environ, config.parallel.processes)
    require_size(place.size, config.parallel.processes)
    if place.size == 1 and trainer_of(config).runs_alone:
        yield ALONE
        return
    from tandem.jobs.input_hashes import function_hashes
    from tandem.trainer.parallel.processes import join

    with ExitStack() as opened:
        start = None
        if place.port == 0:
            command = ["-P", "-m", "tandem", run.command, str(run.recipe.absolute())]
            starting = machine.start_ranks(config, command, place, report)
            start, place = opened.enter_context(starting)
        join_others = join(
            place,
            timeout_s=config.parallel.timeout_s,
            stall_s=config.run.stall_s,
            start=start,
            log=run.path / "log.txt",
        )
        processes = opened.enter_context(join_others)
        functions = function_hashes(config)
        places = {"folder": str(run.path), "recipe": str(run.recipe)}
        processes.order("begin", **places, run_id=run_id, functions=functions)
        yield make_ranks(config, processes)


def make_ranks(config: Config, processes: "Processes") -> Ranks:
    """Make the mesh of the joined processes, for the models of train.backend."""
    from tandem.trainer.parallel.mesh import make_mesh

    device = placement(config).device
    if device.type == "cuda":
        torch.cuda.set_device(device)
        processes.mark = lambda: torch.cuda.current_stream().record_event()
    mesh = make_mesh(config.parallel, device, processes.announce, processes.stall_s)
    ranks: Ranks = trainer_of(config).make_ranks(mesh, processes)
    return ranks


def require_size(found: int, expected: int) -> None:
    """Raise UserError unless as many processes were started as the mesh has."""
    if found != expected:
        raise UserError(
            "the number of processes is not that of the mesh",
            where="torchrun or Slurm",
            found=f"{found} processes",
            expected=f"{expected}, the product of the sizes in [parallel]",
        )
