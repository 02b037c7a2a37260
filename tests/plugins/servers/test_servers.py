"""Servers as engines: Tandem's own gives the bits of a local engine; others are taken at their
word, or refused by name."""

import json
import threading
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest

from tandem.engine.engine import Engine
from tandem.plugins.serve.requests import Served
from tandem.plugins.servers.engines import TOKEN_S, HttpEngines
from tandem.plugins.servers.rollouts import FileSync
from tandem.runtime.errors import UserError
from tandem.step import train_step
from tandem.types import Score
from tests.support.engines import decode, engine_of, facts, mixed_requests, request
from tests.support.json_server import JsonServer
from tests.support.scripted import ScriptedReward
from tests.support.serving import metric, running
from tests.support.stages import config, stages_in, weights_of, with_runner
from tests.support.tiny import VOCAB, exact_model
from tests.support.waiting import WAIT_S, eventually
from tests.support.working import run

SERVED = Served(name="tiny", context=512, vocabulary=VOCAB, default_max_tokens=16, max_choices=8)


class Letters:
    """The tokenizer of tests.support.engines, as far as a server of token ids needs one."""

    stop_token_ids, byte_tokens, vocabulary = (), frozenset(), 0
    encode = encode_chat = None  # of texts

    def decode(self, tokens):
        return decode(tokens)

    def token_text(self, token):
        return decode([token])


def served(model=None, **options):
    """A server of a tiny model."""
    engine = engine_of(model or exact_model("qwen3"), max_batch=16)
    return running(engine, Letters(), SERVED, **options)


@contextmanager
def connected(*urls, **options):
    reports = []
    options = {
        "longest": 512,
        "max_batch": 16,
        "deadline_s": WAIT_S,
        "restarts": 1000,
        "report": reports.append,
    } | options
    with closing(HttpEngines([f"{url}/v1" for url in urls], decode, **options)) as engines:
        engines.reports = reports
        yield engines


@pytest.fixture(scope="module")
def url():
    with served() as url:
        yield url


@pytest.fixture(scope="module")
def sha256(url):
    with connected(url) as engines:
        return engines.servers[0].served.sha256


class Clock:
    """A clock that a test sets; tick: seconds that pass each time it is read."""

    def __init__(self, tick=0.0):
        self.now, self.tick = 0.0, tick

    def __call__(self):
        self.now += self.tick
        return self.now


class Odd(JsonServer):
    """A server that says what it is told: answers[path] is (status, JSON), or None to say nothing
    at all and close, or a function of the body that returns one of these; bodies: what it was
    sent; asked: the paths."""

    def __init__(self, answers):
        super().__init__()
        self.answers, self.bodies = answers, []

    def take(self, method, path, headers, body):
        path, body = path.removeprefix("/v1"), json.loads(body) if body else None
        self.asked.append(path)
        self.bodies += [body] if body else []
        found = self.answers.get(path)
        return found(body) if callable(found) else found


@contextmanager
def odd(completion=None, status=200, sha256=""):
    """sha256: of the weights that it says to have, as Tandem's servers do."""
    model = {"id": "other", "max_model_len": 400}
    answers = {"/completions": completion and (status, completion)}
    if sha256:
        model["owned_by"] = "tandem"
        answers["/weights"] = 200, {"weight_version": 0, "sha256": sha256, "takes_updates": True}
    with Odd({**answers, "/models": (200, {"data": [model]})}) as server:
        yield server.url, server


def choice(tokens, finish="length", **more):
    logprobs = {"token_logprobs": [-0.5] * len(tokens)}
    fields = {"token_ids": tokens, "logprobs": logprobs, "finish_reason": finish} | more
    return {"choices": [fields]}


# ---- Tandem's own server


def every_request():
    turn = replace(request(90, [4, 4, 9], max_new_tokens=9), num_sampled=7)
    filtered = {"min_p": 0.05, "repetition_penalty": 1.3, "top_k": 50, "top_p": 0.9}
    return [*mixed_requests(), turn, request(91, [1, 2], max_new_tokens=20, **filtered)]


