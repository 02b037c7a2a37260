"""The place of this process among those of a command: given by torchrun or Slurm in the
environment, or by the first one, which starts the others on its machine.

Knows neither torch nor what the processes do.
"""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

# the folder with this package, which `python -m tandem` may find in the working directory alone
PACKAGES = __file__.rsplit(os.sep, 3)[0]
PORT = 29500
NODE = "TANDEM_NODE"  # in the environment: what the cluster calls this machine
# By how a place is named: that of the process it is given to, and not of those that it starts.
_NAMES = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+|TANDEM_NODE"
)


@dataclass(frozen=True)
class Place:
    """The place of a process among those that train."""

    rank: int
    size: int
    local_rank: int  # among those of this machine
    local_size: int
    address: str  # of rank 0
    port: int  # 0: a free one, as this process starts the others
    job: str = ""  # of torchrun or Slurm, which other jobs of these machines do not share
    by_slurm: bool = False
    node: str = ""  # what the cluster calls this machine


def place_from(environment: Mapping[str, str]) -> Place | None:
    """Return the place that torchrun or Slurm gave this process, or the one that started it; None
    if nobody did."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        return Place(
            rank=rank,
            size=size,
            local_rank=int(environment.get("LOCAL_RANK", rank)),
            local_size=int(environment.get("LOCAL_WORLD_SIZE", size)),
            address=environment.get("MASTER_ADDR", "127.0.0.1"),
            port=int(environment.get("MASTER_PORT", PORT)),
            job=environment.get("TORCHELASTIC_RUN_ID", ""),
            node=environment.get(NODE, ""),
        )
    if int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:  # of srun, not of a batch script
        return _by_slurm(environment)
    return None


def here(environment: Mapping[str, str], size: int) -> Place:
    """Return this process's place: the first of `size` on this machine, if nobody gave it one."""
    return place_from(environment) or Place(0, size, 0, size, "127.0.0.1", 0)


def without_place(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that is none of torchrun's and imports this package."""
    own = {name: value for name, value in environment.items() if not _NAMES.fullmatch(name)}
    if sys.path[0] == PACKAGES:
        own["PYTHONPATH"] = os.pathsep.join(filter(None, [PACKAGES, own.get("PYTHONPATH")]))
    return own


def share_of_threads(at_hand: int, environment: Mapping[str, str], size: int) -> int:
    """Return a process's number of threads, of those at hand, when there are `size` of it: its part
    of the machine's. OMP_NUM_THREADS is a process's own, and so are the cores of a task of
    Slurm."""
    place = here(environment, size)
    if "OMP_NUM_THREADS" in environment or place.by_slurm:
        return at_hand
    return max(1, at_hand // place.local_size)


def _by_slurm(environment: Mapping[str, str]) -> Place:
    """Return the place of a task of a step. Its port is that of no other step on the node, unless
    MASTER_PORT names one."""
    rank, size = int(environment["SLURM_PROCID"]), int(environment["SLURM_STEP_NUM_TASKS"])
    # the tasks of each node, "4,2(x3)" -> [4, 2, 2, 2]
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    tasks = [int(tasks) for tasks, nodes in counts for _ in range(int(nodes or 1))]
    node = int(environment.get("SLURM_NODEID", "0"))
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
    found = re.match(r"([^,\[]*)(?:\[(\w+))?", nodes)  # the first host, "gpu[07-09,12]" -> "gpu07"
    first = "".join(found.groups("")) if found else ""
    job, step = int(environment.get("SLURM_JOB_ID", "0")), environment.get("SLURM_STEP_ID", "0")
    return Place(
        rank=rank,
        size=size,
        local_rank=int(environment.get("SLURM_LOCALID", rank)),
        local_size=tasks[node] if node < len(tasks) else size,
        address=environment.get("MASTER_ADDR") or first or "127.0.0.1",
        port=int(environment.get("MASTER_PORT") or 20000 + (job + int(step)) % 10000),
        job=f"{job}.{step}",
        by_slurm=True,
    )
