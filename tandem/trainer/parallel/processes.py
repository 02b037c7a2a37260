"""The trainer's processes: who starts them, what the first one orders, and who is to blame when one
does not come.

    rank 0 (the driver)             a store in its memory           the other ranks
    -------------------             ---------------------           ---------------
    order("learn", step=3)  ----->  order/7                 ----->  next_order()
    thread "ranks": its sign of life, what it waits for  <------->  thread "ranks": the same
      reads those of all                                              reads that of rank 0

Each process says twice a second that it lives, and which others it waits for in which collective.
Rank 0 looks for one that says nothing any more for `timeout_s`, and for one that has not come, in
`stall_s`, to the start or to a collective; the others look whether rank 0 lives. A process that
does nothing in `stall_s` while nobody waits for it is found by its own watchdog. Whoever finds a
culprit writes it into the store, and all end with its name: exit code 3, or 2 if a user's error
ended a rank. Nothing is written after that: run the same command again to resume.

On a GPU a collective's call returns once it is enqueued (NCCL). So an event is recorded before and
behind it, and the collective between whose events the GPU is counts as a wait, too.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tandem.runtime import watchdog
from tandem.runtime.errors import UserError
from tandem.runtime.place import Place, without_place
from tandem.runtime.processes import STARTER, kill_descendants, write_report

LOOK_S = 0.5  # between two signs of life
LOST_S = 5.0  # without a sign of life, once a process has lost a connection
EARLY = 0.95  # of `stall_s`: a wait is blamed before the watchdog ends it without a name
CONNECT_S = 60.0  # at least, for rank 0 to have its store
STALLED, REFUSED = 3, 2  # exit codes
RESUMES = "  next:     the same command resumes from the newest checkpoint"


# Starts the process of a rank, given its place by the environment; returns a Popen, or what has its
# `poll`, `returncode`, `wait` and `kill` (cluster/trainer_ranks.py).
StartRank = Callable[[Mapping[str, str]], Any]


def start_here(command: Sequence[str]) -> StartRank:
    """Return what starts a rank on this machine by a command."""

    def start(place: Mapping[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            env=without_place(os.environ) | {**place, STARTER: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for rank 0
        )

    return start


class Processes:
    """This process and the others. Use `join`."""

    def __init__(
        self, place: Place, store: Any, timeout_s: float, stall_s: float, log: Path | None
    ):
        self.place, self.store, self.log = place, store, log
        self.timeout_s, self.stall_s = timeout_s, stall_s
        self.started: list[Any] = []
        self._orders = 0
        self._waits: list[dict[str, Any]] = []  # the innermost last
        # records an event of the GPU, a torch.cuda.Event; None: calls return when they are done
        self.mark: Callable[[], Any] | None = None
        self._enqueued = deque[tuple[dict[str, Any], Any, Any]]()  # a wait, events around it
        self._count = 0  # of waits
        self._over, self._silent_looks = threading.Event(), 0
        self.joined: float | None = None  # since when all are there, so that a sign can be missed
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
        own: dict[str, Any] = {
            "id": self._count,
            "what": what,
            "ranks": list(ranks),
            "since": time.monotonic(),
        }
        self._waits.append(own)
        try:
            begin = self.mark and self.mark()
            with watchdog.waiting_for("other ranks", what):
                yield
            if self.mark:
                self._enqueued.append((own, begin, self.mark()))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # a lost connection: rank 0 is told, finds whose it was, and ends this process
            self._lost = True
            self._over.wait(self.timeout_s + LOST_S)
            reason = str(error).strip().partition("\n")[0]
            self.fail(f"`{what}` failed on rank {self.rank} ({reason})")
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
            for _ in _looks_for(self.store, key):
                watchdog.heartbeat()  # rank 0 may have none for as long as it likes
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
        store, key = self.store.clone(), f"post/{key}"
        watchdog.heartbeat()
        until = time.monotonic() + self.stall_s - 1
        for _ in _looks_for(store, key):
            if time.monotonic() > until:
                return None
        value = json.loads(store.get(key))
        store.delete_key(key)
        return value

    # ---- who lives

    def start_others(self, start: StartRank, port: int) -> None:
        """Start the other processes."""
        for rank in range(1, self.place.size):
            place = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": self.place.size,
                "LOCAL_WORLD_SIZE": self.place.size,
                "MASTER_ADDR": self.place.address,
                "MASTER_PORT": port,
                "TORCH_CPP_LOG_LEVEL": "ERROR",  # its warnings of a lost rank 0 are stacks of C++
            }
            if self.place.job:
                place["TORCHELASTIC_RUN_ID"] = self.place.job
            self.started.append(start({name: str(value) for name, value in place.items()}))

    def where(self) -> list[tuple[str, int]]:
        """Return the machine and the pid of each process, by its last sign of life."""
        keys = [f"sign/{rank}" for rank in range(self.place.size)]
        signs = [json.loads(self.store.get(key))[1] for key in keys]
        return [(sign["host"], sign["pid"]) for sign in signs]

    def start(self) -> None:
        self._thread.start()

    def fail(self, text: str) -> None:
        """End all processes: write the reason where they look, to stderr and to the log."""
        with suppress(Exception):  # rank 0 may be gone, and the store with it
            reason = json.dumps([text, STALLED])
            if self._last_words.compare_set("failed", "", reason).decode() != reason:
                return  # another one was first
        write_report(f"{text}\n{RESUMES}\n", self.log)
        self._end(STALLED)

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
        if self.rank == 0 and not self.started:
            time.sleep(2 * LOOK_S)  # the others read the reason
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
                host = self.place.node or socket.gethostname()
                sign: dict[str, Any] = {"pid": os.getpid(), "host": host}
                sign |= {"lost": self._lost, "waits": self.list_waits()}
                store.set(f"sign/{self.rank}", json.dumps([count, sign]))
                if store.check(["failed"]):
                    text, code = json.loads(store.get("failed"))
                    if code != REFUSED or self.rank == 0:
                        write_report(f"rank {self.rank} ends: {text}\n", self.log)
                    self._end(code)
                found = self._find_culprit(store, seen)
                if found and not self._over.is_set():  # in good order the others end as well
                    self.fail(found)
            except dist.DistError as error:
                if not self._over.is_set():
                    self.fail(f"rank {self.rank} ends: rank 0 does not answer ({error})")

    def list_waits(self) -> list[dict[str, Any]]:
        """List the innermost wait of the host, and that of the GPU since it was seen in it."""
        now, found = time.monotonic(), self._waits[-1:]
        with suppress(RuntimeError):  # an error of the GPU, which its next copy raises
            while self._enqueued and self._enqueued[0][2].query():
                self._enqueued.popleft()
            for wait, begin, end in list(self._enqueued):  # of several streams
                if begin.query() and not end.query():
                    wait.setdefault("seen", now)
                    found.append({**wait, "since": wait["seen"]})
                    break
        return [{"what": w["what"], "ranks": w["ranks"], "for_s": now - w["since"]} for w in found]

    def _watch_store(self) -> None:
        """End this process if the store, which is in rank 0's memory, answers no more: a call of it
        then never returns. Only looks count, so time in which this process was stopped does not."""
        while not self._over.wait(LOOK_S):
            self._silent_looks += 1
            if self._silent_looks * LOOK_S > self.timeout_s:
                text = f"rank {self.rank} ends: rank 0 has not answered for {self.timeout_s:g} s"
                write_report(text + "\n", self.log)
                self._end(STALLED)

    def _find_culprit(self, store: Any, seen: dict[int, tuple[Any, float]]) -> str:
        """Return who keeps the others waiting, "" if nobody does: rank 0 looks at all, the others
        at rank 0."""
        now = time.monotonic()
        for number, process in enumerate(self.started):
            if process.poll() is not None:
                return f"{self._name(number + 1, seen)} {how_ended(process.returncode)}"
        looked_at = range(self.place.size) if self.rank == 0 else [0]
        for rank in looked_at:
            key = f"sign/{rank}"
            sign = json.loads(store.get(key)) if store.check([key]) else None
            if sign is not None and (rank not in seen or seen[rank][0] != sign):
                seen[rank] = sign, now
        joined = self.joined
        if joined is None and now - self._begun > self.stall_s:
            missing = [rank for rank in looked_at if rank not in seen]
            if missing:
                ranks = ", ".join(map(str, missing))
                return f"not all processes have come in {self.stall_s:g} s: no word of rank {ranks}"
        if joined is None:
            return ""
        lost = any(sign[1]["lost"] for sign, _ in seen.values())
        patience = min(LOST_S, self.timeout_s) if lost else self.timeout_s
        for rank in looked_at:
            silent_s = now - max(joined, seen[rank][1] if rank in seen else joined)
            if silent_s > patience:
                return f"{self._name(rank, seen)} has given no sign of life for {silent_s:.0f} s"
        waits = {rank: sign[1]["waits"] for rank, (sign, _) in seen.items()}
        late, where = find_absent(waits, EARLY * self.stall_s)
        if self.rank or not where:
            return ""
        names = " and ".join(self._name(rank, seen) for rank in late)
        if not late:
            return f"{where} for {EARLY * self.stall_s:.0f} s (run.stall_s)"
        return f"{names} did not come to {where} in {EARLY * self.stall_s:.0f} s (run.stall_s)"

    def _name(self, rank: int, seen: Mapping[int, tuple[Any, float]]) -> str:
        sign = seen.get(rank, (None, 0.0))[0]
        where = f" (pid {sign[1]['pid']} on {sign[1]['host']})" if sign else ""
        return f"rank {rank}{where}"


def _looks_for(store: Any, key: str) -> Iterator[None]:
    """Yield between two looks for a key, less and less often, until it is there."""
    pause = 0.001
    while not store.check([key]):
        yield
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def how_ended(code: int | str) -> str:
    """Describe the exit of a process, which nobody asked it for. code: a text begins with it, and
    says more behind a semicolon."""
    number, semicolon, more = str(code).partition(";")
    was_killed = number == str(-signal.SIGKILL)
    found = "was killed (by hand, or for want of memory)" if was_killed else ""
    return (found or f"has ended, exit code {number}") + semicolon + more


@contextmanager
def join(
    place: Place,
    *,
    timeout_s: float,
    stall_s: float,
    start: StartRank | None = None,
    log: Path | None = None,
) -> Iterator[Processes]:
    """Join the processes at a place. start: starts another one; None if somebody else does."""
    store = _open_store(place, stall_s)
    # the agent's store still has the orders of an attempt that torchrun has ended
    attempt = f"tandem/{place.job}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    own = dist.PrefixStore(attempt, store)  # type: ignore[attr-defined]
    processes = Processes(place, own, timeout_s, stall_s, log)
    if start is not None:
        processes.start_others(start, store.port)
    processes.start()
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    own = dist.PrefixStore("torch", own)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=own, rank=place.rank, world_size=place.size)
    processes.joined, done = time.monotonic(), False
    try:
        yield processes
        done = True
    finally:
        if not done:
            processes.leave(sys.exception())
    processes.end()
    dist.destroy_process_group()


def _open_store(place: Place, stall_s: float) -> Any:
    """Open the store at a place's address, or connect to it: rank 0 may come late, once it has read
    the data."""
    by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # it has the store
    is_master = place.rank == 0 and not by_torchrun
    wait_s = max(CONNECT_S, stall_s)
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            place.address,
            place.port,
            place.size,
            is_master=is_master,
            wait_for_workers=False,
            timeout=timedelta(seconds=wait_s),
        )
    except dist.DistError as error:
        raise UserError(
            "the address of the processes cannot be taken"
            if is_master
            else "rank 0 does not answer",
            where=f"{place.address}:{place.port}",
            found=str(error).strip().partition("\n")[0],
            expected="a free port of this machine" if is_master else f"it within {wait_s:g} s",
            next="set MASTER_ADDR to the machine of rank 0, and MASTER_PORT to a port free there",
        ) from None


# ---- blame, by what each rank waits for

# by rank, the innermost waits of its host and its GPU: in which collective ("what"), with which
# ranks ("ranks"), and since how many seconds ("for_s"), by its last sign of life; [] if it waits
# for nobody
Waits = Mapping[int, Sequence[Mapping[str, Any]]]


def find_absent(waits: Waits, stall_s: float) -> tuple[list[int], str]:
    """Return the ranks that are not in the collective in which one has waited longest, and what it
    waits for; neither if that is less than `stall_s`. Without such a rank it says that all are
    there. In later ones others may wait for those who wait here. An order is no collective: its
    rank waits for as long as rank 0 has none."""
    collectives = [
        (wait["for_s"], rank, (wait["what"], wait["ranks"]))
        for rank, found in waits.items()
        for wait in found
        if rank in wait["ranks"]
    ]
    for_s, first, own = max(collectives, default=(0.0, -1, ("", [])))
    if not collectives or for_s < stall_s:
        return [], ""
    there = {rank: [(w["what"], w["ranks"]) for w in found] for rank, found in waits.items()}
    if absent := [rank for rank in own[1] if own not in there.get(rank, ())]:
        return absent, f"`{own[0]}`, where rank {first} waits,"
    return [], f"all of its ranks have been in `{own[0]}` ({', '.join(map(str, own[1]))})"
