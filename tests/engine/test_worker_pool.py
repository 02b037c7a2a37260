"""Rollout workers: the same bits as the inline engine, whoever is killed, stopped, crashed, or
wrong.

Most tests run workers that have no model (odd_worker.py); the real ones are started once.
"""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tandem.engine.dispatch import identity_of
from tandem.engine.engine import Engine
from tandem.engine.sync_check import make_probe
from tandem.model.load import load_model
from tandem.model.tiny import make_tiny
from tandem.model.tokenizer import decode_text, load_tokenizer
from tandem.rollout_workers.pool import EngineSpec
from tandem.rollout_workers.protocol import (
    completion_message,
    read_completion,
    read_request,
    request_message,
)
from tandem.runtime.errors import UserError
from tandem.runtime.processes import started_at
from tandem.types import Completion, Request, SamplingParams
from tandem.weights.shared import SharedWeights
from tandem.workers.channel import ProtocolError, decode, encode
from tests.support.odd_worker import POISON
from tests.support.waiting import eventually
from tests.support.working import (
    all_idle,
    bits,
    expected_of,
    groups,
    odd_workers,
    open_workers,
    processes,
    request,
    requests_served_again,
    run,
    until,
)

ROOT = Path(__file__).parent.parent.parent
# ---- the wire


def everything(**changes):
    resume_from = Completion(
        tokens=np.array([7, 2], np.int64),
        logprobs=np.array([0xFFC12345, 0x80000000], np.uint32).view(np.float32),
        weight_versions=np.array([3, 4], np.int32),
        text="3\udc80\n",
        stop_reason="paused",
        top_tokens=np.array([[7, 1, 5], [2, 3, 4]]),
        top_logprobs=np.array([[-0.0, np.nan, -np.inf]] * 2, np.float32),
        experts=np.arange(12, dtype=np.int16).reshape(3, 2, 2),
    )
    params = SamplingParams(
        max_new_tokens=9,
        temperature=0.1,
        top_k=3,
        top_p=0.7,
        min_p=0.01,
        repetition_penalty=1.3,
        vocabulary=90,
        stop=("a\nb", "é"),
        stop_token_ids=(4, 5),
        min_tokens=2,
        top_logprobs=3,
        prompt_logprobs=1,
    )
    whole = Request(
        key=2**64 - 3,
        prompt=np.array([2**40, 1], np.int64),
        params=params,
        num_sampled=11,
        resume_from=resume_from,
        max_tokens_now=6,
    )
    return replace(whole, **changes)


def test_every_field_of_a_request_arrives_with_its_bits():
    sent = everything()
    # a new field must be given a value here, and then arrive
    for value in (sent, sent.resume_from, sent.params):
        unset = [f.name for f in fields(value) if getattr(value, f.name) is f.default]
        assert unset == (["mask"] if value is sent else [])  # refused, see below
    got = read_request(decode(encode(request_message(7, sent))))
    assert bits(got.resume_from, text=True) == bits(sent.resume_from, text=True)
    assert got.prompt.tobytes() == sent.prompt.tobytes() and got.prompt.dtype == np.int64
    for f in fields(sent):
        assert f.name in ("prompt", "resume_from") or getattr(got, f.name) == getattr(sent, f.name)
    assert identity_of(got) == identity_of(sent)


def test_a_mask_is_refused_as_no_process_shares_its_state():
    with pytest.raises(AssertionError, match="in this process"):
        request_message(7, everything(mask=object()))


def test_a_malformed_completion_is_a_protocol_error():
    message = completion_message(7, "", everything().resume_from)
    fields = message["is"]
    short = {"tokens": ["<i8", [1], fields["tokens"][2][:12]]}
    for broken in (short, {"logprobs": "?"}, {"logprobs": ["<f4", [2], "?"]}, {"text": 7}):
        with pytest.raises(ProtocolError):
            read_completion({**message, "is": {**fields, **broken}})
    with pytest.raises(ProtocolError):
        read_completion({"text": ""})


