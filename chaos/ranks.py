"""Chaos for the trainer's processes: one of three is stopped, killed, hung, out of memory or out of
step in the middle of a run, and all end within 30 s with its name.

    python -m chaos.ranks 2      two trials of each fault
"""

import multiprocessing
import random
import re
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from chaos import rank_member
from chaos.results import Case, Result, tally
from tandem.config.parallel import Parallel

TRIALS, SIZE, AT_ONCE = 20, 3, 4
LIMIT_S = 30.0
START_S = 240.0  # of the processes, on a busy machine
STALL_S = {"hung": 20.0, "out of step": 20.0, "a step left out": 20.0}  # to be named within LIMIT_S
SEED = 0
OTHERS = ("tensor", "context", "pipeline", "expert")
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["chaos.rank_member"])


def section(trials: int = TRIALS) -> list[Result]:
    """Try each fault in a mesh of data, and those of a process that goes away in the others."""
    of_data = [
        tally(f"a trainer process {fault}, named within {LIMIT_S:g} s", cases(fault, trials))
        for fault in rank_member.FAULTS
    ]
    return [*of_data, tally("a process stopped or killed, in meshes of the others", other_meshes())]


def other_meshes() -> Iterator[Case]:
    for number, dimension in enumerate(OTHERS):
        for fault in ("stopped", "killed"):
            yield trial(fault, number % SIZE, 10, mesh={dimension: SIZE})


def cases(fault: str, trials: int) -> Iterator[Case]:
    rng = random.Random(f"{SEED} {fault}")
    # an order too many of rank 0 puts nobody out of step
    least = 1 if fault == "a step left out" else 0
    plans = [(rng.randrange(least, SIZE), rng.randrange(5, 50)) for _ in range(trials)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield from pool.map(lambda plan: trial(fault, *plan), plans)


def trial(
    fault: str,
    victim: int,
    at: int,
    timeout_s: float = 20.0,
    mesh: dict[str, int] | None = None,
    stall_s: float = 0.0,
) -> Case:
    """Run the processes of a mesh until they have ended; the last may do so LIMIT_S after a fault.

    timeout_s: as parallel.timeout_s, whose default it is; mesh: its sizes, by default SIZE of data;
    stall_s: as run.stall_s; 0: its default, or that of the fault.
    """
    stall_s = stall_s or STALL_S.get(fault, 300.0)
    config = Parallel(timeout_s=timeout_s, **(mesh or {"data": SIZE}))
    with tempfile.TemporaryDirectory() as place, reserved_port() as port:
        out, plan = Path(place), (fault, victim, at, stall_s)
        processes = [
            CONTEXT.Process(target=rank_member.run, args=(rank, config, port, out, *plan))
            for rank in range(config.processes)
        ]
        for process in processes:
            process.start()
        fired = wait_for(lambda: (out / "fault").exists(), START_S)
        start = time.monotonic()
        others = [process for rank, process in enumerate(processes) if rank != victim]
        ended = wait_for(lambda: not any(process.is_alive() for process in others), LIMIT_S)
        seconds = time.monotonic() - start
        for process in processes:
            process.kill()
            process.join()
        printed = {path.stem: path.read_text() for path in sorted(out.glob("*.txt"))}
    if not ended:
        return fired, f"{fault}, rank {victim}: the others were there after {seconds:.0f} s"
    names = [rank for rank, text in printed.items() if re.search(rf"\brank {victim}\b", text)]
    told = [rank for rank in names if rank != str(victim)]
    if not told:
        return fired, f"{fault}, rank {victim}: not named in {printed}"
    if any(process.exitcode == 0 for process in others):
        return fired, f"{fault}, rank {victim}: one ended as if all were well"
    return fired, ""


def wait_for(condition, seconds: float) -> bool:  # type: ignore[no-untyped-def]
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


@contextmanager
def reserved_port() -> Iterator[int]:
    """Hold a free port, which only those get who ask for it by its number."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


if __name__ == "__main__":
    for row in section(int(sys.argv[1])):
        print(row)
