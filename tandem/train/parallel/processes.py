"""The trainer's processes: who starts them, what the first one orders, and who is to blame when one
does not come.

    rank 0 (the driver)             a store in its memory           the other ranks
    -------------------             ---------------------           ---------------
    order("learn", step=3)  ----->  order/7                 ----->  next_order()
    thread "ranks": its sign of life, what it waits for  <------->  thread "ranks": the same
      reads those of all                                              reads that of rank 0

Each process says twice a second that it lives, and which others it waits for in which collective.
Rank 0 looks for one that does not come within `stall_s`, for one that says nothing any more, and
for a circle of waits (out of step); the others look whether rank 0 lives. A wait of `stall_s` is
the watchdog's. Whoever finds a culprit writes it into the
store, and all end with its name: exit code 3, or 2 if a user's error ended a rank. Nothing is
written after that, so the same command goes on from the last checkpoint.

Rank, number of processes and address come from torchrun or Slurm, or are made here.
"""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tandem.runtime import watchdog
from tandem.runtime.errors import UserError
from tandem.runtime.processes import STARTER, kill_descendants, write_report

LOOK_S = 0.5  # between two signs of life
CIRCLE_S = 5.0  # for so long a circle of waits has stood before it is one
LOST_S = 5.0  # without a sign of life, once a process has lost a connection
STALLED, REFUSED = 3, 2  # exit codes


@dataclass(frozen=True)
class Place:
    """The place of a process among those that train."""

    rank: int
    size: int
    local_rank: int  # among those of this machine
    local_size: int
    address: str  # of rank 0
    port: int