def test_completions_of_tandems_server_have_the_bits_of_a_local_engine(url):
    asked = every_request()
    expected = engine_of(exact_model("qwen3")).generate(asked)
    with connected(url) as engines:
        assert list(map(facts, run(engines, asked))) == list(map(facts, expected))
    assert {c.stop_reason for c in expected} == {"stop", "length"}


def test_a_paused_completion_goes_on_at_a_server(url):
    local, whole = engine_of(exact_model("qwen3")), request(3, [7, 8], max_new_tokens=12)
    with connected(url) as engines:
        [paused] = run(engines, [replace(whole, max_tokens_now=5)])
        assert facts(paused) == facts(local.generate([replace(whole, max_tokens_now=5)])[0])
        assert paused.stop_reason == "paused" and len(paused.tokens) == 5
        [paused] = run(engines, [replace(whole, resume_from=paused, max_tokens_now=4)])
        assert paused.stop_reason == "paused" and len(paused.tokens) == 9
        [completion] = run(engines, [replace(whole, resume_from=paused)])
    assert facts(completion) == facts(local.generate([whole])[0])


def test_requests_of_a_lost_server_go_to_another_with_the_reason_in_the_log(url, sha256):
    asked = mixed_requests()
    expected = engine_of(exact_model("qwen3")).generate(asked)
    for completion, status in ((None, 200), ({"error": "out of memory"}, 503)):
        with odd(completion, status, sha256) as (broken, server), connected(broken, url) as engines:
            found = run(engines, asked)
            assert list(map(facts, found)) == list(map(facts, expected))
            assert server.bodies
        reason = "HTTP 503" if completion else "RemoteProtocolError"
        [first, *_] = engines.reports
        assert first.startswith(f"the server {broken}/v1 was lost: {reason}")
        assert first.endswith("of its requests go to another")


def test_both_servers_get_requests_and_a_prompt_stays_at_one(sha256):
    answer = choice([5, 6], weight_versions=[0, 0])
    servers = odd(answer, sha256=sha256), odd(answer, sha256=sha256)
    with servers[0] as (a, one), servers[1] as (b, two), connected(a, b) as engines:
        for _ in range(3):
            run(engines, [request(n, [9, n % 2], max_new_tokens=2) for n in range(8)])
    prompts = [{tuple(body["prompt"]) for body in server.bodies} for server in (one, two)]
    assert len(one.bodies) == len(two.bodies) == 12
    assert sorted(map(sorted, prompts)) == [[(9, 0)], [(9, 1)]]


def test_all_servers_lost_is_one_error_after_the_deadline_that_names_each():
    clock = Clock()
    with (
        odd(None) as (a, one),
        odd({"error": "x"}, 500) as (b, two),
        connected(a, b, clock=clock) as e,
    ):
        one.answers["/models"], two.answers["/models"] = None, (500, {})
        clock.now += 10 * WAIT_S  # in which the servers were not lost
        for n in range(4):
            e.submit(request(n))
        assert eventually(lambda: e.step() or not e.serving)
        clock.now += WAIT_S
        e.step()  # not longer than the deadline yet
        clock.now += 1
        with pytest.raises(UserError, match="none of the servers answers") as caught:
            e.step()
        assert f"{a}/v1: RemoteProtocolError" in caught.value.found
        assert f"{b}/v1: HTTP 500" in caught.value.found
        assert f"{WAIT_S:g} s" in caught.value.expected
    gone = pytest.raises(UserError, match="none of the servers answers")
    with gone as caught, connected(a):
        pass
    assert "ConnectError" in caught.value.found


def test_a_request_that_makes_a_server_fail_ends_the_run():
    with (
        odd({"error": "x"}, 500) as (url, server),
        connected(url, restarts=2, deadline_s=1e6, clock=Clock(tick=1.0)) as engines,
        pytest.raises(UserError, match="lost again and again") as caught,
    ):
        run(engines, [request(0)])
    assert len(server.bodies) == 3 and caught.value.found.startswith("HTTP 500")
    assert "at most 2 losses" in caught.value.expected


