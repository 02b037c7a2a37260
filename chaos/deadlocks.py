"""Programs that hang, each in its own way, under the real watchdog, which must name the culprit and
end the process.

    outcome = run("opposite_locks", folder)
    assert faults(DEADLOCKS["opposite_locks"], outcome) == []

A program prints "witness" when the trap is shut, and "got through" if it does not hang.
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

from chaos.leftovers import processes_with
from chaos.results import Case, Result, tally
from tandem.runtime import watchdog

ROOT = Path(__file__).parents[1]
DEADLINE_S = 1.5
NAMED_S = 10.0  # from the witness to the end of the process
GIVE_UP_S = 90.0
MARK = "TANDEM_DEADLOCK"  # in the environment of a program and of all that it starts


@dataclass(frozen=True, kw_only=True)
class Deadlock:
    """A program to run under the watchdog, in a file trap.py.

    culprit: a pattern for the report's first line; also: one for the whole report; by_timer:
    whether no Python can run, so that faulthandler's timer ends it and writes the stacks alone.
    """

    program: str
    culprit: str = ""
    also: str = ""
    by_timer: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    code: int
    stdout: str
    stderr: str
    log: str
    seconds: float  # from the witness to the end; -1 without a witness
    survivors: list[str]  # processes that outlived it

    @property
    def finding(self) -> str:
        return next((line for line in self.stderr.splitlines() if line.startswith("stalled")), "")


PRELUDE = """
import asyncio, fcntl, os, queue, re, select, signal, subprocess, sys, threading, time
from concurrent.futures import Future
from pathlib import Path
from tandem.runtime import watchdog
from tandem.runtime.watchdog import heartbeat, waiting_for

def witness(): print("witness", flush=True)

def thread(name, target):
    started = threading.Thread(target=target, name=name, daemon=True)
    started.start()
    return started

def python(program, **options):
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, **options)

def first_line(child):  # which may take long to come, on a busy machine
    while not select.select([child.stdout], [], [], 0.1)[0]: heartbeat()
    return child.stdout.readline()

