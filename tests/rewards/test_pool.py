"""Real worker processes against hostile reward functions: each costs its own sample and nothing
else."""

import json
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from tandem.rewards.pool import processes, scheduler, stragglers
from tandem.rewards.pool.pool import RewardPool
from tandem.rewards.pool.processes import GROWTH_BYTES, Template, Worker
from tandem.rewards.pool.protocol import TEXT_CHARS
from tandem.rewards.pool.scheduler import Crew
from tandem.rewards.pool.stragglers import SPARES, Patience
from tandem.runtime.errors import UserError
from tandem.types import Attempt, Problem
from tests.support.scoring import (
    Clock,
    score_all,
    scores_of,
    scores_of_some_that_hang,
    strike,
    submit_all,
)
from tests.support.waiting import WAIT_S, eventually

FILE = Path(__file__).parents[1].joinpath("support", "hostile_rewards.py")
HOSTILE = f"{FILE}:score"
PROBLEM = Problem(
    uid="p/1", messages=({"role": "user", "content": "?"},), answer="", metadata={"level": 3}
)
LINUX = pytest.mark.skipif(
    sys.platform != "linux", reason="address space limits and prctl are Linux's"
)

# what the completion does -> (reward, start of the error, kind of failure)
HARMLESS = {"fine": 0.25, "true": 1.0, "float32": 0.5, "parts": 1.5, "total": 2.0, "echo": 4.0}
HARMLESS |= {"print": 0.5, "interrupt": 0.75}
HARMS = {
    "loop": ("timeout after 30.0 s", "timeout"),
    "long c call": ("timeout after 30.0 s", "timeout"),
    "exit": ("worker died: exit 7", "died"),
    "segfault": ("worker died: signal 11", "died"),
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
    "string": ("the reward is of type str, expected a float", "bad_value"),
    "none": ("the reward is of type NoneType", "bad_value"),
    "empty dict": ("expected a dict of 1 to 64 parts", "bad_value"),
    "many parts": ("expected a dict of 1 to 64 parts", "bad_value"),
    "int keys": ("expected a dict of 1 to 64 parts", "bad_value"),
}


# no harmless text takes so long on the busiest machine; for the others the clock is set forward
LIMIT_S = 30.0


def hostile_pool(workers=1, timeout_s=LIMIT_S):
    return RewardPool(HOSTILE, timeout_s=timeout_s, workers=workers)


@pytest.fixture(scope="module", autouse=True)
def clock():
    """Of every pool here. And the news of how a worker ended may come late, where the machine is
    busy."""
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock()
        patch.setattr(scheduler, "time", clock)
        patch.setattr(processes, "time", clock)
        patch.setattr(scheduler, "EXIT_S", WAIT_S)
        yield clock


def state(pid):
    """As proc(5) has it: R, S, Z, ...; "" where there is no such process."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def alive(pid):
    """Whether the process runs; a zombie that nobody has waited for does not."""
    return state(pid) not in ("", "Z", "X")


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def children(pid):
    return [
        int(stat.name)
        for stat in Path("/proc").glob("[0-9]*")
        if alive(stat.name) and parent(stat.name) == pid
    ]


def processor_ticks(pid):
    """Hundredths of a second that the process has run."""
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))


def naps(place):
    """How often it has begun to sleep or was made to wait: a process, or one thread of one (as
    "PID/task/ID")."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return [
            line
            for line in Path(f"/proc/{place}/status").read_text().splitlines()
            if "ctxt_switches" in line
        ]


def gone(pid, *, within_s=WAIT_S):
    return eventually(lambda: not alive(pid), within_s=within_s)


@pytest.fixture(scope="module")
def storm(clock):
    """Every harm once, each between two harmless texts, at once: (acts, scores, failures)."""
    acts = [act for harm in HARMS for act in ("fine", harm, "total")] + list(HARMLESS)
    with hostile_pool(workers=2) as pool:
        scores_of(pool, PROBLEM, ["fine"] * 20)  # what is usual
        hung = [harm for harm, (_, kind) in HARMS.items() if kind == "timeout"]
        return (
            acts,
            scores_of_some_that_hang(pool, clock, PROBLEM, acts, hung, timeout_s=LIMIT_S),
            pool.failures,
        )


@pytest.mark.parametrize("harm", HARMS)
def test_a_harmful_text_scores_zero_and_says_why(storm, harm):
    acts, scores, _ = storm
    score = scores[acts.index(harm)]
    assert (score.reward, score.parts) == (0.0, {})
    assert score.error.startswith(HARMS[harm][0])
    assert len(score.error) <= 500


def test_the_texts_around_a_harmful_one_keep_their_rewards(storm):
    acts, scores, _ = storm
    harmless = [
        (act, score.reward, score.error)
        for act, score in zip(acts, scores, strict=True)
        if act in HARMLESS
    ]
    assert harmless == [(act, HARMLESS[act], "") for act in acts if act in HARMLESS]


