"""Programs that hang, each in its own way, under the real watchdog: who is to blame must be said,
and the process ended.

    outcome = run("opposite_locks", folder)
    assert faults(DEADLOCKS["opposite_locks"], outcome) == []

A program says "witness" on its standard output when the trap is shut; one that gets through says
that too.
"""

import os
import re
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from chaos.results import Case, Result, tally
from tandem.runtime import watchdog

DEADLINE_S = 1.5
NAMED_S = 10.0  # from the witness to the end of the process
GIVE_UP_S = 90.0
MARK = "TANDEM_DEADLOCK"  # in the environment of a program and of all that it starts


@dataclass(frozen=True, kw_only=True)
class Deadlock:
    """program: what runs under the watchdog, in a file trap.py; culprit: what the accusation must
    match; also: the rest."""

    program: str
    culprit: str
    also: str = ""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    code: int
    said: str  # standard output
    told: str  # standard error
    log: str
    seconds: float  # from the witness to the end; -1 without a witness
    left: list[str]  # processes that outlived it

    @property
    def accusation(self) -> str:
        return next((line for line in self.told.splitlines() if line.startswith("stalled")), "")


PRELUDE = """
import asyncio, fcntl, os, queue, re, signal, subprocess, sys, threading, time
from concurrent.futures import Future
from pathlib import Path
from tandem.runtime import watchdog
from tandem.runtime.watchdog import beat, waits

def witness(): print("witness", flush=True)

def thread(name, target):
    started = threading.Thread(target=target, name=name, daemon=True)
    started.start()
    return started

def python(program, **options):
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, **options)

"""
ENDING = '\nprint("got through", flush=True)\n'

