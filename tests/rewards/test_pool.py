"""Real worker processes against hostile reward functions: each costs its own sample and nothing
else."""

import os
import signal
import socket
import sys
import threading
import time
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tandem.rewards.parts import BadValue, weigh
from tandem.rewards.pool import RewardPool
from tandem.rewards.protocol import MAX_CHARS
from tandem.runtime.errors import UserError
from tandem.runtime.processes import started_at
from tandem.types import Attempt, Problem
from tandem.workers import host
from tests.support.scoring import (
    FakeClock,
    in_flight,
    score_all,
    scores_of,
    scores_of_some_that_hang,
    submit_all,
    time_out,
)
from tests.support.waiting import WAIT_S, eventually

FILE = Path(__file__).parents[1].joinpath("support", "hostile_rewards.py")
HOSTILE = f"{FILE}:score"
ASKED = ({"role": "user", "content": "?"},)
PROBLEM = Problem(uid="p/1", messages=ASKED, answer="", metadata={"level": 3})
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="rlimits and prctl are Linux's")

# what the completion does -> (reward, start of the error, kind of failure)
HARMLESS = {"fine": 0.25, "true": 1.0, "float32": 0.5, "parts": 1.5, "total": 2.0, "echo": 4.0}
HARMLESS |= {"print": 0.5, "interrupt": 0.75}
HARMS = {
    "loop": ("timeout after 30.0 s", "timeout"),
    "long c call": ("timeout after 30.0 s", "timeout"),
    "exit": ("worker died: it ended with exit code 7", "died"),
    "segfault": ("worker died: it was ended by SIGSEGV", "died"),
    "forge": ("worker died: it wrote what is not an answer", "died"),
    "sys.exit": ("SystemExit: 3 at ", "exception"),
    "raise": (f"ValueError: the user's own mistake at {FILE}:", "exception"),
    "raise long": ("ValueError: xxx", "exception"),
    "raise unreadable": ("_Unreadable: (its text cannot be read)", "exception"),
    "recurse": ("RecursionError", "exception"),
    "input": ("EOFError", "exception"),
    "nan": ("the reward is nan, expected a finite number", "bad_value"),
    "inf part": ("part 'extra' is inf", "bad_value"),
    "huge int": ("the reward is inf", "bad_value"),
    "overflow": ("the sum of the parts is inf", "bad_value"),
    "string": ("the reward is of type str ('1.0'), expected a float", "bad_value"),
    "none": ("the reward is of type NoneType", "bad_value"),
    "empty dict": ("expected a dict of 1 to 64 parts", "bad_value"),
    "many parts": ("expected a dict of 1 to 64 parts", "bad_value"),
    "int keys": ("expected a dict of 1 to 64 parts", "bad_value"),
}


# no harmless text takes so long on the busiest machine; where a text hangs, the clock is moved
LIMIT_S = 30.0


def hostile_pool(workers=1, timeout_s=LIMIT_S, clock=time.monotonic):
    return RewardPool(HOSTILE, timeout_s=timeout_s, workers=workers, clock=clock)


def gone(pid, *, within_s=WAIT_S):
    """Wait until the process ends; a zombie that nobody has waited for has."""
    return eventually(lambda: not started_at(pid), within_s=within_s)


@pytest.fixture(scope="module")
def all_harms():
    """Every harm once, each between two harmless texts, at once: (acts, scores, failures)."""
    acts = [act for harm in HARMS for act in ("fine", harm, "total")] + list(HARMLESS)
    hung = [harm for harm, (_, kind) in HARMS.items() if kind == "timeout"]
    clock = FakeClock()
    with hostile_pool(workers=2, clock=clock) as pool:
        scores = scores_of_some_that_hang(pool, clock, PROBLEM, acts, hung, timeout_s=LIMIT_S)
        return acts, scores, pool.failures


@pytest.mark.parametrize("harm", HARMS)
def test_a_harmful_text_scores_zero_and_says_why(all_harms, harm):
    acts, scores, _ = all_harms
    score = scores[acts.index(harm)]
    assert (score.reward, score.parts) == (0.0, {})
    assert score.error.startswith(HARMS[harm][0])
    assert len(score.error) <= 500


def test_the_texts_around_a_harmful_one_keep_their_rewards(all_harms):
    acts, scores, _ = all_harms
    for act, score in zip(acts, scores, strict=True):
        assert act in HARMS or (score.reward, score.error) == (HARMLESS[act], "")


