"""Prepares the process as every process of Tandem that computes is.

Processes of pytest-xdist share the cores, and what they start inherits their share; a test of what
a user has without any setting takes OMP_NUM_THREADS out of the environment (tests/invariants).
Without a GPU the kernels run in Triton's interpreter, which must be asked for before triton is
first imported.
"""

import gc
import os
import signal
import sys
from copy import deepcopy

import pytest
import torch
from hypothesis import settings

from tandem.runtime import numerics
from tests.support import selection
from tests.support.leftovers import Session

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as a shell gives to what it starts in the background, and to its children
    signal.signal(signal.SIGINT, signal.default_int_handler)
gc.set_threshold(50_000)  # as the command line has it
processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
share = max(1, torch.get_num_threads() // processes)
if processes > 1:
    os.environ["OMP_NUM_THREADS"] = str(share)
numerics.prepare(share)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# an example may take longer on a busy machine, and the next run has the same ones
settings.register_profile("tandem", deadline=None, derandomize=True)
settings.load_profile("tandem")
os.environ["NO_PROXY"] = "127.0.0.1,localhost"  # the servers of tests

OURS = (
    None if "PYTEST_XDIST_WORKER" in os.environ else Session()
)  # the processes of xdist share the folder of the first
LEFT = []  # paths, at the end


@pytest.fixture(scope="session", autouse=True)
def probed_once(request):
    """Probe a model's shapes once for all runs of this process, and not at a microbatch's rows:
    each would take seconds. Runs in other processes probe as they do."""
    used = {name for item in request.session.items for name in item.fixturenames}
    if "home" not in used and "tests.support.runs" not in sys.modules:  # nobody makes runs
        yield
        return
    from tandem.jobs import engines

    probe, known = engines.probe, {}

    def probe_once(model, seed, threads, microbatch=0):
        about = model.config.to_json_string(), model.dtype, model.kernels.chosen, seed, threads
        key = f"{about} {torch.get_num_threads()} {len(model.adapter_weights())}"
        if key not in known:
            known[key] = probe(model, seed, threads)
        return deepcopy(known[key])

    engines.probe = probe_once
    yield
    engines.probe = probe


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    """Data, models and a recipe for runs of two steps, which no test changes."""
    from tests.support.home import make_home

    return make_home(tmp_path_factory.mktemp("home"), steps=2)


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_collection():
    """Collect no garbage inside 100,000 brackets: there any finalizer is out of stack, an earlier
    test's too, and pytest reports it as this test's."""
    gc.disable()
    yield
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    """Fail a session whose tests left files outside their temporary folders; what failed can be
    looked at."""
    if OURS is None:
        return
    LEFT[:] = OURS.left()
    if LEFT:
        session.exitstatus = exitstatus or pytest.ExitCode.TESTS_FAILED
    elif not exitstatus:
        OURS.remove()


def pytest_addoption(parser):
    parser.addoption("--record-long", action="store_true", help="write tests/long.txt")


def pytest_collection_modifyitems(items):
    selection.mark(items)


def pytest_terminal_summary(terminalreporter):
    """Name the files that were left just above the summary line, where a log's end shows them."""
    if terminalreporter.config.getoption("--record-long"):
        selection.record(terminalreporter.getreports("") + terminalreporter.getreports("passed"))
    if LEFT:
        terminalreporter.section("error: the tests left files behind")
        terminalreporter.write_line("\n".join(LEFT))


@pytest.fixture
def plain_kernels(monkeypatch):
    """The kernels of torch's operators, for what is true of them alone."""
    from tandem.model.kernels import CPU, in_use

    monkeypatch.setitem(in_use, "cpu", CPU)