def test_a_long_completion_is_waited_for_while_its_server_answers_checks():
    clock, over = Clock(tick=WAIT_S), threading.Event()

    def long(body):
        assert over.wait(WAIT_S)
        return 200, choice([5, 6])

    with odd() as (url, server), connected(url, clock=clock) as engines:
        server.answers["/completions"] = long
        ticket = engines.submit(request(0, max_new_tokens=2))
        assert eventually(lambda: engines.step() or server.asked.count("/models") > 3)
        assert engines.answer_s(ticket) == WAIT_S + 2 * TOKEN_S
        over.set()
        assert eventually(lambda: engines.step() and ticket.completion)
        assert len(server.bodies) == 1 and not engines.reports


def test_a_server_at_work_that_answers_no_check_is_lost():
    over = threading.Event()

    def frozen(answer):
        assert over.wait(WAIT_S)
        return answer

    with odd() as (url, server), connected(url) as engines:
        models = server.answers["/models"]
        server.answers["/completions"] = lambda body: frozen((200, choice([5] * 100)))
        server.answers["/models"] = lambda body: frozen(models)
        ticket = engines.submit(request(0, max_new_tokens=100))
        engines.deadline_s = 0.2
        assert eventually(lambda: engines.step() or engines.servers[0].lost)
        over.set()
        engines.deadline_s = WAIT_S
        assert eventually(lambda: engines.step() and ticket.completion)
    assert engines.reports[0].startswith(f"the server {url}/v1 was lost: ReadTimeout")


def test_a_server_that_comes_back_serves_again(sha256):
    with odd(sha256=sha256) as (url, server), connected(url) as engines:
        ticket = engines.submit(request(0, max_new_tokens=2))
        assert eventually(lambda: engines.step() or engines.servers[0].lost)
        server.answers["/completions"] = 200, choice([5, 6], weight_versions=[0, 0])
        assert eventually(lambda: engines.step() and ticket.completion)
        told = [line.split("/v1 ")[1].split(":")[0] for line in engines.reports]
    assert told == ["was lost", "serves again"]


def test_a_cancelled_request_ends_at_the_server(url):
    with connected(url) as engines:
        ticket = engines.submit(request(0, max_new_tokens=500))
        assert eventually(lambda: engines.step() or metric(url, "tandem_running"))
        engines.cancel(ticket)
        assert ticket.completion.stop_reason == "cancelled"
        assert eventually(lambda: not metric(url, "tandem_running"))
        assert run(engines, [request(1)])[0].stop_reason == "length"


# ---- others


def test_another_server_gets_a_seed_and_its_answer_is_read():
    with odd(choice([5, 3], "stop")) as (url, server), connected(url) as engines:
        asked = request(0, max_new_tokens=8, stop_token_ids=(3,), top_k=4)
        [completion] = run(engines, [asked])
        [body] = server.bodies
        assert engines.longest == 400
    assert completion.tokens.tolist() == [5, 3] and completion.text == decode([5])
    assert completion.logprobs.tolist() == [-0.5, -0.5] and completion.stop_reason == "stop"
    assert body["prompt"] == [5, 9, 2] and body["return_token_ids"] and body["top_k"] == 4
    assert 0 <= body["seed"] < 2**63 and not {"draw_key", "repetition_penalty"} & body.keys()


@pytest.mark.parametrize(
    ("params", "where"),
    [
        ({"repetition_penalty": 1.2}, "rollout.repetition_penalty"),
        ({"min_p": 0.1, "top_k": 5}, "rollout.min_p"),
        ({"top_logprobs": 2}, "top_logprobs"),
    ],
)
def test_what_servers_define_otherwise_is_refused_by_name(params, where):
    refused = pytest.raises(UserError, match="does not define this setting")
    with odd() as (url, _), connected(url) as engines, refused as caught:
        engines.submit(request(0, **params))
    assert caught.value.where.startswith(where)


def test_a_stop_string_across_a_pause_is_refused(url):
    with connected(url) as engines:
        [paused] = run(engines, [replace(request(3), max_tokens_now=5)])
        with pytest.raises(UserError, match="does not define this setting"):
            engines.submit(replace(request(3, stop=("a",)), resume_from=paused))
        with pytest.raises(UserError, match="longer than an engine can hold"):
            engines.submit(request(3, max_new_tokens=512))