def test_failures_are_counted_by_kind(all_harms):
    assert all_harms[2] == Counter(kind for _, kind in HARMS.values())


@LINUX
def test_memory_is_limited_and_held_memory_freed_for_the_next():
    with hostile_pool() as pool:
        # 3 GiB of the default 2
        assert scores_of(pool, PROBLEM, ["allocate"])[0].error.startswith("MemoryError")
    with RewardPool(HOSTILE, timeout_s=60.0, memory_mb=640) as pool:
        scores = scores_of(pool, PROBLEM, ["hold memory", "keep 200 MB", "fine", "keep 200 MB"])
    assert [score.error[:11] for score in scores] == ["MemoryError", "", "", ""]
    assert pool.failures == {"timeout": 0, "died": 0, "exception": 1, "bad_value": 0}


def test_every_worker_works(mine, server):
    """Three texts that end only when all of them are under way."""
    with RewardPool(mine("wait"), timeout_s=WAIT_S, workers=3) as pool:
        futures = submit_all(pool, PROBLEM, [port(server)] * 3)
        waiting = [begun(server) for _ in futures]
        pids = {pid for _, pid in waiting}
        for connection, _ in waiting:
            connection.sendall(b".")
        assert {int(future.result(WAIT_S).reward) for future in futures} == pids and len(pids) == 3
        scores_of(pool, PROBLEM, [""])
    assert all(gone(pid) for pid in pids)


def test_each_text_of_a_worker_has_the_whole_timeout(mine, server):
    """Three texts of 20 s each, where one may take 30."""
    clock = FakeClock()
    with RewardPool(mine("wait"), timeout_s=LIMIT_S, clock=clock) as pool:
        for future in submit_all(pool, PROBLEM, [port(server)] * 3):
            connection, _ = begun(server)
            clock.advance(pool, 20.0)
            connection.sendall(b".")
            assert future.result(WAIT_S).error == ""


# ---------------------------------------------------------------- several functions

MINE = """
import encodings.idna, os, socket, time
from contextlib import suppress

ONCE = []

def length(problem, completion):
    return len(completion)

def format(problem, completion):
    ONCE.append(completion)
    return {"answer": 0.5, "brief": len(ONCE)}

def style(problem, completion):
    return {"reward": 3.0, "style": 0.25, "length": 7.0}

def once(problem, completion):
    return len(ONCE)

def spoil(problem, completion):
    problem.metadata.clear()
    problem.messages[0]["content"] = "spoiled"
    return 0.0

def clean(problem, completion):
    return problem.metadata["level"] if problem.messages[0]["content"] == "?" else -1.0

def forge(problem, completion):
    for fd in range(3, 20):
        with suppress(OSError):
            os.write(fd, b'{"id": 0, "at": 1}\\n')
    time.sleep(60)

def wait(problem, completion):
    if completion:
        with socket.create_connection(("127.0.0.1", int(completion))) as connection:
            connection.sendall(str(os.getpid()).encode())
            connection.recv(1)
    return os.getpid()

"""