def test_failures_are_counted_by_kind(storm):
    kinds = [kind for _, kind in HARMS.values()]
    assert storm[2] == {
        kind: kinds.count(kind) for kind in ("timeout", "died", "exception", "bad_value")
    }


@LINUX
def test_memory_is_limited_and_memory_held_by_one_text_is_not_missed_by_the_next():
    with hostile_pool() as pool:
        # 3 GiB of the default 2
        assert scores_of(pool, PROBLEM, ["allocate"])[0].error.startswith("MemoryError")
    with RewardPool(HOSTILE, timeout_s=60.0, memory_mb=640) as pool:
        scores = scores_of(pool, PROBLEM, ["hold memory", "keep 200 MB", "fine", "keep 200 MB"])
    assert [score.error[:11] for score in scores] == ["MemoryError", "", "", ""]
    assert pool.failures == {"timeout": 0, "died": 0, "exception": 1, "bad_value": 0}


def test_parts_are_named_and_the_reward_is_its_own_value_or_their_sum():
    with hostile_pool() as pool:
        fine, parts, total = scores_of(pool, PROBLEM, ["fine", "parts", "total"])
    assert (fine.reward, fine.parts) == (0.25, {"score": 0.25})
    assert (parts.reward, parts.parts) == (1.5, {"format": 0.5, "answer": 1.0})
    assert (total.reward, total.parts) == (2.0, {"format": 0.5})


def test_three_workers_give_the_scores_of_one():
    acts = [act for act, (_, kind) in HARMS.items() if kind != "timeout" and act != "forge"] + list(
        HARMLESS
    )
    runs = []
    for workers in (1, 3):
        with hostile_pool(workers) as pool:
            runs.append((scores_of(pool, PROBLEM, acts * 3), pool.failures))
    assert runs[0] == runs[1]


def test_scores_come_back_in_the_order_of_the_items_whatever_worker_made_them():
    problems = [Problem(uid=str(i), messages=(), answer=str(i)) for i in range(600)]
    items = [(problem, f"Answer: {i - i % 2}") for i, problem in enumerate(problems)]
    with RewardPool("answer", timeout_s=30.0, workers=3) as pool:
        rewards = [score.reward for score in score_all(pool, items)]
        again = [score.reward for score in score_all(pool, items[::-1])][::-1]
    assert rewards == again == [1.0 - i % 2 for i in range(600)]
    assert not any(pool.failures.values())


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


def test_a_worker_may_take_long_for_many_texts_and_the_clock_is_for_each(mine, server, clock):
    """Three texts of 20 s each, where one may take 30."""
    with RewardPool(mine("wait"), timeout_s=LIMIT_S) as pool:
        futures = submit_all(pool, PROBLEM, [port(server)] * 3)
        for future in futures:
            connection, _ = begun(server)
            clock.ahead += 20.0
            pool._crew._ring()
            connection.sendall(b".")
            assert future.result(WAIT_S).error == ""


def test_a_forged_answer_that_is_not_finite_does_not_get_through():
    with hostile_pool() as pool:
        forged, fine = scores_of(pool, PROBLEM, ["forge NaN as 0", "fine"])
    assert (forged.reward, forged.error) == (0.0, "worker died: it wrote what is not an answer")
    assert fine.reward == 0.25


def test_a_call_without_items_has_no_scores():
    with hostile_pool() as pool:
        assert score_all(pool, []) == []


# ---------------------------------------------------------------- several functions

MINE = """
import os, socket, time
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

def large(problem, completion):
    return 1e308 if completion else 0.0

huge = large

def one(problem, completion):
    return 1

def forge(problem, completion):
    for fd in range(3, 20):
        with suppress(OSError):
            os.write(fd, b'{"id": 0, "at": 1}\\n')
    time.sleep(60)

def slow(problem, completion):
    time.sleep(float(completion))
    return os.getpid()

def wait(problem, completion):
    if completion:
        with socket.create_connection(("127.0.0.1", int(completion))) as connection:
            connection.sendall(str(os.getpid()).encode())
            connection.recv(1)
    return os.getpid()

def odd(problem, completion):
    return {"b.x": 1.0, "x": 1.0}

def b(problem, completion):
    return {"x": 1.0}
"""