DEADLOCKS = {
    "opposite_locks": Deadlock(
        program="""
        cache, journal, both = threading.Lock(), threading.Lock(), threading.Barrier(2)
        def take(first, second, of, what):
            with first:
                both.wait()
                with waits(of=of, what=what), second: pass
        first = thread("rollouts", lambda: take(cache, journal, "writer", "the journal's lock"))
        thread("writer", lambda: take(journal, cache, "rollouts", "the cache's lock"))
        while not (cache.locked() and journal.locked()): time.sleep(0.01)
        witness()
        with waits(of="rollouts", what="its end"): first.join()
        """,
        culprit=r"`writer` \(the journal's lock\).*: a deadlock of `(rollouts|writer)` and `(rollouts|writer)`",
    ),
    "three_in_a_circle": Deadlock(
        program="""
        locks, all3 = [threading.Lock() for _ in range(3)], threading.Barrier(4)
        def take(i):
            with locks[i]:
                all3.wait()
                with waits(of=f"part {(i + 1) % 3}", what=f"lock {(i + 1) % 3}"), locks[(i + 1) % 3]: pass
        for i in range(3): thread(f"part {i}", lambda i=i: take(i))
        all3.wait()
        witness()
        with waits(of="part 1", what="its lock"), locks[1]: pass
        """,
        culprit=r"a deadlock of `part \d` and `part \d` and `part \d`",
    ),
    "a_thread_that_ended": Deadlock(
        program="""
        results = queue.Queue()
        writer = thread("rollouts", lambda: beat())  # it gives no result
        def ended():
            writer.join()
            witness()
        thread("witness", ended)
        with waits(of="rollouts", what="the episodes of step 7"): results.get()
        """,
        culprit=r"`trainer` waits for `rollouts` \(the episodes of step 7\), whose thread has ended",
    ),
    "a_lost_completion": Deadlock(
        program="""
        asked, future = queue.Queue(), Future()
        def serve():
            asked.get()  # and forgets it
            witness()
            with waits(of="trainer", what="the next request"): asked.get()
        thread("rollouts", serve)
        asked.put(future)
        with waits(of="rollouts", what="a completion"): future.result()
        """,
        culprit=r"waits for `rollouts` \(a completion\), which waits for `trainer` .*: a deadlock of `trainer` and `rollouts`",
    ),
    "a_full_queue_that_nobody_reads": Deadlock(
        program="""
        episodes = queue.Queue(1)
        def read_nothing():
            beat()
            threading.Event().wait()
        thread("journal", read_nothing)
        episodes.put(1)
        witness()
        with waits(of="journal", what="room for an episode"): episodes.put(2)
        """,
        culprit=r"waits for `journal` \(room for an episode\), which shows no sign of life, at .*trap.py:\d+, read_nothing",
    ),
    "an_empty_queue_whose_writer_waits_for_the_reader": Deadlock(
        program="""
        there, back = queue.Queue(), queue.Queue()
        def write():
            with waits(of="trainer", what="the weights of step 2"): back.get()
            there.put(1)
        thread("rollouts", write)
        witness()
        with waits(of="rollouts", what="the episodes of step 3"): there.get()
        """,
        culprit=r"a deadlock of `trainer` and `rollouts`",
    ),
    "a_call_in_c_that_keeps_the_interpreter": Deadlock(
        program="""
        def search():
            witness()
            re.match("(a+)+$", "a" * 80 + "b")
        search()
        """,
        culprit=r"`trainer` is in a call that lets no other thread run, at .*trap.py:\d+, search",
    ),
    "an_endless_loop": Deadlock(
        program="""
        def spin():
            witness()
            while True: pass
        spin()
        """,
        culprit=r"`trainer` shows no sign of life, at .*trap.py:\d+, spin",
    ),
    "asleep_for_ever": Deadlock(
        program="""
        def sleep():
            beat()
            witness()
            time.sleep(10**6)
        thread("rollouts", sleep)
        with waits(of="rollouts", what="the episodes of step 1"): threading.Event().wait()
        """,
        culprit=r"`rollouts` (.*, which )?shows no sign of life, at .*trap.py:\d+, sleep",
    ),
    "a_stopped_child": Deadlock(
        program="""
        child = python("import time; print(1, flush=True); time.sleep(1); print(2); time.sleep(10**6)")
        child.stdout.readline()
        os.kill(child.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        witness()
        with waits(of="rollout workers", what="an answer"): child.stdout.readline()
        """,
        culprit=r"waits for `rollout workers` \(an answer\), .*process \d+ \(.*\) is stopped by a signal",
    ),
    "a_child_that_never_answers": Deadlock(
        program="""
        child = python(
            "import time; from tandem.runtime.watchdog import dumps_stacks; dumps_stacks(); print('ready', flush=True)\\n"
            "def never_answers(): time.sleep(10**6)\\n"
            "never_answers()"
        )
        assert child.stdout.readline() == b"ready\\n"
        witness()
        with waits(of="rollout workers", what="a completion"): child.stdout.readline()
        """,
        culprit=r"`trainer` waits for `rollout workers` \(a completion\), outside of the threads here",
        also=r"in never_answers",
    ),
    "a_child_that_waits_for_its_input": Deadlock(
        program="""
        child = python("import sys; sys.stdin.read()", stdin=subprocess.PIPE)
        witness()
        with waits(of="environments", what="the exit of a tool"): child.wait()
        """,
        culprit=r"`trainer` waits for `environments` \(the exit of a tool\), outside of the threads here",
        also=r"sys.stdin.read\(\): ",
    ),
    "a_condition_that_nobody_notifies": Deadlock(
        program="""
        changed = threading.Condition()
        def forget():
            with changed: pass  # and does not notify
            with waits(of="reward workers", what="a score"): threading.Event().wait()
        changed.acquire()
        thread("rollouts", forget)
        witness()
        with waits(of="rollouts", what="a change"): changed.wait()
        """,
        culprit=r"`trainer` waits for `rollouts` \(a change\), which waits for `reward workers` \(a score\), outside",
    ),
    "a_barrier_without_its_last_party": Deadlock(
        program="""
        barrier = threading.Barrier(3)
        def meet():
            with waits(of="learner", what="the barrier"): barrier.wait()
        def raises():
            beat()
            sys.exit()
        thread("rollouts", meet)
        third = thread("learner", raises)
        third.join()
        while barrier.n_waiting < 1: time.sleep(0.01)
        witness()
        with waits(of="learner", what="the barrier"): barrier.wait()
        """,
        culprit=r"`(trainer|rollouts)` waits for `learner` \(the barrier\), (whose thread has ended|outside)",
    ),
    "a_file_lock_that_another_process_holds": Deadlock(
        program="""
        held = "import fcntl, time; f = open('lock', 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True); time.sleep(10**6)"
        child = python(held)
        child.stdout.readline()
        witness()
        with waits(of="disk", what="the lock of the run folder"), open("lock") as file: fcntl.flock(file, fcntl.LOCK_EX)
        """,
        culprit=r"`trainer` waits for `disk` \(the lock of the run folder\), outside of the threads here",
        also=r"`trainer`: last sign of life .*trap.py:\d+",
    ),
    "a_coroutine_that_blocks_the_event_loop": Deadlock(
        program="""
        loop = asyncio.new_event_loop()
        thread("environments", loop.run_forever)
        async def blocks():
            witness()
            time.sleep(10**6)
        async def answers(): return 1
        asyncio.run_coroutine_threadsafe(blocks(), loop)
        answer = asyncio.run_coroutine_threadsafe(answers(), loop)
        with waits(of="environments", what="an observation"): answer.result()
        """,
        culprit=r"`trainer` waits for `environments` \(an observation\), which is at .*trap.py:\d+, blocks",
    ),
}


