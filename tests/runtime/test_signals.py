import signal
import textwrap
import time

import pytest

from tandem.runtime import signals
from tandem.runtime.processes import started_at
from tests.support.command import started
from tests.support.waiting import WAIT_S, eventually

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
    """Start a program that catches KeyboardInterrupt as the command line does."""
    body = textwrap.indent(textwrap.dedent(program), "    ")
    return started(f"{PRELUDE}try:\n{body}{ENDING}")


def finish(process):
    """(exit code, standard output since "ready")"""
    output, errors = process.communicate(timeout=WAIT_S)
    assert "Traceback" not in errors
    return process.returncode, output


@pytest.mark.parametrize("number", signals.SIGNALS)
def test_first_signal_interrupts_a_wait_and_lets_it_clean_up(number):
    process = start("""
        with signals.handle_signals():
            try:
                ready()
                threading.Event().wait()
            finally:
                print("saved")
    """)
    process.send_signal(number)
    assert finish(process) == (130, "saved\ninterrupted\n")


NESTED = """
    with signals.defer_interrupts(60.0):
        with signals.defer_interrupts(60.0):
            ready()
            until_signalled()
            print("inner")
        print("outer")
    print("after")
"""
ALLOWED = """
    with signals.defer_interrupts(60.0):
        with signals.allow_interrupts():
            pass
        with signals.allow_interrupts():
            ready()
            threading.Event().wait()
"""
ALLOWED_LATER = """
    with signals.defer_interrupts(60.0):
        ready()
        until_signalled()
        print("deferred")
        with signals.allow_interrupts():
            print("begun")
"""
FAILING = """
    try:
        with signals.defer_interrupts(60.0):
            ready()
            until_signalled()
            raise OSError("disk")
    except OSError:
        print("went on")
"""


@pytest.mark.parametrize(
    ("section", "said"),
    [(NESTED, "inner\nouter\n"), (ALLOWED, ""), (ALLOWED_LATER, "deferred\n"), (FAILING, "")],
    ids=["nested", "allowed", "allowed later", "failing"],
)
def test_signal_interrupts_at_the_end_of_deferring_sections(section, said):
    process = start(f"with signals.handle_signals():{section}")
    process.send_signal(signal.SIGINT)
    assert finish(process) == (130, f"{said}interrupted\n")


@pytest.mark.parametrize(
    "busy", ["hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)", "threading.Event().wait()"]
)
def test_second_signal_kills_the_process_and_its_children(busy):
    process = start(f"""
        sleep = [sys.executable, "-c", "import time; time.sleep(10**6)"]
        child = subprocess.Popen(sleep, start_new_session=True)
        signals.EXIT_S, signals.AGAIN_S = 10**6, 0.01
        with signals.handle_signals():
            try:
                ready()
                print(child.pid, flush=True)
                {busy}
            finally:
                {busy}
    """)
    child = int(process.stdout.readline())
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)  # both signals at once would be one
    assert process.poll() is None and started_at(child)
    process.send_signal(signal.SIGTERM)
    assert finish(process) == (130, "")
    assert eventually(lambda: not started_at(child))


def test_process_that_hangs_after_a_signal_is_ended():
    process = start("""
        signals.EXIT_S = 1.0
        hanging = threading.Thread(target=threading.Event().wait)
        hanging.start()  # the interpreter waits for it at its own end
        with signals.handle_signals():
            ready()
            threading.Event().wait()
    """)
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 130


def test_signal_passed_on_by_a_launcher_is_not_a_second_one():
    process = start("""
        signals.AGAIN_S = 30.0
        with signals.handle_signals():
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
    assert finish(process) == (130, "saved\ninterrupted\n")