# ---- workers without a model


def expected(workers, requests):
    return expected_of(workers, workers.weight_version, requests)


def require_same_bits(workers, requests):
    found = [bits(completion) for completion in run(workers, requests)]
    assert found == expected(workers, requests)


@pytest.fixture
def file(tmp_path):
    """The file of a fault, which happens as long as it is there."""
    (tmp_path / "fault").touch()
    return tmp_path / "fault"


def test_a_request_too_long_for_an_engine_is_refused_at_once():
    with odd_workers(count=1) as workers:
        run(workers, [request(0, range(236))])
        with pytest.raises(UserError, match="longer than an engine can hold"):
            workers.submit(request(0, range(237)))


def test_a_cancelled_request_ends_empty_and_changes_no_other():
    with odd_workers(max_batch=2, idle=True) as workers:
        requests = groups(2, max_new_tokens=200)  # none of them ends in one step
        tickets = [workers.submit(request) for request in requests]
        workers.cancel(tickets[0])  # not handed over yet
        workers.step()
        for ticket in tickets[1:6]:  # four of them are with a worker
            workers.cancel(ticket)
        until(workers, lambda: all(ticket.completion for ticket in tickets))
        ended = [ticket.completion for ticket in tickets]
        assert {(one.stop_reason, len(one.tokens)) for one in ended[:6]} == {("cancelled", 0)}
        assert [bits(one) for one in ended[6:]] == expected(workers, requests)[6:]
        until(workers, lambda: all_idle(workers))  # every cancelled one was answered for
        workers.apply(1)
        require_same_bits(workers, requests)


# ---- faults


@contextmanager
def struck(workers, state, how):
    """Send a signal to the first worker seen in that state while this context lasts; the list has
    its number and pid."""
    hit, over = [], threading.Event()

    def look():
        while not hit and not over.is_set():
            for worker in processes(workers):
                if worker.state == state and not hit:
                    os.kill(worker.pid, how)
                    hit.append(worker)
            time.sleep(0.0005)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield hit
    finally:
        over.set()
        thread.join()


def require_replaced(workers, hit):
    """The witness: that process is gone, and another has its number."""
    [worker] = hit
    until(workers, lambda: processes(workers)[worker.number].pid != worker.pid)
    until(workers, lambda: not Path(f"/proc/{worker.pid}").exists())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_killed_or_stopped_in_any_state_changes_no_bit(how):
    with odd_workers(count=3, heartbeat_s=1.0, restarts=40) as workers:
        for state, version in (("starting", 0), ("idle", 0), ("serving", 0), ("syncing", 1)):
            if state != "starting":
                until(workers, lambda: all_idle(workers))
            used = workers.restarts.used
            with struck(workers, state, how) as hit:
                while not hit and state in ("starting", "idle"):
                    time.sleep(0.001)
                workers.apply(version)
                require_same_bits(workers, groups(12, max_new_tokens=40))
            require_replaced(workers, hit)
            assert workers.restarts.used > used
            lost = f"worker {hit[0].number} (process {hit[0].pid}) was lost"
            assert any(lost in told for told in workers.reports)
        assert requests_served_again(workers.reports) > 0 and workers.weight_version == 1


def test_the_status_tells_who_runs_where_and_what_was_lost():
    with odd_workers(count=2, restarts=1, idle=True) as workers:
        run(workers, groups(2))
        first, second = workers.status()
        assert (first["role"], second["role"]) == ("rollout worker 0", "rollout worker 1")
        assert first["requests"] + second["requests"] == 8
        assert {first["state"], second["state"]} == {"idle"} and first["version"] == 0
        os.kill(second["pid"], signal.SIGKILL)
        until(workers, lambda: workers.status()[1]["restarts"] == 1)
        assert workers.status()[0] == first and workers.status()[1]["pid"] != second["pid"]