def run(name: str, folder: Path) -> Outcome:
    """Run a deadlock in the folder, which is empty, to its end."""
    watched = f"with watchdog.watching({DEADLINE_S}, log=Path('log.txt')):\n"
    body = textwrap.indent(textwrap.dedent(DEADLOCKS[name].program), "    ")
    (folder / "trap.py").write_text(PRELUDE + watched + body + ENDING)
    mark = f"{folder}/{time.monotonic_ns()}"
    process = subprocess.Popen(
        [sys.executable, "trap.py"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, MARK: mark, "PYTHONPATH": str(Path(watchdog.__file__).parent.parent)},
    )
    told: list[str] = []
    listener = threading.Thread(target=lambda: told.append(process.stderr.read()))
    listener.start()
    killer = threading.Timer(GIVE_UP_S, process.kill)
    killer.start()
    first = process.stdout.readline()
    shut = time.monotonic()
    said = first + process.stdout.read()
    code, end = process.wait(), time.monotonic()
    killer.cancel()
    left = survivors(mark)
    listener.join(GIVE_UP_S)
    log = folder / "log.txt"
    return Outcome(
        code=code,
        said=said,
        told="".join(told),
        log=log.read_text() if log.exists() else "",
        seconds=end - shut if first == "witness\n" else -1.0,
        left=left,
    )


def faults(deadlock: Deadlock, outcome: Outcome) -> list[str]:
    """What is wrong with the outcome; nothing, where the culprit was named in time and nothing is
    left."""
    checks = {
        "no witness": outcome.said == "witness\n",
        f"exit code {outcome.code}": outcome.code == watchdog.EXIT_CODE,
        f"accused: {outcome.accusation}": bool(re.search(deadlock.culprit, outcome.accusation)),
        f"not told: {deadlock.also}": bool(re.search(deadlock.also, outcome.told)),
        "the log does not say so": bool(outcome.accusation) and outcome.accusation in outcome.log,
        "not told how to go on": "the same command resumes" in outcome.told,
        f"ended {outcome.seconds:.1f} s after the witness": 0 <= outcome.seconds <= NAMED_S,
        f"left: {outcome.left}": not outcome.left,
    }
    return [fault for fault, holds in checks.items() if not holds]


def section() -> list[Result]:
    """For `make chaos`: all of them, one after the other."""

    def cases() -> Iterator[Case]:
        for name, deadlock in DEADLOCKS.items():
            with tempfile.TemporaryDirectory() as folder:
                outcome = run(name, Path(folder))
            found = faults(deadlock, outcome)
            yield outcome.seconds >= 0, f"{name}: {'; '.join(found)}" if found else ""

    return [
        tally(
            f"deadlock: the culprit named and the run ended within {NAMED_S:g} s",
            cases(),
            at_least=15,
        )
    ]


def survivors(mark: str, within_s: float = 10.0) -> list[str]:
    """Processes with the mark that are still there after a while, which they need to end."""
    until = time.monotonic() + within_s
    while (found := marked(mark)) and time.monotonic() < until:
        time.sleep(0.05)
    return found


def marked(mark: str) -> list[str]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(f"{pid} {Path(f'/proc/{pid}/cmdline').read_bytes()!r}")
        except OSError:  # it has ended, or is not ours
            continue
    return found


def main() -> int:
    """python -m chaos.deadlocks [NAME]: run all of them, or one, one after the other."""
    names, wrong = sys.argv[1:] or list(DEADLOCKS), 0
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            outcome = run(name, Path(folder))
        found = faults(DEADLOCKS[name], outcome)
        wrong += bool(found)
        print(f"{name}: {outcome.seconds:.1f} s, {'; '.join(found) or outcome.accusation}")
        if found and sys.argv[1:]:
            print(outcome.told)
    print(f"{len(names) - wrong} of {len(names)} deadlocks named, and ended")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