@pytest.mark.parametrize(
    ("answer", "status", "message"),
    [
        ({"choices": [{"text": "hi"}]}, 200, "does not return token ids and log-probs"),
        (choice([[5]] * 8), 200, "does not return token ids and log-probs"),
        (choice([5] * 8, weight_versions=3), 200, "does not return token ids and log-probs"),
        (choice([5, 6], "stop"), 200, "ended a completion where the run would not"),
        (choice([5, 6], "length"), 200, "ended a completion where the run would not"),
        (choice([5] * 9, "length"), 200, "ended a completion where the run would not"),
        (choice([5] * 7 + [VOCAB]), 200, "does not return token ids and log-probs"),
        ({"error": {"message": "no such model"}}, 404, "refuses a request"),
        ({"error": {"message": "a wrong key"}}, 401, "refuses a request"),
    ],
)
def test_answers_that_cannot_be_trained_on_are_errors(answer, status, message):
    refused = pytest.raises(UserError, match=message)
    with odd(answer, status) as (url, _), connected(url) as engines, refused:
        run(engines, [request(0, vocabulary=VOCAB)])


def test_servers_of_other_weights_are_refused(url):
    refused = pytest.raises(UserError, match="do not run the same weights")
    with served(exact_model("qwen3", seed=1)) as other, refused, connected(url, other):
        pass


def test_tokens_of_weights_that_changed_are_refused(sha256):
    answer = choice([5, 6], weight_versions=[0, 1])
    changed = pytest.raises(UserError, match="changed while it")
    with odd(answer, sha256=sha256) as (url, _), connected(url) as engines, changed as caught:
        run(engines, [request(0, max_new_tokens=2)])
    assert caught.value.found == "tokens of versions [0, 1]"


# ---- new weights


class TokenReward(ScriptedReward):
    """0, 1 or 2, by the tokens: servers answer in any order."""

    def score(self, problem, attempt):
        return Score(reward=sum(attempt.tokens) % 3, parts={})


def test_steps_with_a_server_have_the_bits_of_the_inline_engine(tmp_path):
    plain = stages_in(tmp_path / "plain", config(), reward=TokenReward())
    expected = [train_step(plain, step).metrics for step in range(3)]
    model = exact_model("qwen3", seed=5)  # the first sync replaces it
    engine = Engine(model, decode, cache_bytes=1 << 24, max_batch=8)
    with running(engine, Letters(), SERVED, takes_updates=True) as url, connected(url) as engines:
        stages = stages_in(tmp_path / "served", config(), reward=TokenReward())
        local = stages.collector.runner.engine
        stages, engines.reference = with_runner(stages, engine=engines), local
        sync = FileSync(engines, local, tmp_path / "weights", keep=0)
        stages = replace(stages, sync=sync)
        sync.publish(0)
        rows = [train_step(stages, step).metrics for step in range(3)]
        assert engines.weight_version == engine.weight_version == 2
    assert rows == expected and weights_of(stages) == weights_of(plain)
    assert [file.name for file in (tmp_path / "weights").iterdir()] == [
        "version_000003.safetensors"
    ]


def test_a_gap_of_a_server_shows(url):
    local = engine_of(exact_model("qwen3", seed=1))
    with connected(url) as engines:
        run(engines, [request(0)])
        engines.reference = local
        assert engines.logprob_gap() > 0.1


def test_new_weights_are_refused_by_a_server_that_was_not_told_to_take_them(url, tmp_path):
    with connected(url) as engines:
        sync = FileSync(engines, engine_of(exact_model("qwen3")), tmp_path, keep=0)
        sync.publish(1)
        with pytest.raises(UserError, match="refuses a request") as caught:
            sync.sync_to(1)
    assert "--allow-weight-updates" in caught.value.found


def test_a_file_that_is_no_file_of_weights_is_named_and_other_weights_are_found(tmp_path):
    with served(takes_updates=True) as url, connected(url) as engines:
        (tmp_path / "odd").write_text("no weights")
        with pytest.raises(UserError, match="refuses a request") as caught:
            engines.load(str(tmp_path / "odd"), 1, "")
        assert "the weights cannot be read" in caught.value.found
        sync = FileSync(engines, engine_of(exact_model("qwen3")), tmp_path, keep=0)
        sync.publish(2)
        sync.hashes[2] = "another"
        with pytest.raises(UserError, match="weights differ from the trainer's"):
            sync.sync_to(2)