"""
ENDING = '\nprint("got through", flush=True)\n'

DEADLOCKS = {
    "opposite_locks": Deadlock(
        program="""
        cache, journal, both = threading.Lock(), threading.Lock(), threading.Barrier(2)
        def take(first, second, target, what):
            with first:
                both.wait()
                with waiting_for(target, what), second: pass
        first = thread("rollouts", lambda: take(cache, journal, "writer", "the journal's lock"))
        thread("writer", lambda: take(journal, cache, "rollouts", "the cache's lock"))
        while not (cache.locked() and journal.locked()): time.sleep(0.01)
        witness()
        with waiting_for("rollouts", "its end"): first.join()
        """,
        culprit=r"`writer` \(the journal's lock\).*"
        r": a deadlock of `(rollouts|writer)` and `(rollouts|writer)`",
    ),
    "three_in_a_circle": Deadlock(
        program="""
        locks, all3 = [threading.Lock() for _ in range(3)], threading.Barrier(4)
        def take(i):
            with locks[i]:
                all3.wait()
                after = (i + 1) % 3
                with waiting_for(f"part {after}", f"lock {after}"), locks[after]: pass
        for i in range(3): thread(f"part {i}", lambda i=i: take(i))
        all3.wait()
        witness()
        with waiting_for("part 1", "its lock"), locks[1]: pass
        """,
        culprit=r"a deadlock of `part \d` and `part \d` and `part \d`",
    ),
    "a_thread_that_ended": Deadlock(
        program="""
        results = queue.Queue()
        writer = thread("rollouts", lambda: heartbeat())  # it gives no result
        def ended():
            writer.join()
            witness()
        thread("witness", ended)
        with waiting_for("rollouts", "the episodes of step 7"): results.get()
        """,
        culprit=r"`trainer` waits for `rollouts` \(the episodes of step 7\), "
        "whose thread has ended",
    ),
    "a_lost_completion": Deadlock(
        program="""
        asked, future = queue.Queue(), Future()
        def serve():
            asked.get()  # and forgets it
            witness()
            with waiting_for("trainer", "the next request"): asked.get()
        thread("rollouts", serve)
        asked.put(future)
        with waiting_for("rollouts", "a completion"): future.result()
        """,
        culprit=r"waits for `rollouts` \(a completion\), which waits for `trainer` .*"
        ": a deadlock of `trainer` and `rollouts`",
    ),
    "a_full_queue_that_nobody_reads": Deadlock(
        program="""
        episodes = queue.Queue(1)
        def read_nothing():
            heartbeat()
            threading.Event().wait()
        thread("journal", read_nothing)
        episodes.put(1)
        witness()
        with waiting_for("journal", "room for an episode"): episodes.put(2)
        """,
        culprit=r"waits for `journal` \(room for an episode\), "
        r"which shows no sign of life, at .*trap.py:\d+, read_nothing",
    ),
    "an_empty_queue_whose_writer_waits_for_the_reader": Deadlock(
        program="""
        there, back = queue.Queue(), queue.Queue()
        def write():
            with waiting_for("trainer", "the weights of step 2"): back.get()
            there.put(1)
        thread("rollouts", write)
        witness()
        with waiting_for("rollouts", "the episodes of step 3"): there.get()
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
        also=r"Timeout(.|\n)*trap.py\", line \d+ in search",
        by_timer=True,
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
            heartbeat()
            witness()
            time.sleep(10**6)
        thread("rollouts", sleep)
        with waiting_for("rollouts", "the episodes of step 1"): threading.Event().wait()
        """,
        culprit=r"`rollouts` (.*, which )?shows no sign of life, at .*trap.py:\d+, sleep",
    ),
    "a_stopped_child": Deadlock(
        program="""
        child = python(
            "import time; print(1, flush=True); time.sleep(1); print(2); time.sleep(10**6)"
        )
        first_line(child)
        os.kill(child.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        witness()
        with waiting_for("rollout workers", "an answer"): child.stdout.readline()
        """,
        culprit=r"waits for `rollout workers` \(an answer\), "
        r".*process \d+ \(.*\) is stopped by a signal",
    ),
    "a_child_that_never_answers": Deadlock(
        program="""
        child = python(
            "import faulthandler, signal, time\\n"
            "faulthandler.register(signal.SIGUSR1, file=2); print('ready', flush=True)\\n"
            "def never_answers(): time.sleep(10**6)\\n"
            "never_answers()"
        )
        assert first_line(child) == b"ready\\n"
        witness()
        with waiting_for("rollout workers", "a completion"): child.stdout.readline()
        """,
        culprit=r"`trainer` waits for `rollout workers` \(a completion\), "
        "outside of the threads here",
        also=r"in never_answers",
    ),
    "a_child_that_waits_for_its_input": Deadlock(
        program="""
        child = python("import sys; sys.stdin.read()", stdin=subprocess.PIPE)
        witness()
        with waiting_for("environments", "the exit of a tool"): child.wait()
        """,
        culprit=r"`trainer` waits for `environments` \(the exit of a tool\), "
        "outside of the threads here",
        also=r"sys.stdin.read\(\): ",
    ),
    "a_condition_that_nobody_notifies": Deadlock(
        program="""
        changed = threading.Condition()
        def forget():
            with changed: pass  # and does not notify
            with waiting_for("reward workers", "a score"): threading.Event().wait()
        changed.acquire()
        thread("rollouts", forget)
        witness()
        with waiting_for("rollouts", "a change"): changed.wait()
        """,
        culprit=r"`trainer` waits for `rollouts` \(a change\), "
        r"which waits for `reward workers` \(a score\), outside",
    ),
    "a_barrier_without_its_last_party": Deadlock(
        program="""
        barrier = threading.Barrier(3)
        def meet():
            with waiting_for("learner", "the barrier"): barrier.wait()
        def raises():
            heartbeat()
            sys.exit()
        thread("rollouts", meet)
        third = thread("learner", raises)
        third.join()
        while barrier.n_waiting < 1: time.sleep(0.01)
        witness()
        with waiting_for("learner", "the barrier"): barrier.wait()
        """,
        culprit=r"`(trainer|rollouts)` waits for `learner` \(the barrier\), "
        "(whose thread has ended|outside)",
    ),
    "a_file_lock_that_another_process_holds": Deadlock(
        program="""
        child = python(
            "import fcntl, time; f = open('lock', 'w'); fcntl.flock(f, fcntl.LOCK_EX); "
            "print(1, flush=True); time.sleep(10**6)"
        )
        first_line(child)
        witness()
        with waiting_for("disk", "the lock of the run folder"), open("lock") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
        """,
        culprit=r"`trainer` waits for `disk` \(the lock of the run folder\), "
        "outside of the threads here",
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
        with waiting_for("environments", "an observation"): answer.result()
        """,
        culprit=r"`trainer` waits for `environments` \(an observation\), "
        r"which is at .*trap.py:\d+, blocks",
    ),
}