@pytest.mark.parametrize("fault", ["crash", "garbage"])
def test_a_worker_that_crashes_or_babbles_changes_no_bit(fault, file):
    with odd_workers(fault=fault, file=file, restarts=1, idle=True) as workers:
        require_same_bits(workers, groups(8))
        assert not file.exists() and workers.restarts.used == 1
        assert requests_served_again(workers.reports) > 0
        assert {"crash": "exit code 1", "garbage": "not a message"}[fault] in workers.reports[0]
        words = "last words:\n" in workers.reports[0], "fell over" in workers.reports[0]
        assert words == (fault == "crash", fault == "crash")


def test_a_worker_in_an_endless_loop_is_killed_and_located(file):
    with odd_workers(fault="spin", file=file, heartbeat_s=2.0, restarts=20, idle=True) as workers:
        require_same_bits(workers, groups(4))
        assert any("no sign of life for 2 s" in r and "in spin" in r for r in workers.reports)
        assert all(r.count("in spin") <= 1 for r in workers.reports)


def test_a_driver_that_was_busy_takes_no_worker_for_silent():
    with odd_workers(heartbeat_s=1.2, restarts=20, idle=True) as workers:
        used = workers.restarts.used  # a start may take longer on a busy machine
        workers.call(lambda: time.sleep(1.5))
        require_same_bits(workers, groups(4))
        assert workers.restarts.used == used


def test_ctrl_c_in_the_terminal_is_not_for_a_worker():
    with odd_workers(idle=True) as workers:
        for worker in processes(workers):
            os.kill(worker.pid, signal.SIGINT)
            assert os.getsid(worker.pid) != os.getsid(0)
        require_same_bits(workers, groups(4))
        assert workers.restarts.used == 0


def test_a_request_that_kills_every_worker_ends_the_run():
    with odd_workers(fault="poison", restarts=3) as workers:
        with pytest.raises(UserError, match="again and again") as caught:
            run(workers, [*groups(1), request(99, (POISON,))])
        assert workers.restarts.used == 3
        assert "RuntimeError: it was poison" in caught.value.found
        assert "exit code 1" in caught.value.where


def test_a_worker_with_other_weights_gets_no_request():
    with odd_workers(fault="other weights", count=1) as workers:
        workers.submit(request(0))
        with pytest.raises(UserError, match="weights differ from the trainer's") as caught:
            until(workers, lambda: processes(workers)[0].tickets)
    assert "weight version 0" in caught.value.where
    assert len(caught.value.found) == len(caught.value.expected) == 64
    assert workers.published.hash_of(0) == caught.value.expected


def test_a_worker_that_gets_no_weights_tries_again_and_is_then_replaced(file):
    with odd_workers(fault="lost weights", file=file, restarts=1) as workers:
        until(workers, lambda: len(workers.reports) == 2 and all_idle(workers))
        again, lost = workers.reports
        assert "did not get weights 0, and tries again: the line is down" in again
        assert "it did not get weights 0: the line is down" in lost
        require_same_bits(workers, groups(4))


def test_a_completion_of_another_request_is_an_error():
    refused = pytest.raises(UserError, match="made for another request")
    with odd_workers(fault="swap", count=1) as workers, refused:
        run(workers, [request(0), request(1)])  # of one prompt


def test_a_completion_of_older_weights_is_an_error():
    with odd_workers(fault="stale", count=1) as workers:
        require_same_bits(workers, groups(1))
        workers.apply(1)
        with pytest.raises(UserError, match="other weights than those applied"):
            run(workers, groups(1))


def test_workers_are_tried_out_before_they_are_asked_for_anything():
    with odd_workers(fault="refuse", restarts=5, version=None) as workers:
        with pytest.raises(UserError, match="the model cannot be loaded"):
            workers.try_out(0)
        assert workers.restarts.used == 0
    with odd_workers(fault="gap", count=3, version=None) as workers:
        assert workers.try_out(0) == 1e-6 and workers.weight_version == -1
        workers.apply(0)
        require_same_bits(workers, groups(8))
        workers.apply(1)
        require_same_bits(workers, groups(8))
        assert workers.restarts.used == 0