def place_from(environment: Mapping[str, str]) -> Place | None:
    """Return the place that torchrun or Slurm gave this process, or `start_others`; None if nobody
    did."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    elif int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:  # of srun, not of a batch script
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
    else:
        return None
    rank, size = int(environment[names[0]]), int(environment[names[1]])
    local, local_size = environment.get(names[2]), environment.get(names[3])
    address = environment.get("MASTER_ADDR") or _first_host(environment.get("SLURM_NODELIST", ""))
    return Place(
        rank=rank,
        size=size,
        local_rank=rank if local is None else int(local),
        local_size=size if local_size is None else int(local_size),
        address=address,
        port=int(environment.get("MASTER_PORT", "29500")),
    )


def local_place(environment: Mapping[str, str], size: int) -> tuple[int, int]:
    """Return this process's number on its machine, and how many there are: 0 of `size` for one that
    starts the others itself."""
    place = place_from(environment)
    return (0, size) if place is None else (place.local_rank, place.local_size)


def _first_host(nodes: str) -> str:
    """Return the first host of a Slurm list. Example: "gpu[07-09,12]" -> "gpu07" """
    found = re.match(r"([^,\[]*)(?:\[(\w+))?", nodes)
    name, number = found.groups("") if found else ("", "")
    return name + number or "127.0.0.1"


class Processes:
    """This process and the others. Use `join`."""

    def __init__(
        self, place: Place, store: Any, timeout_s: float, stall_s: float, log: Path | None
    ):
        self.place, self.store, self.log = place, store, log
        self.timeout_s, self.stall_s = timeout_s, stall_s
        self.started: list[subprocess.Popen[bytes]] = []
        self._orders = 0
        self._waits: list[dict[str, Any]] = []  # the innermost last
        self._count = 0  # of waits
        self._over, self._silent_looks = threading.Event(), 0
        self.joined = False  # whether all are there, so that a sign of life can be missed
        self._begun, self._lost = time.monotonic(), False  # lost: a connection to another
        self._last_words = store.clone()  # made while there is memory
        self._thread = threading.Thread(target=self._watch, name="ranks", daemon=True)

    @property
    def rank(self) -> int:
        return self.place.rank

    @contextmanager
    def announce(self, what: str, ranks: Sequence[int]) -> Iterator[None]:
        """Record that this process waits for others in a collective."""
        self._count += 1
        own = {"id": self._count, "what": what, "ranks": list(ranks), "since": time.monotonic()}
        self._waits.append(own)
        try:
            with watchdog.waiting_for("other ranks", what):
                yield
        except RuntimeError:
            # a lost connection: rank 0 is told, finds whose it was, and ends this process
            self._lost = True
            self._over.wait(self.timeout_s + CIRCLE_S)
            raise
        finally:
            self._waits.remove(own)

    # ---- orders

    def order(self, name: str, **arguments: Any) -> None:
        """Order all other processes to do something; they are JSON."""
        self.store.set(f"order/{self._orders}", json.dumps([name, arguments]))
        self._orders += 1

    def next_order(self) -> tuple[str, dict[str, Any]]:
        """Wait for the next order of rank 0, for as long as it lives."""
        key = f"order/{self._orders}"
        with self.announce("an order", [0]):
            pause = 0.001
            while not self.store.check([key]):
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
        self._orders += 1
        name, arguments = json.loads(self.store.get(key))
        return name, arguments

    # ---- values that the others post

    def post(self, key: str, value: Any) -> None:
        """Post a JSON value for `take`, from any thread."""
        self.store.clone().set(f"post/{key}", json.dumps(value))

    def take(self, key: str) -> Any:
        """Wait for a posted value, in any thread, and remove it; None if it does not come within
        `stall_s`, of which a second is left to say so."""
        store, key, pause = self.store.clone(), f"post/{key}", 0.001
        watchdog.heartbeat()
        until = time.monotonic() + self.stall_s - 1
        while not store.check([key]):
            if time.monotonic() > until:
                return None
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        value = json.loads(store.get(key))
        store.delete_key(key)
        return value

    # ---- who lives

    def start_others(self, command: Sequence[str], port: int) -> None:
        """Start the other processes on this machine."""
        for rank in range(1, self.place.size):
            place = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": self.place.size,
                "LOCAL_WORLD_SIZE": self.place.size,
                "MASTER_ADDR": self.place.address,
                "MASTER_PORT": port,
                STARTER: os.getpid(),
            }
            environment = os.environ | {name: str(value) for name, value in place.items()}
            self.started.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for rank 0
                )
            )

    def start(self) -> None:
        self._thread.start()

    def fail(self, text: str, code: int = STALLED) -> None:
        """End all processes: write the reason where they look, to stderr and to the log."""
        with suppress(Exception):  # rank 0 may be gone, and the store with it
            reason = json.dumps([text, code])
            if self._last_words.compare_set("failed", "", reason).decode() != reason:
                return  # another one was first
        write_report(text + "\n", self.log)
        self._end(code)

    def end(self) -> None:
        """End in good order: rank 0 has the store, so it goes when the others need it no more."""
        self._over.set()  # from now on one that has ended is none that is missing
        if self.rank:
            with suppress(dist.DistError):  # rank 0 waits no longer
                self.store.set(f"end/{self.rank}", "")
        else:
            self.order("stop")
            until = time.monotonic() + self.timeout_s
            others = [f"end/{rank}" for rank in range(1, self.place.size)]
            while others and not self.store.check(others) and time.monotonic() < until:
                time.sleep(0.01)
            for number, process in enumerate(self.started, 1):
                try:
                    process.wait(self.timeout_s)
                except subprocess.TimeoutExpired:
                    write_report(f"rank {number} did not end, and was killed\n", self.log)
                    process.kill()
                    process.wait()
        self._thread.join(self.timeout_s)

    def leave(self, error: BaseException | None) -> None:
        """End the others as this process ends by an error, which its caller reports."""
        self._over.set()
        quiet = isinstance(error, UserError | KeyboardInterrupt)  # rank 0 has told
        code = REFUSED if quiet else STALLED
        with suppress(Exception):
            reason = f"rank {self.rank} has ended: {str(error) or type(error).__name__}"
            self._last_words.compare_set("failed", "", json.dumps([reason, code]))
        for process in self.started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(4 * LOOK_S)
            process.kill()
            process.wait()

    def _end(self, code: int) -> None:
        if self.rank == 0:
            time.sleep(2 * LOOK_S)  # the others read the reason
        kill_descendants(os.getpid())
        os._exit(code)

    def _watch(self) -> None:
        threading.Thread(target=self._watch_store, name="store of the ranks", daemon=True).start()
        store, count = self.store.clone(), 0
        seen: dict[int, tuple[Any, float]] = {}  # by rank: its last sign, and when it was new
        while not self._over.wait(LOOK_S):
            count += 1
            self._silent_looks = 0
            try:
                store.set(f"sign/{self.rank}", json.dumps([count, self._now()]))
                if store.check(["failed"]):
                    text, code = json.loads(store.get("failed"))
                    if code != REFUSED:
                        write_report(f"rank {self.rank} ends: {text}\n", self.log)
                    self._end(code)
                if found := self._find_culprit(store, seen):
                    self.fail(found)
            except dist.DistError as error:
                if not self._over.is_set():
                    self.fail(f"rank {self.rank} ends: rank 0 does not answer ({error})")

    def _watch_store(self) -> None:
        """End this process if the store, which is in rank 0's memory, answers no more: a call of it
        then never returns. Only looks count, so time in which this process was stopped does not."""
        while not self._over.wait(LOOK_S):
            self._silent_looks += 1
            if self._silent_looks * LOOK_S > self.timeout_s:
                text = f"rank {self.rank} ends: rank 0 has not answered for {self.timeout_s:g} s"
                write_report(text + "\n", self.log)
                self._end(STALLED)

    def _now(self) -> dict[str, Any]:
        """Return the pid, and the innermost wait, if this process waits."""
        sign: dict[str, Any] = {"pid": os.getpid(), "host": socket.gethostname()}
        sign["lost"] = self._lost
        with suppress(IndexError):  # it has just ended
            wait = self._waits[-1]
            for_s = time.monotonic() - wait["since"]
            sign["wait"] = {"what": wait["what"], "ranks": wait["ranks"], "for_s": for_s}
        return sign

    def _find_culprit(self, store: Any, seen: dict[int, tuple[Any, float]]) -> str:
        """Return who keeps the others waiting, "" if nobody does: rank 0 looks at all, the others
        at rank 0."""
        now = time.monotonic()
        for number, process in enumerate(self.started):
            if process.poll() is not None:
                return f"{self._name(number + 1, seen)} has ended, exit code {process.returncode}"
        looked_at = range(self.place.size) if self.rank == 0 else [0]
        for rank in looked_at:
            key = f"sign/{rank}"
            sign = json.loads(store.get(key)) if store.check([key]) else None
            if sign is not None and (rank not in seen or seen[rank][0] != sign):
                seen[rank] = sign, now
        if not self.joined and now - self._begun > self.stall_s:
            missing = [rank for rank in looked_at if rank not in seen]
            if missing:
                ranks = ", ".join(map(str, missing))
                return f"not all processes have come in {self.stall_s:g} s: no word of rank {ranks}"
        if not self.joined:
            return ""
        lost = any(sign[1]["lost"] for sign, _ in seen.values())
        patience = min(LOST_S, self.timeout_s) if lost else self.timeout_s
        for rank in looked_at:
            since = seen[rank][1] if rank in seen else self._begun
            if now - since > patience:
                return f"{self._name(rank, seen)} has given no sign of life for {now - since:.0f} s"
        return find_circle(
            {
                rank: sign[1]["wait"]
                for rank, (sign, _) in seen.items()
                if "wait" in sign[1] and sign[1]["wait"]["for_s"] > CIRCLE_S
            }
        )

    def _name(self, rank: int, seen: Mapping[int, tuple[Any, float]]) -> str:
        sign = seen.get(rank, (None, 0.0))[0]
        where = f" (pid {sign[1]['pid']} on {sign[1]['host']})" if sign else ""
        return f"rank {rank}{where}"


def find_circle(waits: Mapping[int, Any]) -> str:
    """Return the members of a circle of waits, which are out of step; "" if there is none. waits:
    by rank, what it waits for and in which ranks."""

    def blocking(rank: int) -> Iterator[int]:
        """Yield those that a rank waits for, and that wait in another collective themselves."""
        own = waits[rank]["what"], waits[rank]["ranks"]
        for other in waits[rank]["ranks"]:
            if other in waits and (waits[other]["what"], waits[other]["ranks"]) != own:
                yield other

    without = set[int]()  # those that no circle can be reached from

    def circle(path: tuple[int, ...]) -> tuple[int, ...]:
        for other in blocking(path[-1]):
            if other in path:
                return path[path.index(other) :]
            if other not in without and (found := circle((*path, other))):
                return found
        without.add(path[-1])
        return ()

    for first in waits:
        if found := circle((first,)):
            reasons = ", ".join(f"rank {rank} waits for `{waits[rank]['what']}`" for rank in found)
            *most, last = map(str, found)
            return f"ranks {', '.join(most)} and {last} are out of step: {reasons}"
    return ""


@contextmanager
def join(
    place: Place,
    *,
    timeout_s: float,
    stall_s: float,
    command: Sequence[str] = (),
    log: Path | None = None,
) -> Iterator[Processes]:
    """Join the processes at a place. command: starts another process of this machine, given its
    place by the environment; empty if somebody else does."""
    by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # it has the store
    store = dist.TCPStore(  # type: ignore[attr-defined]
        place.address,
        place.port,
        place.size,
        is_master=place.rank == 0 and not by_torchrun,
        wait_for_workers=False,
        timeout=timedelta(seconds=max(60.0, timeout_s)),
    )
    # the agent's store still has the orders of an attempt that torchrun has ended
    attempt = f"tandem/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    own = dist.PrefixStore(attempt, store)  # type: ignore[attr-defined]
    processes = Processes(place, own, timeout_s, stall_s, log)
    if command:
        processes.start_others(command, store.port)
    processes.start()
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    own = dist.PrefixStore("torch", own)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=own, rank=place.rank, world_size=place.size)
    processes.joined, done = True, False
    try:
        yield processes
        done = True
    finally:
        if not done:
            processes.leave(sys.exception())
    processes.end()
    dist.destroy_process_group()
