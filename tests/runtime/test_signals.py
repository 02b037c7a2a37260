import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from tandem.runtime import signals
from tandem.runtime.processes import state_of

PATIENCE_S = 60.0
PRELUDE = """
import hashlib, signal, subprocess, sys, threading, time
from tandem.runtime import signals
def ready(): print("ready", flush=True)
def until_signalled():
    while not signals._section.signalled: time.sleep(0.01)
"""
ENDING = """
except KeyboardInterrupt:
    print("interrupted")
    sys.exit(130)
print("got through")
"""


def start(program):
    """A process of the program, in a `try` that takes KeyboardInterrupt as the command line does;
    it has said "ready"."""
    body = textwrap.indent(textwrap.dedent(program), "    ")
    process = subprocess.Popen(
        [sys.executable, "-c", f"{PRELUDE}try:\n{body}{ENDING}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    return process


def ending(process):
    """(exit code, standard output since "ready")"""
    output, told = process.communicate(timeout=PATIENCE_S)
    assert "Traceback" not in told
    return process.returncode, output


@pytest.mark.parametrize("number", signals.SIGNALS)
def test_the_first_signal_interrupts_what_waits_and_lets_it_clean_up(number):
    process = start("""
        with signals.on_signals():
            try:
                ready()
                threading.Event().wait()
            finally:
                print("saved")
    """)
    process.send_signal(number)
    assert ending(process) == (130, "saved\ninterrupted\n")


def test_a_held_section_is_not_cut_in_two():
    process = start("""
        with signals.on_signals():
            with signals.held(60.0):
                with signals.held(60.0):
                    ready()
                    until_signalled()
                    print("inner")
                print("outer")
            print("after")
    """)
    process.send_signal(signal.SIGTERM)
    assert ending(process) == (130, "inner\nouter\ninterrupted\n")


def test_a_held_section_that_goes_on_is_cut_at_its_limit():
    process = start("""
        with signals.on_signals(), signals.held(60.0), signals.held(0.2):
            ready()
            threading.Event().wait()
    """)
    process.send_signal(signal.SIGINT)
    assert ending(process) == (130, "interrupted\n")


def test_a_part_of_a_held_section_may_be_interruptible():
    process = start("""
        with signals.on_signals(), signals.held(60.0):
            with signals.interruptible():
                pass
            with signals.interruptible():
                ready()
                threading.Event().wait()
    """)
    process.send_signal(signal.SIGINT)
    assert ending(process) == (130, "interrupted\n")


def test_a_signal_that_came_before_an_interruptible_part_is_told_at_its_beginning():
    process = start("""
        with signals.on_signals(), signals.held(60.0):
            ready()
            until_signalled()
            print("held")
            with signals.interruptible():
                print("begun")
    """)
    process.send_signal(signal.SIGINT)
    assert ending(process) == (130, "held\ninterrupted\n")


def test_a_section_that_fails_is_interrupted_all_the_same():
    process = start("""
        with signals.on_signals():
            try:
                with signals.held(60.0):
                    ready()
                    until_signalled()
                    raise OSError("disk")
            except OSError:
                print("went on")
    """)
    process.send_signal(signal.SIGINT)
    assert ending(process) == (130, "interrupted\n")


@pytest.mark.parametrize(
    "busy", ["hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)", "threading.Event().wait()"]
)
def test_a_second_signal_ends_the_process_and_what_it_started_also_while_it_is_in_c(busy):
    process = start(f"""
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10**6)"], start_new_session=True)
        signals.EXIT_S = 10**6
        with signals.on_signals():
            try:
                ready()
                print(child.pid, flush=True)
                {busy}
            finally:
                {busy}
    """)
    child = int(process.stdout.readline())
    process.send_signal(signal.SIGINT)
    time.sleep(signals.AGAIN_S + 0.3)
    assert process.poll() is None and state_of(child) == "S"
    process.send_signal(signal.SIGTERM)
    assert ending(process) == (130, "")
    assert gone(child)


def gone(pid):
    until = time.monotonic() + PATIENCE_S
    while state_of(pid) not in ("", "Z") and time.monotonic() < until:
        time.sleep(0.02)
    return state_of(pid) in ("", "Z")


def test_what_has_not_ended_in_time_is_ended():
    process = start("""
        signals.EXIT_S = 1.0
        hanging = threading.Thread(target=threading.Event().wait)
        hanging.start()  # the interpreter waits for it at its own end
        with signals.on_signals():
            ready()
            threading.Event().wait()
    """)
    process.send_signal(signal.SIGINT)
    assert ending(process)[0] == 130


def test_the_same_signal_passed_on_by_a_launcher_is_no_second_one():
    process = start("""
        signals.AGAIN_S = 30.0
        with signals.on_signals():
            try:
                ready()
                threading.Event().wait()
            finally:
                print("cleaning", flush=True)
                time.sleep(0.5)
                print("saved")
    """)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "cleaning\n"
    process.send_signal(signal.SIGINT)
    assert ending(process) == (130, "saved\ninterrupted\n")


def test_without_a_signal_everything_is_as_it_was_before():
    handlers = [signal.getsignal(number) for number in (*signals.SIGNALS, signal.SIGALRM)]
    with signals.on_signals(), signals.held():
        assert [signal.getsignal(number) for number in signals.SIGNALS] != handlers[:2]
        assert "signals" in {thread.name for thread in threading.enumerate()}
    assert [signal.getsignal(number) for number in (*signals.SIGNALS, signal.SIGALRM)] == handlers
    assert "signals" not in {thread.name for thread in threading.enumerate()}
    assert signal.set_wakeup_fd(-1) == -1


def test_in_another_thread_nothing_is_done():
    handler, seen = signal.getsignal(signal.SIGINT), []

    def run():
        with signals.on_signals(), signals.held():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [handler]