def run(name: str, folder: Path) -> Outcome:
    """Run a deadlock to its end, in an empty folder."""
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
        env={**os.environ, MARK: mark, "PYTHONPATH": str(ROOT)},
    )
    errors: list[str] = []
    listener = threading.Thread(target=lambda: errors.append(process.stderr.read()))
    listener.start()
    killer = threading.Timer(GIVE_UP_S, process.kill)
    killer.start()
    first = process.stdout.readline()
    shut = time.monotonic()
    stdout = first + process.stdout.read()
    code, end = process.wait(), time.monotonic()
    killer.cancel()
    left = survivors(mark)
    listener.join(GIVE_UP_S)
    log = folder / "log.txt"
    return Outcome(
        code=code,
        stdout=stdout,
        stderr="".join(errors),
        log=log.read_text() if log.exists() else "",
        seconds=end - shut if first == "witness\n" else -1.0,
        survivors=left,
    )


def faults(deadlock: Deadlock, outcome: Outcome, named_s: float = NAMED_S) -> list[str]:
    """List what is wrong with the outcome: the culprit, the time, the exit code, survivors."""
    by_timer = deadlock.by_timer
    checks = {
        "no witness": outcome.stdout == "witness\n",
        f"exit code {outcome.code}": outcome.code == (1 if by_timer else watchdog.EXIT_CODE),
        f"found: {outcome.finding}": bool(re.search(deadlock.culprit, outcome.finding)),
        f"not told: {deadlock.also}": bool(re.search(deadlock.also, outcome.stderr)),
        "the log does not say so": by_timer or outcome.finding in outcome.log,
        "not told how to go on": by_timer or "the same command resumes" in outcome.stderr,
        f"ended {outcome.seconds:.1f} s after the witness": 0 <= outcome.seconds <= named_s,
        f"left: {outcome.survivors}": not outcome.survivors,
    }
    return [fault for fault, holds in checks.items() if not holds]


def section() -> list[Result]:
    """Run all deadlocks, one after the other, for `make chaos`."""

    def cases() -> Iterator[Case]:
        for name, deadlock in DEADLOCKS.items():
            with tempfile.TemporaryDirectory() as folder:
                outcome = run(name, Path(folder))
            wrong = faults(deadlock, outcome)
            yield outcome.seconds >= 0, f"{name}: {'; '.join(wrong)}" if wrong else ""

    return [
        tally(
            f"deadlock: the culprit named and the run ended within {NAMED_S:g} s",
            cases(),
            at_least=15,
        )
    ]


def survivors(mark: str, within_s: float = 10.0) -> list[str]:
    """List the processes with the mark that do not end within a while."""
    until = time.monotonic() + within_s
    while (alive := processes_with(f"{MARK}={mark}")) and time.monotonic() < until:
        time.sleep(0.05)
    return [process.describe().strip() for process in alive]


def main() -> int:
    """Run `python -m chaos.deadlocks [NAME]`: all deadlocks, or one."""
    names, wrong = sys.argv[1:] or list(DEADLOCKS), 0
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            outcome = run(name, Path(folder))
        faulty = faults(DEADLOCKS[name], outcome)
        wrong += bool(faulty)
        print(f"{name}: {outcome.seconds:.1f} s, {'; '.join(faulty) or outcome.finding}")
        if faulty and sys.argv[1:]:
            print(outcome.stderr)
    print(f"{len(names) - wrong} of {len(names)} deadlocks named, and ended")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