DRIVER = """
import os
from tandem.runtime.processes import descendants
from tests.support.working import groups, odd_workers, processes, until
with odd_workers(fault="spin", count=2) as workers:
    [workers.submit(request) for request in groups(2)]
    until(workers, lambda: {worker.state for worker in processes(workers)} == {"serving"})
    print(*(process.pid for process in descendants(os.getpid())), flush=True)
    until(workers, lambda: False)
"""


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere a worker ends with its socket, after its pass"
)
def test_no_worker_outlives_a_killed_driver():
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    assert len(pids) == 3 and all(Path(f"/proc/{pid}").exists() for pid in pids)
    driver.kill()
    driver.wait()
    driver.stdout.close()
    assert eventually(lambda: not any(map(started_at, pids)))


def test_closing_leaves_no_process_and_no_descriptor():
    gc.collect()  # of what earlier tests left, which may also go while this one runs
    before = set(os.listdir("/dev/fd"))
    with odd_workers(count=3) as workers:
        pids = [worker.pid for worker in processes(workers)]
        run(workers, groups(2))
    for file in workers.published.files.values():
        file.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert set(os.listdir("/dev/fd")) <= before


# ---- workers with a model


class Crossing(SharedWeights):
    """Sends the weights of another version when told to."""

    crossed = False

    def descriptor(self, version):
        return super().descriptor(version - self.crossed)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """(two real workers, an engine with the same model in this process, shared weights)"""
    path = str(tmp_path_factory.mktemp("model"))
    make_tiny(path, hidden=64, layers=2, intermediate=128)
    model, tokenizer = load_model(path), load_tokenizer(path)
    engine = Engine(
        model, lambda tokens: decode_text(tokenizer, tokens), cache_bytes=4 << 20, max_batch=8
    )
    shared, reports = Crossing(model.merged_weights()), []
    shared.publish(0, model.merged_weights())
    sizes = {"cache_mb": 4, "max_batch": 8, "longest": engine.longest}
    spec = EngineSpec(model_path=path, matmul=engine.model.kernels.chosen, **sizes)
    with open_workers(spec, shared, reports, count=2) as workers:
        workers.apply(0)
        engine.apply(0)
        yield workers, engine, shared
    shared.close()


@pytest.mark.parametrize(("fault", "gap"), [("none", 0.0), ("gap", 1e-6), ("no number", np.nan)])
def test_the_largest_gap_of_all_workers_is_told(fault, gap):
    with odd_workers(fault=fault) as workers:
        run(workers, groups(3))
        np.testing.assert_equal(workers.logprob_gap(), gap)
        run(workers, groups(2))


def change(model):
    for weight in model.trainable().values():
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            weight.add_(0.01 * noise)


def test_workers_score_a_probe_with_the_bits_of_the_inline_engine(real):
    workers, engine, shared = real
    probe = make_probe(engine.score, engine.model.config.vocab_size, engine.longest, limit=1.0)
    probe["logprobs"][3] += 0.5  # all others are equal
    shared.publish(2, engine.model.merged_weights(), probe)
    workers.apply(2)
    until(workers, lambda: all_idle(workers))
    assert workers.logprob_gap() == 0.5 / len(probe["logprobs"])


def test_weights_that_are_not_the_trainers_are_found_by_name(real):
    workers, engine, shared = real
    shared.publish(3, engine.model.merged_weights())
    workers.apply(3)
    until(workers, lambda: all_idle(workers))  # a worker that has not started raises nothing
    change(engine.model)
    shared.publish(4, engine.model.merged_weights())
    shared.crossed = True
    with pytest.raises(UserError, match="the engine's weights differ from the trainer's") as caught:
        workers.apply(4)
        until(workers, lambda: False)
    assert caught.value.found == shared.hash_of(3) and caught.value.expected == shared.hash_of(4)
    first = next(iter(shared.layout.parts))[0]
    assert f"weight version 4: {first}, " in caught.value.where