@pytest.fixture
def mine(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return lambda *names: [f"{file}:{name}" for name in names]


@pytest.fixture
def server():
    """Yield the server where the reward function `wait` waits."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(WAIT_S)
        yield server


def port(server):
    return str(server.getsockname()[1])


def begun(server):
    """(what lets the next `wait` end, the process that is at it)"""
    connection, _ = server.accept()
    connection.settimeout(WAIT_S)
    return connection, int(connection.recv(100))


def test_one_function_without_weights_keeps_its_own_reward_or_the_sum_of_its_parts():
    with RewardPool([HOSTILE], timeout_s=30.0) as pool:
        fine, parts, total, nan = scores_of(pool, PROBLEM, ["fine", "parts", "total", "nan"])
    assert (fine.reward, fine.parts) == (0.25, {"score": 0.25})
    assert (parts.reward, parts.parts) == (1.5, {"format": 0.5, "answer": 1.0})
    assert (total.reward, total.parts) == (2.0, {"format": 0.5})
    assert nan.error == "the reward is nan, expected a finite number"


def test_forged_answers_and_places_are_refused(mine):
    for function, text in ((HOSTILE, "forge NaN as 0"), (mine("forge")[0], "x")):
        with RewardPool(function, timeout_s=30.0) as pool:
            [score] = scores_of(pool, PROBLEM, [text])
        assert score.reward == 0.0
        assert score.error.startswith("worker died: it wrote what is not an answer")


def test_several_functions_give_a_weighted_sum_and_named_parts(mine):
    functions = ["answer", *mine("length", "format", "style")]
    problem = Problem(uid="p", messages=(), answer="7")
    # each function's own reward
    parts = {"answer": 1.0, "length": 9.0, "format": 1.5, "style": 3.0}
    parts |= {"format.answer": 0.5, "brief": 1.0, "style.style": 0.25, "style.length": 7.0}
    for weights, reward in ((), 14.5), ((2.0, -0.5, 0.0, 1.0), 0.5):  # 2.0 - 4.5 + 0.0 + 3.0
        with RewardPool(functions, timeout_s=30.0, weights=weights) as pool:
            [score] = scores_of(pool, problem, ["Answer: 7"])
        assert (score.reward, score.parts, score.error) == (reward, parts, "")


def test_functions_of_one_file_share_its_module_and_no_problem(mine):
    with RewardPool(mine("format", "once", "spoil", "clean"), timeout_s=30.0) as pool:
        [score] = scores_of(pool, PROBLEM, ["x"])
    assert (score.parts["once"], score.parts["clean"]) == (1.0, 3.0)


@pytest.mark.parametrize("first", [False, True], ids=["last", "first"])
@pytest.mark.parametrize("harm", ["loop", "exit", "raise long", "inf part"])
def test_one_failing_function_fails_the_text_and_is_named(mine, harm, first):
    functions = [HOSTILE, *mine("length")] if first else [*mine("length"), HOSTILE]
    (said, kind), clock = HARMS[harm], FakeClock()
    with RewardPool(functions, timeout_s=LIMIT_S, workers=1, clock=clock) as pool:
        futures = submit_all(pool, PROBLEM, ["fine", harm, "fine"])
        if kind == "timeout":
            time_out(pool, clock, [harm], seconds=LIMIT_S + 1, function=0 if first else 1)
        before, failed, after = [future.result(WAIT_S) for future in futures]
    assert (failed.reward, failed.parts) == (0.0, {})
    assert failed.error.startswith(f"score: {said}")
    assert len(failed.error) <= 500
    assert pool.failures == {"timeout": 0, "died": 0, "exception": 0, "bad_value": 0} | {kind: 1}
    assert before == after
    assert (after.reward, after.error) == (4.25, "")


@pytest.mark.parametrize(
    ("results", "weights", "found"),
    [
        ({"a": (1e308, {}), "b": (1e308, {})}, (10.0, 1.0), "the rewards is inf, expected"),
        ({"a": (1e308, {}), "b": (1e308, {})}, (10.0, -10.0), "the rewards is nan"),
        ({"a": (1.0, {"b.x": 1.0, "x": 1.0}), "b": (1.0, {"x": 1.0})}, (1, 1), "are named 'b.x'"),
    ],
)
def test_a_sum_that_is_not_finite_and_parts_of_one_name_are_failures(results, weights, found):
    with pytest.raises(BadValue, match=found):
        weigh(results, weights)


def test_three_workers_give_the_scores_of_one_for_a_sum(mine):
    acts = [act for act, (_, kind) in HARMS.items() if kind != "timeout" and act != "forge"]
    acts += HARMLESS
    functions, runs = [HOSTILE, *mine("length", "style")], []
    for workers in (1, 3):
        with RewardPool(functions, 30.0, workers, weights=[1.0, 0.1, 0.3]) as pool:
            runs.append((scores_of(pool, PROBLEM, acts * 3), pool.failures))
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("functions", "weights", "where"),
    [
        ([], (), "reward.function"),
        (["answer", "answer"], (), "reward.function"),
        ([HOSTILE, "elsewhere.py:score"], (), "reward.function"),
        (["answer", HOSTILE], (1.0,), "reward.weights"),
        ("answer", (1.0, 2.0), "reward.weights"),
        (["answer", HOSTILE], (1.0, float("nan")), "reward.weights"),
    ],
)
def test_doubled_names_and_misfit_weights_are_user_errors(functions, weights, where):
    with pytest.raises(UserError) as error:
        RewardPool(functions, weights=weights)
    assert error.value.where == where
    assert error.value.found and error.value.expected


def test_a_users_file_hides_no_module_of_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "string.py").write_text("def score(problem, completion): return 0.5\n")
    with RewardPool("string.py:score", timeout_s=30.0) as pool:
        assert scores_of(pool, PROBLEM, ["a"])[0].reward == 0.5


# ---------------------------------------------------------------- the verifier that hangs


def test_a_math_verifier_that_hangs_costs_its_own_sample_only(caplog):
    clock = FakeClock()
    hang = Problem(uid="hang", messages=(), answer="x+1")
    texts = [r"\boxed{\frac{3000000!}{2999999!}}", r"\boxed{1+x}", "Answer: 9**9**9**9"]
    texts.append(r"\boxed{x + 1}")
    with RewardPool("answer", timeout_s=LIMIT_S, clock=clock) as pool:
        futures = submit_all(pool, hang, texts)
        time_out(pool, clock, texts[:1], seconds=LIMIT_S + 1)
        scores = [future.result(WAIT_S) for future in futures]
        whole = Problem(uid="number", messages=(), answer="3000000")
        number = scores_of(pool, whole, [texts[0], texts[2]])
    assert [score.reward for score in scores] == [0.0, 1.0, 0.0, 1.0]
    assert scores[0].error == "timeout after 30.0 s" and "a reward is late" in caplog.text
    assert pool.failures == {"timeout": 1, "died": 0, "exception": 0, "bad_value": 0}
    # not evaluated, so nothing can hang
    assert [(score.reward, score.error) for score in number] == [(0.0, "")] * 2


# ---------------------------------------------------------------- what crosses the pipe


def test_a_huge_text_costs_no_memory_and_its_end_is_scored():
    text = "x" * (100 * 2**20) + "\nAnswer: 7"
    with RewardPool("answer", timeout_s=30.0) as pool:
        tracemalloc.start()
        score = scores_of(pool, Problem(uid="long", messages=(), answer="7"), [text] * 20)[19]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert score.reward == 1.0
    assert peak < 2 * 20 * MAX_CHARS  # of the 2 GB


def test_texts_that_utf8_cannot_write_and_numpy_metadata_arrive():
    metadata = {"level": np.int64(2), "array": np.arange(3)}
    messages = ({"role": "user", "content": "\ud800 ∑"},)
    problem = Problem(uid="p", messages=messages, answer="3", metadata=metadata)
    with hostile_pool() as pool:
        assert scores_of(pool, problem, ["echo"])[0].parts == {"level": 2.0, "messages": 1.0}
    with RewardPool("answer", timeout_s=30.0) as pool:
        assert scores_of(pool, problem, ["\ud800\x00\u2028 Answer: 3"])[0].reward == 1.0


@pytest.mark.parametrize("metadata", [{"set": {1}}, {"long": "x" * 9 * 2**20}])
def test_a_problem_that_cannot_be_sent_costs_its_own_samples(metadata):
    problem = Problem(uid="p", messages=(), answer="", metadata=metadata)
    with hostile_pool() as pool:
        bad, good = score_all(pool, [(problem, "fine"), (PROBLEM, "fine")])
    assert bad.error.startswith("the problem cannot be sent as JSON")
    assert (good.reward, pool.failures["exception"]) == (0.25, 1)


# ---------------------------------------------------------------- functions that cannot be loaded


@pytest.mark.parametrize(
    ("source", "found", "place"),
    [
        ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'", 1),
        ("raise SystemExit(0)\n", "SystemExit: 0", 1),
        ("import os\nos._exit(3)\n", "it ended with exit code 3", 0),
    ],
)
def test_a_function_that_fails_to_load_is_a_user_error_at_once(
    tmp_path, mine, source, found, place
):
    bad = tmp_path / "bad.py"
    bad.write_text(source)
    functions = [*mine("length"), "answer"]
    functions.insert(place, f"{bad}:score")
    with pytest.raises(UserError) as error:
        RewardPool(functions)
    assert found in error.value.found and error.value.expected
    assert error.value.where.startswith(f"reward.function = {bad}:score")
    assert error.value.next == f"python {bad}"


def test_a_file_that_changes_while_in_use_is_not_read_again(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(FILE.read_text())
    with RewardPool(f"{file}:score", timeout_s=30.0) as pool:
        file.write_text("import no_such_module\n")
        scores = scores_of(pool, PROBLEM, ["fine", "exit", "fine"])
    assert [score.reward for score in scores] == [0.25, 0.0, 0.25]


# ---------------------------------------------------------------- processes


@LINUX
def test_a_text_whose_worker_was_killed_from_outside_is_scored_again():
    clock = FakeClock()
    with hostile_pool(clock=clock) as pool:
        first = int(scores_of(pool, PROBLEM, ["pid"])[0].reward)
        hung, *others = submit_all(pool, PROBLEM, ["loop", "fine", "total"])
        assert eventually(lambda: in_flight(pool) == [(1, "loop", 0)])
        os.kill(first, signal.SIGKILL)
        assert gone(first)
        assert eventually(lambda: first not in {worker.pid for worker in pool.workers})
        assert eventually(lambda: in_flight(pool) == [(1, "loop", 0)]) and not hung.done()
        [second] = [worker.pid for worker in pool.workers]
        clock.advance(pool, LIMIT_S + 1)
        assert hung.result(WAIT_S).error == "timeout after 30.0 s"
        assert gone(second)
        assert [score.result(WAIT_S).reward for score in others] == [0.25, 2.0]


@LINUX
def test_children_that_hold_a_dead_workers_pipes_are_killed(tmp_path):
    problem = Problem(uid="p", messages=(), answer="", metadata={"child": str(tmp_path / "child")})
    with hostile_pool(timeout_s=30.0) as pool:
        forked, fine = scores_of(pool, problem, ["fork", "fine"])
    assert (forked.error, fine.reward) == ("worker died: it ended with exit code 5", 0.25)
    assert gone(int((tmp_path / "child").read_text()))


@LINUX
def test_a_worker_that_closes_its_descriptors_costs_no_time(monkeypatch):
    monkeypatch.setattr(host, "EXIT_S", 0.5)  # it does not end, in whatever time
    with hostile_pool(clock=FakeClock()) as pool:
        closed, fine = scores_of(pool, PROBLEM, ["close", "fine"])
    assert (closed.error, fine.reward) == ("worker died: it closed its socket", 0.25)


def test_a_pool_made_in_a_thread_outlives_it():
    made = []

    def make():
        made.append(hostile_pool(timeout_s=30.0))
        made.append(scores_of(made[0], PROBLEM, ["pid"])[0].reward)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    with made[0] as pool:
        assert not gone(int(made[1]), within_s=0.2)
        assert scores_of(pool, PROBLEM, ["pid"])[0].reward == made[1]


def test_closing_ends_what_runs_at_once_and_fails_what_waits():
    with hostile_pool(timeout_s=3600.0) as pool:
        pid = int(scores_of(pool, PROBLEM, ["pid"])[0].reward)
        futures = submit_all(pool, PROBLEM, ["loop", "fine"])
        start = time.monotonic()
    assert time.monotonic() - start < WAIT_S  # far from the loop's hour
    assert gone(pid)
    for future in futures:
        with pytest.raises(RuntimeError, match="the reward workers are closed"):
            future.result(timeout=0)
    with pytest.raises(RuntimeError, match="the reward workers are closed"):
        pool.submit(PROBLEM, Attempt(text="fine"))


def test_items_of_many_threads_get_their_own_scores():
    def ask(start):
        numbers = range(start, start + 100)
        problems = [Problem(uid=str(i), messages=(), answer=str(i)) for i in numbers]
        texts = [f"Answer: {i % 150}" for i in numbers]
        return [score.reward for score in score_all(pool, zip(problems, texts, strict=True))]

    with RewardPool("answer", timeout_s=30.0, workers=2) as pool, ThreadPoolExecutor(4) as threads:
        rewards = [reward for part in threads.map(ask, (0, 100, 200, 300)) for reward in part]
    assert rewards == [float(i < 150) for i in range(400)]


@LINUX
def test_a_text_that_kills_the_fork_server_costs_its_own_score():
    with hostile_pool(timeout_s=30.0) as pool:
        scores = scores_of(pool, PROBLEM, ["fine", "kill fork server", "total", "fine"])
    assert [score.reward for score in scores] == [0.25, 0.0, 2.0, 0.25]
    assert "which had forked it, ended first" in scores[1].error
    assert pool.failures == {"timeout": 0, "died": 1, "exception": 0, "bad_value": 0}