@pytest.fixture
def mine(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return lambda *names: [f"{file}:{name}" for name in names]


@pytest.fixture
def server():
    """Where `wait` waits."""
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


@pytest.mark.parametrize(
    "functions", [HOSTILE, [HOSTILE], (HOSTILE,)], ids=["text", "list", "tuple"]
)
def test_one_function_without_weights_keeps_its_reward_parts_and_errors_as_they_are(functions):
    with RewardPool(functions, timeout_s=30.0) as pool:
        fine, parts, nan = scores_of(pool, PROBLEM, ["fine", "parts", "nan"])
    assert (fine.reward, fine.parts) == (0.25, {"score": 0.25})
    assert (parts.reward, parts.parts) == (1.5, {"format": 0.5, "answer": 1.0})
    assert nan.error == "the reward is nan, expected a finite number"


def test_the_reward_of_several_functions_is_their_weighted_sum_and_their_parts_are_told_apart(mine):
    functions = ["answer", *mine("length", "format", "style")]
    problem = Problem(uid="p", messages=(), answer="7")
    # each function's own reward
    parts = {"answer": 1.0, "length": 9.0, "format": 1.5, "style": 3.0}
    parts |= {"format.answer": 0.5, "brief": 1.0, "style.style": 0.25, "style.length": 7.0}
    for weights, reward in [
        ((), 1.0 + 9.0 + 1.5 + 3.0),
        ((2.0, -0.5, 0.0, 1.0), 2.0 - 4.5 + 0.0 + 3.0),
    ]:
        with RewardPool(functions, timeout_s=30.0, weights=weights) as pool:
            [score] = scores_of(pool, problem, ["Answer: 7"])
        assert (score.reward, score.parts, score.error) == (reward, parts, "")


def test_the_weighted_sum_is_made_in_the_order_of_the_functions(mine):
    functions = mine("one", "length", "b")  # each gives 1 for "x"
    for order, weights in [(functions, (0.1, 0.2, 0.3)), (functions[::-1], (0.3, 0.2, 0.1))]:
        with RewardPool(order, timeout_s=30.0, weights=weights) as pool:
            assert scores_of(pool, PROBLEM, ["x"])[0].reward == weights[0] + weights[1] + weights[2]
    assert 0.1 + 0.2 + 0.3 != 0.3 + 0.2 + 0.1


def test_a_weight_of_one_function_weighs_its_reward_and_not_its_parts():
    with RewardPool([HOSTILE], timeout_s=30.0, weights=[0.5]) as pool:
        fine, total, died = scores_of(pool, PROBLEM, ["fine", "total", "exit"])
    assert (fine.reward, fine.parts) == (0.125, {"score": 0.25})
    assert (total.reward, total.parts) == (1.0, {"score": 2.0, "format": 0.5})
    assert died.error == "score: worker died: exit 7"


def test_functions_of_one_file_share_its_module_and_no_problem(mine):
    with RewardPool(mine("format", "once", "spoil", "clean"), timeout_s=30.0) as pool:
        [score] = scores_of(pool, PROBLEM, ["x"])
    assert (score.parts["once"], score.parts["clean"]) == (1.0, 3.0)


@pytest.mark.parametrize("first", [False, True], ids=["last", "first"])
@pytest.mark.parametrize(
    "harm", ["loop", "exit", "forge", "raise", "raise long", "nan", "inf part", "string"]
)
def test_one_failing_function_fails_the_text_and_is_named(mine, clock, harm, first):
    functions = [HOSTILE, *mine("length")] if first else [*mine("length"), HOSTILE]
    said, kind = HARMS[harm]
    with RewardPool(functions, timeout_s=LIMIT_S, workers=1) as pool:
        futures = submit_all(pool, PROBLEM, ["fine", harm, "fine"])
        if kind == "timeout":
            strike(pool, clock, [harm], seconds=LIMIT_S + 1, function=0 if first else 1)
        before, failed, after = [future.result(WAIT_S) for future in futures]
    assert (failed.reward, failed.parts) == (0.0, {})
    assert failed.error.startswith(f"score: {said}")
    assert len(failed.error) <= 500
    assert pool.failures == {"timeout": 0, "died": 0, "exception": 0, "bad_value": 0} | {kind: 1}
    assert before == after
    assert (after.reward, after.error) == (4.25, "")


def test_a_forged_place_behind_the_last_function_does_not_get_through(mine):
    with RewardPool(mine("forge"), timeout_s=30.0) as pool:
        assert (
            scores_of(pool, PROBLEM, ["x"])[0].error
            == "worker died: it wrote what is not an answer"
        )


def test_the_name_of_a_failure_is_that_of_its_own_text(mine):
    """The text before got as far as the second function; this one dies in the first."""
    with RewardPool([HOSTILE, *mine("length")], timeout_s=30.0, weights=[1.0, 1.0]) as pool:
        errors = [score.error for score in scores_of(pool, PROBLEM, ["fine", "exit"] * 3)]
    assert errors == ["", "score: worker died: exit 7"] * 3


@pytest.mark.parametrize(
    ("weights", "found"),
    [((10.0, 1.0), "is inf"), ((10.0, -10.0), "is nan"), ((1.0, 1.0), "is inf")],
)
def test_a_weighted_sum_that_is_not_finite_is_a_failure(mine, weights, found):
    with RewardPool(mine("large", "huge"), timeout_s=30.0, weights=weights) as pool:
        bad, good = scores_of(pool, PROBLEM, ["x", ""])
    expected = f"the weighted sum of the rewards {found}, expected a finite number"
    assert (bad.reward, bad.parts, bad.error) == (0.0, {}, expected)
    assert (good.reward, good.error, pool.failures["bad_value"]) == (0.0, "", 1)


def test_parts_that_cannot_be_told_apart_are_a_failure(mine):
    with RewardPool(mine("odd", "b"), timeout_s=30.0) as pool:
        [score] = scores_of(pool, PROBLEM, ["x"])
    assert (score.reward, score.error) == (0.0, "two parts are named 'b.x', expected one")


def test_three_workers_give_the_scores_of_one_with_several_functions(mine):
    acts = [act for act, (_, kind) in HARMS.items() if kind != "timeout" and act != "forge"] + list(
        HARMLESS
    )
    runs = []
    for workers in (1, 3):
        with RewardPool(
            [HOSTILE, *mine("length", "style")], 30.0, workers, weights=[1.0, 0.1, 0.3]
        ) as pool:
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
def test_functions_of_one_name_and_weights_that_do_not_fit_are_user_errors(
    functions, weights, where
):
    with pytest.raises(UserError) as error:
        RewardPool(functions, weights=weights)
    assert error.value.where == where
    assert error.value.found and error.value.expected


@pytest.mark.parametrize("source", ["import no_such_module\n", "import os\nos._exit(3)\n"])
def test_of_several_functions_the_one_that_cannot_be_loaded_is_named(tmp_path, mine, source):
    bad = tmp_path / "bad.py"
    bad.write_text(source)
    with pytest.raises(UserError) as error:
        RewardPool([*mine("length"), f"{bad}:score", "answer"])
    assert error.value.where.startswith(f"reward.function = {bad}:score")
    assert error.value.next == f"python {bad}"


# ---------------------------------------------------------------- the verifier that hangs


def test_a_math_verifier_that_hangs_costs_its_own_sample_only(clock, monkeypatch):
    # for importing Math-Verify; it ends with the import
    monkeypatch.setattr(scheduler, "LOADING_S", 3600.0)
    hang = Problem(uid="hang", messages=(), answer="x+1")
    texts = [
        r"\boxed{\frac{3000000!}{2999999!}}",
        r"\boxed{1+x}",
        "Answer: 9**9**9**9",
        r"\boxed{x + 1}",
    ]
    with RewardPool("answer", timeout_s=LIMIT_S) as pool:
        futures = submit_all(pool, hang, texts)
        assert eventually(
            lambda: any(w.loading_notes == 0 for w in list(pool._crew._workers.values()))
        )
        strike(pool, clock, texts[:1], seconds=LIMIT_S + 1)
        scores = [future.result(WAIT_S) for future in futures]
        number = scores_of(
            pool, Problem(uid="number", messages=(), answer="3000000"), [texts[0], texts[2]]
        )
    assert [score.reward for score in scores] == [0.0, 1.0, 0.0, 1.0]
    assert scores[0].error == "timeout after 30.0 s"
    assert pool.failures == {"timeout": 1, "died": 0, "exception": 0, "bad_value": 0}
    # not evaluated, so nothing can hang
    assert [(score.reward, score.error) for score in number] == [(0.0, "")] * 2


def test_the_first_formula_scores_as_the_second_where_the_verifier_is_one_of_three(mine):
    """It says that it loads Math-Verify while the second function is at work."""
    functions = [*mine("one"), "answer", *mine("length")]
    with RewardPool(functions, timeout_s=30.0) as pool:
        scores = scores_of(pool, Problem(uid="p", messages=(), answer="x+1"), [r"\boxed{1+x}"] * 2)
    assert [(score.reward, score.error) for score in scores] == [(1.0 + 1.0 + 11.0, "")] * 2


# ---------------------------------------------------------------- storms

# real seconds, since a storm is known by its clock; a harmless text takes a thousandth
STORM_S = 5.0
STORM = ("loop", "long c call", "allocate", "nan", "string", "raise", "exit", "slow")


def test_nobody_waits_behind_attempts_that_hang():
    """One worker, four endless loops first: the others are all scored while those still have their
    time."""
    with hostile_pool(timeout_s=600.0) as pool:
        scores_of(pool, PROBLEM, ["fine"] * 20)  # what is usual
        hung = [pool.submit(PROBLEM, Attempt(text="loop")) for _ in range(4)]
        others = [pool.submit(PROBLEM, Attempt(text="fine")) for _ in range(100)]
        assert {future.result(WAIT_S).reward for future in others} == {0.25}
        assert not any(future.done() for future in hung)


def test_a_storm_takes_no_other_score_leaves_no_process_and_every_hostile_attempt_says_why():
    acts = [STORM[i // 10 % len(STORM)] if i % 10 == 0 else "fine" for i in range(800)]
    with hostile_pool(workers=2, timeout_s=STORM_S) as pool:
        scores = scores_of(pool, PROBLEM, acts)
        pid = int(scores_of(pool, PROBLEM, ["pid"])[0].reward)
        # what was killed may still be dying
        assert eventually(lambda: len(children(parent(pid))) <= 2)
    harmless = [score for score, act in zip(scores, acts, strict=True) if act in ("fine", "slow")]
    assert {(score.reward, score.error) for score in harmless} == {(0.25, "")}
    assert pool.failures == {"timeout": 20, "died": 10, "exception": 20, "bad_value": 20}


def test_a_function_that_is_slow_for_every_attempt_gets_no_spare_workers(mine):
    """Ten times as slow would be late, so the machine may stop for seconds."""
    with RewardPool(mine("slow"), timeout_s=WAIT_S, workers=2) as pool:
        assert len({score.reward for score in scores_of(pool, PROBLEM, ["0.5"] * 8)}) == 2


@LINUX
def test_a_function_that_waits_gets_no_spare_worker_and_holds_up_nobody_behind_it(
    mine, server, monkeypatch
):
    with RewardPool(mine("wait"), timeout_s=600.0, workers=2) as pool:
        workers = pool._crew._workers
        scores_of(pool, PROBLEM, [""] * 200)  # what is usual
        usual, held, waiting = stragglers.LATE_S, [], []
        monkeypatch.setattr(stragglers, "LATE_S", math.inf)  # until both sleep for sure
        for _ in range(2):
            held += submit_all(pool, PROBLEM, [port(server)])
            waiting.append(begun(server))
        behind = submit_all(pool, PROBLEM, [""] * 40)
        assert eventually(lambda: {state(pid) for _, pid in waiting} == {"S"})
        monkeypatch.setattr(stragglers, "LATE_S", usual)
        pool._crew._ring()
        assert eventually(lambda: all(worker.late for worker in list(workers.values())))
        time.sleep(0.2)  # a spare would be asked for at once
        assert {worker.pid for worker in list(workers.values())} == {pid for _, pid in waiting}
        assert not any(future.done() for future in behind)
        waiting[0][0].sendall(b".")
        assert {future.result(WAIT_S).error for future in (held[0], *behind)} == {""}
        assert not held[1].done()
        waiting[1][0].sendall(b".")
        assert held[1].result(WAIT_S).reward == waiting[1][1]


def worker_at(began=0.0, *, late=False, answered=1):
    ours, theirs = socket.socketpair()
    theirs.close()
    return Worker(ours, began=began, late=late, answered=answered, unanswered=deque([None]))


def test_late_is_ten_times_the_usual_and_in_a_storm_less():
    patience = Patience(timeout_s=4.0)
    assert patience.late_after(worker_at()) == math.inf  # nothing is known
    patience.answered(worker_at(10.0), 10.25)
    assert patience.late_after(worker_at()) == 2.5
    # a first item may load much: that is another usual
    assert patience.late_after(worker_at(answered=0)) == math.inf
    storm = [worker_at(10.0, late=True) for _ in range(4)]
    patience.look(storm, now=11.0)
    assert (patience.late, patience.storm) == (4, False)  # they may be merely slow
    patience.look(storm, now=12.5)
    assert (patience.storm, patience.late_after(worker_at())) == (True, 1.0)
    for worker in [worker_at(12.0, late=True)] * 5:
        patience.answered(worker, 12.25)
    patience.look(storm, now=12.5)
    assert not patience.storm  # most late ones do answer


@contextmanager
def sleeper():
    """A process that has begun, and waits."""
    command = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        processes.stdout.readline()
        assert eventually(lambda: state(process.pid) == "S")
        yield process
        processes.kill()


@LINUX
def test_in_a_storm_who_uses_much_processor_time_is_put_last_and_who_waits_for_something_is_not():
    patience, busy, waiting = Patience(timeout_s=4.0), worker_at(late=True), worker_at(late=True)
    patience.answered(worker_at(10.0), 10.25)  # a quarter of a second, and no processor time
    with sleeper() as process:
        busy.pid, waiting.pid = os.getpid(), process.pid
        for worker in (busy, waiting):
            worker.turn_to_next(0.0, 4.0)
        while busy.processor_s() < 0.05:
            pass
        assert not patience.too_much(busy)
        patience.storm = True
        assert (patience.too_much(busy), patience.too_much(waiting)) == (True, False)


@LINUX
def test_a_worker_that_is_put_last_runs_when_nobody_else_wants_to_and_grows_little():
    with sleeper() as process:
        worker = worker_at(late=True)
        worker.pid = process.pid
        worker.put_last()
        assert os.sched_getscheduler(process.pid) == os.SCHED_IDLE
        size = int(Path(f"/proc/{process.pid}/statm").read_text().split()[0]) * os.sysconf(
            "SC_PAGE_SIZE"
        )
        soft, hard = resource.prlimit(process.pid, resource.RLIMIT_AS)
        assert soft == hard
        assert 0 < hard - GROWTH_BYTES <= size


def test_nobody_is_late_while_nobody_waits():
    patience = Patience(timeout_s=4.0)
    patience.answered(worker_at(10.0), 10.25)
    assert patience.next_doubt(worker_at(20.0), others_wait=False) == math.inf
    assert patience.next_doubt(worker_at(20.0), others_wait=True) == 22.5
    patience.late = SPARES
    assert patience.next_doubt(worker_at(20.0), others_wait=True) == math.inf


# ---------------------------------------------------------------- what crosses the pipe


def test_a_huge_text_costs_no_memory_and_its_end_is_scored():
    text = "x" * (100 * 2**20) + "\nAnswer: 7"
    with RewardPool("answer", timeout_s=30.0) as pool:
        tracemalloc.start()
        score = scores_of(pool, Problem(uid="long", messages=(), answer="7"), [text] * 20)[19]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert score.reward == 1.0
    assert peak < 2 * 20 * TEXT_CHARS  # of the 2 GB


def test_texts_that_utf8_cannot_write_and_numpy_metadata_arrive():
    metadata = {"level": np.int64(2), "array": np.arange(3)}
    problem = Problem(
        uid="p", messages=({"role": "user", "content": "\ud800 ∑"},), answer="", metadata=metadata
    )
    with hostile_pool() as pool:
        assert scores_of(pool, problem, ["echo"])[0].parts == {"level": 2.0, "messages": 1.0}
    with RewardPool("answer", timeout_s=30.0) as pool:
        assert (
            scores_of(
                pool, Problem(uid="p", messages=(), answer="3"), ["\ud800\x00\u2028 Answer: 3"]
            )[0].reward
            == 1.0
        )


@pytest.mark.parametrize("metadata", [{"set": {1}}, {"long": "x" * 9 * 2**20}])
def test_a_problem_that_is_not_json_or_is_huge_costs_its_own_samples(metadata):
    problem = Problem(uid="p", messages=(), answer="", metadata=metadata)
    with hostile_pool() as pool:
        bad, good = score_all(pool, [(problem, "fine"), (PROBLEM, "fine")])
    assert bad.error.startswith("the problem cannot be sent as JSON")
    assert (good.reward, pool.failures["exception"]) == (0.25, 1)


# ---------------------------------------------------------------- functions that cannot be loaded


@pytest.mark.parametrize(
    ("source", "function", "found"),
    [
        (
            "import no_such_module\n",
            "score",
            "ModuleNotFoundError: No module named 'no_such_module'",
        ),
        ("def score(problem, completion)\n", "score", "SyntaxError: expected ':'"),
        ("def score(problem, completion): ...\n", "scor", "no function 'scor' in"),
        (
            "def score(completion): ...\n",
            "score",
            "takes (completion), expected (problem, completion)",
        ),
        ("raise SystemExit(0)\n", "score", "SystemExit: 0"),
        ("import os\nos._exit(3)\n", "score", "worker died: exit 3"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_a_user_error_at_once(
    tmp_path, source, function, found
):
    file = tmp_path / "mine.py"
    file.write_text(source)
    with pytest.raises(UserError) as error:
        RewardPool(f"{file}:{function}")
    assert found in error.value.found
    assert str(file) in error.value.where
    assert error.value.expected and error.value.next


@pytest.mark.parametrize(
    "function", ["anser", "no/such/file.py:score", "no_such_module:score", "json:nothing", ""]
)
def test_a_function_that_does_not_exist_is_a_user_error(function):
    with pytest.raises(UserError, match="cannot be loaded"):
        RewardPool(function)


def test_a_function_is_found_by_its_module():
    with RewardPool("tandem.rewards.builtin:exact", timeout_s=30.0) as pool:
        assert scores_of(pool, PROBLEM, ["a"])[0].reward == 0.0


def test_a_file_that_changes_while_it_is_in_use_is_not_read_again(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(FILE.read_text())
    with RewardPool(f"{file}:score", timeout_s=30.0) as pool:
        file.write_text("import no_such_module\n")
        assert [score.reward for score in scores_of(pool, PROBLEM, ["fine", "exit", "fine"])] == [
            0.25,
            0.0,
            0.25,
        ]


THREADED = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""
CONNECTED = """
import socket
PAIR = socket.socketpair()
"""


@LINUX
@pytest.mark.parametrize("unforkable", [THREADED, CONNECTED])
def test_a_module_that_holds_threads_or_connections_is_loaded_by_every_worker_for_itself(
    tmp_path, unforkable
):
    file = tmp_path / "mine.py"
    loads = tmp_path / "loads"
    file.write_text(f"{unforkable}\nopen({str(loads)!r}, 'a').write('.')\n{FILE.read_text()}")
    with RewardPool(f"{file}:score", timeout_s=30.0) as pool:
        before = len(loads.read_text())
        assert [score.reward for score in scores_of(pool, PROBLEM, ["fine", "exit", "fine"])] == [
            0.25,
            0.0,
            0.25,
        ]
        assert len(loads.read_text()) == before + 1


@LINUX
def test_a_function_that_cannot_be_loaded_again_is_a_user_error_of_the_futures_and_the_pool_tries_again(
    tmp_path,
):
    file = tmp_path / "mine.py"
    source = THREADED + FILE.read_text()  # so that every worker loads it
    file.write_text(source)
    with RewardPool(f"{file}:score", timeout_s=30.0) as pool:
        file.write_text(THREADED + "import no_such_module\n")
        with pytest.raises(UserError, match="no_such_module"):
            scores_of(pool, PROBLEM, ["exit", "fine", "fine"])[1]
        file.write_text(source)
        assert scores_of(pool, PROBLEM, ["fine"])[0].reward == 0.25


# ---------------------------------------------------------------- processes


class Telling:
    """A template that says what it is told."""

    def __init__(self, *messages):
        self.said = list(messages)

    def messages(self):
        return self.said, True


def test_a_worker_that_was_dropped_before_its_process_was_known_is_killed():
    crew = Crew(["answer"], True, (), 5.0, 1)
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True
    ) as process:
        crew._hear_template(Telling({"forked": 7, "pid": process.pid}))
        assert process.wait(WAIT_S) == -signal.SIGKILL
    crew.stop()
    crew.run()


def test_a_template_that_cannot_import_ahead_still_forks():
    template = Template((json.dumps(["answer"]), "[]", "{}", "2048"), 60.0)
    template.preload("no_such_module")
    worker = template.fork(60.0)
    worker.socket.settimeout(WAIT_S)
    try:
        assert json.loads(worker.socket.recv(1000)) == {"id": -1, "ready": True}
    finally:
        worker.kill()
        template.close()


def test_a_worker_that_died_between_calls_is_replaced_and_no_text_is_blamed():
    with hostile_pool(timeout_s=30.0) as pool:
        pid = int(scores_of(pool, PROBLEM, ["pid"])[0].reward)
        os.kill(pid, signal.SIGKILL)
        assert gone(pid)
        assert scores_of(pool, PROBLEM, ["fine"] * 3) == scores_of(pool, PROBLEM, ["fine"] * 3)
    assert not any(pool.failures.values())


@LINUX
def test_a_dead_worker_is_noticed_and_its_children_are_killed_though_they_hold_its_pipes(tmp_path):
    problem = Problem(uid="p", messages=(), answer="", metadata={"child": str(tmp_path / "child")})
    with hostile_pool(timeout_s=30.0) as pool:
        forked, fine = scores_of(pool, problem, ["fork", "fine"])
    assert (forked.error, fine.reward) == ("worker died: exit 5", 0.25)
    assert gone(int((tmp_path / "child").read_text()))


@LINUX
def test_a_worker_that_closes_its_descriptors_costs_no_time(clock):
    """News of its exit is not waited for, as it has not ended (EXIT_S is WAIT_S here)."""
    began = time.monotonic()
    with hostile_pool() as pool:
        closed, fine = scores_of(pool, PROBLEM, ["close", "fine"])
    assert (closed.error, fine.reward) == ("worker died: it closed its pipe", 0.25)
    assert time.monotonic() - began < WAIT_S / 2


@LINUX
def test_a_child_in_a_session_of_its_own_does_not_outlive_the_pool(tmp_path):
    problem = Problem(uid="p", messages=(), answer="", metadata={"child": str(tmp_path / "child")})
    with hostile_pool() as pool:
        assert [score.reward for score in scores_of(pool, problem, ["daemon", "fine"])] == [
            0.5,
            0.25,
        ]
        child = int((tmp_path / "child").read_text())
        assert alive(child)
    assert gone(child)


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
        with pytest.raises(RuntimeError, match="the reward pool is closed"):
            future.result(timeout=0)
    with pytest.raises(RuntimeError, match="the reward pool is closed"):
        pool.submit(PROBLEM, Attempt(text="fine"))


def test_an_interrupt_while_waiting_leaves_the_pool_usable_and_closing_it_kills_what_runs():
    with hostile_pool(timeout_s=3600.0) as pool:
        old = int(scores_of(pool, PROBLEM, ["pid"])[0].reward)
        before = processor_ticks(old)

        def interrupt():
            eventually(lambda: processor_ticks(old) > before + 5)  # the loop has begun
            os.kill(os.getpid(), signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            threading.Thread(target=interrupt).start()
            scores_of(pool, PROBLEM, ["loop"])
    assert gone(old)


def test_items_of_many_threads_get_their_own_scores():
    def ask(start):
        problems = [
            Problem(uid=str(i), messages=(), answer=str(i)) for i in range(start, start + 100)
        ]
        return [
            score.reward
            for score in score_all(pool, [(p, f"Answer: {int(p.uid) % 150}") for p in problems])
        ]

    with RewardPool("answer", timeout_s=30.0, workers=2) as pool, ThreadPoolExecutor(4) as threads:
        rewards = [reward for part in threads.map(ask, (0, 100, 200, 300)) for reward in part]
    assert rewards == [float(i < 150) for i in range(400)]


def test_an_idle_pool_uses_no_processor():
    """Once it has come to rest, nothing of it wakes in half a second: of this process the pool's
    thread is looked at only."""
    with hostile_pool(2) as pool:
        scores_of(pool, PROBLEM, ["pid"] * 1000)
        template = parent(int(scores_of(pool, PROBLEM, ["pid"])[0].reward))
        threads = [f"self/task/{t.native_id}" for t in threading.enumerate() if t.name == "rewards"]
        assert len(threads) == 1

        def asleep():
            places = [template, *children(template), *threads]
            before = [naps(place) for place in places]
            time.sleep(0.5)
            return [naps(place) for place in places] == before and len(places) >= 3

        assert eventually(asleep)


@LINUX
def test_a_killed_template_costs_no_score():
    with hostile_pool(2, timeout_s=30.0) as pool:
        template = parent(int(scores_of(pool, PROBLEM, ["pid"])[0].reward))
        futures = [pool.submit(PROBLEM, Attempt(text=act)) for act in ["slow"] * 4]
        os.kill(template, signal.SIGKILL)
        assert [future.result().reward for future in futures] == [0.25] * 4
        assert parent(int(scores_of(pool, PROBLEM, ["pid"])[0].reward)) != template
    assert not any(pool.failures.values())


@LINUX
def test_an_item_that_kills_the_template_costs_its_own_score():
    with hostile_pool(timeout_s=30.0) as pool:
        scores = scores_of(pool, PROBLEM, ["fine", "kill template", "total", "fine"])
    assert [score.reward for score in scores] == [0.25, 0.0, 2.0, 0.25]
    assert scores[1].error == "worker died: with all others, twice"
    assert pool.failures == {"timeout": 0, "died": 1, "exception": 0, "bad_value": 0}


@LINUX
def test_no_process_and_no_file_descriptor_is_left():
    """In a process of its own, where no thread of another test ends meanwhile."""
    program = (
        "import os, sys, threading\n"
        "from tandem.rewards.pool.pool import RewardPool; from tandem.types import Attempt, Problem\n"
        "def held(): return sorted(os.listdir('/proc/self/fd')), threading.active_count()\n"
        "before, problem = held(), Problem(uid='', messages=(), answer='')\n"
        "with RewardPool(sys.argv[1], timeout_s=60.0, workers=3) as pool:\n"
        "    futures = [pool.submit(problem, Attempt(text=t)) for t in ('pid', 'exit', 'pid', 'segfault') * 5]\n"
        "    print(*{int(future.result().reward) for future in futures})\n"
        "pool.close()\n"
        "assert held() == before, (before, held())\n"
    )
    done = subprocess.run([sys.executable, "-c", program, HOSTILE], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    pids = [int(pid) for pid in done.stdout.split() if pid != "0"]
    assert pids and all(gone(pid) for pid in pids)


@LINUX
@pytest.mark.parametrize("act", ["fine", "long c call"])
def test_a_killed_parent_leaves_no_worker(act):
    program = (
        "import sys; from tandem.rewards.pool.pool import RewardPool; from tandem.types import Attempt, Problem\n"
        "pool, problem = RewardPool(sys.argv[1], timeout_s=600.0), Problem(uid='', messages=(), answer='')\n"
        "print(int(pool.submit(problem, Attempt(text='pid')).result().reward), flush=True)\n"
        "pool.submit(problem, Attempt(text=sys.argv[2])).result(); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, HOSTILE, act]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        worker = int(parent.stdout.readline())
        assert eventually(lambda: act == "fine" or processor_ticks(worker) > 20)  # it is at it
        assert alive(worker)
        parent.kill()
    assert gone(worker)


def test_importing_pool_and_worker_loads_nothing_heavy():
    program = (
        "import sys, tandem.rewards.pool.pool, tandem.rewards.pool.fork_server\n"
        "print(*{'torch', 'sympy', 'math_verify', 'transformers', 'pydantic', 'asyncio'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""
