"""A trainer process that joins others, sums tensors with them, and has one of the faults of
chaos/ranks.py at a step. Some have a stand-in for a GPU: a collective's call returns at once, and a
thread makes the collectives over gloo, in order."""

import os
import queue
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tandem.config.parallel import Parallel
from tandem.runtime import numerics
from tandem.runtime.place import Place
from tandem.trainer.parallel.mesh import WEIGHTS, Mesh, make_mesh
from tandem.trainer.parallel.pipeline import STATES
from tandem.trainer.parallel.processes import Processes, join

STEPS = 200


def run(
    rank: int,
    config: Parallel,
    port: int,
    out: Path,
    fault: str,
    victim: int,
    at: int,
    stall_s: float,
) -> None:
    """Take part until the fault ends it; what it prints is appended to `out`."""
    with (out / f"{rank}.txt").open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    numerics.prepare(1)
    place = Place(rank, config.processes, rank, config.processes, "127.0.0.1", port)
    try:
        with join(place, timeout_s=config.timeout_s, stall_s=stall_s) as processes:
            mesh = make_mesh(config, torch.device("cpu"), processes.announce, stall_s)
            if fault in GPU_FAULTS:
                use_stream(processes)
            for step in range(STEPS):
                if rank == 0:
                    processes.order("learn", step=step)
                else:
                    processes.next_order()
                if rank == victim and step == at:
                    (out / "fault").touch()
                    (FAULTS | GPU_FAULTS)[fault](processes, mesh)
                learn(mesh)
    except Exception:
        traceback.print_exc()
        sys.exit(1)


def learn(mesh: Mesh) -> None:
    """Communicate as a step does over each dimension that the mesh has."""
    layer, rows = mesh.group("tensor"), torch.ones(999, 4)
    stages, context, experts = (mesh.group(n) for n in ("pipeline", "context", "expert"))
    if stages.rank > 0:
        stages.send_and_receive(stages.rank - 1, [], [torch.empty_like(rows)], STATES)
    if stages.rank + 1 < stages.size:
        stages.send_and_receive(stages.rank + 1, [rows], [], STATES)
    layer.sum(rows, "outputs of a layer")
    if context.size > 1:
        context.exchange(rows.view(context.size, -1), "attention heads")
    if experts.size > 1:
        parts = list(rows.chunk(experts.size))
        experts.all_to_all(parts, [torch.empty_like(part) for part in parts], "rows for experts")
    mesh.group(*WEIGHTS).sum(torch.ones(999), "gradients")
    STREAM.mark().wait()  # as the copy of a loss to the host does
    mesh.world.gather(1.0, "norm of the gradients")


def stop(processes: Processes, mesh: Mesh) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def kill(processes: Processes, mesh: Mesh) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exhaust_memory(processes: Processes, mesh: Mesh) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 26), resource.RLIM_INFINITY))
    kept = [torch.ones(1 << 22) for _ in range(64)]
    raise AssertionError(f"{len(kept)} tensors of 16 MiB were allocated")


def get_out_of_step(processes: Processes, mesh: Mesh) -> None:
    mesh.world.gather("another", "results of microbatches")


def leave_one_out(processes: Processes, mesh: Mesh) -> None:
    processes.next_order() if processes.rank else processes.order("learn", step=-1)


def hang(processes: Processes, mesh: Mesh) -> None:
    time.sleep(3600)


class Stream:
    """A stream of a GPU: it does what it is given, in order, while the host goes on."""

    def __init__(self) -> None:
        self.work, self.used = queue.SimpleQueue[Callable[[], object]](), False

    def start(self) -> None:
        self.used = True
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self.work.get()()

    def launch(self, function: Callable[..., object]) -> Callable[..., None]:
        return lambda *args, **options: self.work.put(lambda: function(*args, **options))

    def mark(self) -> "Event":
        event = Event()
        if self.used:
            self.work.put(event.set)
        else:
            event.set()
        return event


class Event(threading.Event):
    query = threading.Event.is_set


STREAM = Stream()


def use_stream(processes: Processes) -> None:
    """Have the stream make the collectives of tensors, as NCCL does."""
    STREAM.start()
    collectives: Any = dist
    for name in ("all_to_all_single", "all_gather_single"):
        setattr(collectives, name, STREAM.launch(getattr(dist, name)))
    processes.mark = STREAM.mark


def hang_kernel(processes: Processes, mesh: Mesh) -> None:
    STREAM.work.put(lambda: time.sleep(3600))


GPU_FAULTS = {"hung beside its GPU": hang, "hung on its GPU": hang_kernel}
FAULTS = {
    "stopped": stop,
    "killed": kill,
    "out of memory": exhaust_memory,
    "out of step": get_out_of_step,
    "a step left out": leave_one_out,
    "hung": hang,
}
