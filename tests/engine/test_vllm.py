"""vLLM as the engine of rollout workers: the trainer's log-probs before and after an update, the
ends of Tandem's completions, pauses, and an interpreter that is not there.

One vLLM is started for the file, where an interpreter has it.
"""

import re
import sys
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch

from tandem.audit.replay import replay
from tandem.cli.train import train
from tandem.config.recipe import load_config
from tandem.engine.ending import find_ending
from tandem.engine.worker_pool import vllm_worker
from tandem.engine.worker_pool.pool import Workers
from tandem.model.forward import batch_logprobs
from tandem.model.load import load_model
from tandem.model.tiny import make_tiny
from tandem.model.tokenizer import decode_text, load_tokenizer
from tandem.run_folder.metrics import read_metrics
from tandem.run_folder.past_run import open_past
from tandem.runtime.errors import UserError
from tandem.types import Microbatch, SamplingParams
from tandem.weights.shared import SharedWeights
from tests.support.runs import prepare
from tests.support.waiting import eventually
from tests.support.working import all_idle, groups, request, run, until

GAP = 1e-4  # nats, in float32; another kernel adds in another order
LONGEST = 256
# heads of 32, the smallest of vLLM's kernels for CPUs
SHAPE = {"hidden": 64, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate": 128}


def why_none():
    """Say why there is no vLLM here, or nothing."""
    try:
        vllm_worker.find_python()
    except UserError as error:
        return str(error.found)
    return ""


needs_vllm = pytest.mark.skipif(bool(why_none()), reason=f"no vLLM: {why_none()}")


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    """A worker with vLLM, the trainer's model, whose head is tied, and its published weights."""
    path = str(tmp_path_factory.mktemp("model"))
    make_tiny(path, **SHAPE)
    model, reports = load_model(path), []
    assert model.config.tie_word_embeddings
    with (
        closing(SharedWeights(model.merged_weights())) as shared,
        Workers(
            model_path=path,
            cache_mb=16,
            max_batch=32,
            longest=LONGEST,
            count=1,
            heartbeat_s=60.0,
            restarts=1,
            weights=shared,
            report=reports.append,
            command=vllm_worker.command(),
        ) as workers,
    ):
        shared.publish(0, model.merged_weights())
        workers.apply(0)
        # its first start on a machine inspects the model's class, a minute beside other tests
        assert eventually(lambda: workers.step() or all_idle(workers), within_s=300.0)
        assert reports == []
        yield workers, model, shared, path


def packed_logprobs(model, asked, completion):
    """The trainer's log-probs of a completion's tokens, from its packed pass."""
    before, count = len(asked.prompt), len(completion.tokens)
    tokens = np.concatenate([asked.prompt, completion.tokens])
    segments = [(0, before, 0, 0)] + [(before, count - 1, 0, before)] * (count > 1)
    batch = Microbatch(
        tokens=tokens[:-1],
        positions=np.arange(len(tokens) - 1),
        segments=np.array(segments),
        rows=np.arange(before - 1, len(tokens) - 1),
        targets=completion.tokens,
        samples=np.zeros(1, np.int64),
        sequences=np.zeros(count, np.int64),
    )
    with torch.no_grad():
        return batch_logprobs(model, batch, asked.params, entropy=False)[0].numpy()


def largest_gap(model, requests, completions):
    return max(
        float(np.abs(packed_logprobs(model, asked, completion) - completion.logprobs).max())
        for asked, completion in zip(requests, completions, strict=True)
    )


def every_kind():
    kinds = [
        {},
        {"temperature": 0.7, "top_p": 0.8},
        {"top_k": 9, "temperature": 1.3},
        {"top_k": 20, "top_p": 0.9},
        {"min_p": 0.02, "top_k": 30},
        {"repetition_penalty": 1.3},
    ]
    prompts = [np.random.default_rng(n).integers(9, 100, n) for n in (3, 40, 17, 130, 64, 33)]
    return [request(n, prompts[n % 6], max_new_tokens=16, **kinds[n % 6]) for n in range(12)]


@needs_vllm
def test_vllm_samples_from_the_trainers_distribution_before_and_after_updates(vllm):
    """The head is tied, and vLLM does not renew its packed copy by itself."""
    workers, model, shared, _ = vllm
    requests = every_kind()
    assert largest_gap(model, requests, run(workers, requests)) < GAP
    for version in (1, 2):
        with torch.no_grad():
            for weight in model.trainable().values():
                noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(version))
                weight.add_(0.02 * noise)
        shared.publish(version, model.merged_weights())
        workers.apply(version)
        completions = run(workers, requests)
        assert largest_gap(model, requests, completions) < GAP
        assert all((c.weight_versions == version).all() for c in completions)


@needs_vllm
def test_more_prompts_than_a_pass_holds_all_get_their_tokens(vllm):
    """vLLM would split a prompt, and cannot rewind its seed on a CPU."""
    workers, model, _, _ = vllm
    rng = np.random.default_rng(0)
    asked = [request(n, rng.integers(9, 100, 200), max_new_tokens=4) for n in range(32)]
    assert largest_gap(model, asked, run(workers, asked)) < GAP


@needs_vllm
def test_a_request_is_repeated_and_samples_of_a_prompt_differ(vllm):
    workers, _, _, _ = vllm
    asked = groups(8, max_new_tokens=12)
    first, again = run(workers, asked), run(workers, asked)
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(first, again, strict=True))
    assert len({c.tokens.tobytes() for c in first}) == len(first)
    later_turn = run(workers, [replace(one, num_sampled=12) for one in asked])
    assert all(
        not np.array_equal(a.tokens, b.tokens) for a, b in zip(first, later_turn, strict=True)
    )


@needs_vllm
def test_completions_end_as_those_of_tandems_engine(vllm):
    workers, _, _, path = vllm
    tokenizer = load_tokenizer(path)
    [free] = run(workers, [request(7, max_new_tokens=16)])
    assert (free.stop_reason, len(free.tokens)) == ("length", 16)
    assert free.text == decode_text(tokenizer, free.tokens)
    at = next(n for n in range(3, 16) if free.tokens[n] not in free.tokens[:n])
    [stopped] = run(
        workers, [request(7, max_new_tokens=16, stop_token_ids=(int(free.tokens[at]),))]
    )
    assert stopped.stop_reason == "stop"
    assert np.array_equal(stopped.tokens, free.tokens[: at + 1])
    assert stopped.text == decode_text(tokenizer, free.tokens[:at])
    string = free.text[3:5]
    [cut] = run(workers, [request(7, max_new_tokens=16, stop=(string,))])
    assert cut.stop_reason == "stop" and cut.text == free.text[: free.text.index(string)]
    assert 0 < len(cut.tokens) < 16 and string in decode_text(tokenizer, cut.tokens)


@needs_vllm
def test_a_paused_completion_goes_on_with_the_weights_of_each_token(vllm):
    workers, model, shared, _ = vllm
    first = workers.weight_version
    asked = [request(n, max_new_tokens=12) for n in range(4)]
    paused = run(workers, [replace(one, max_tokens_now=5) for one in asked])
    assert all(c.stop_reason == "paused" and len(c.tokens) == 5 for c in paused)
    shared.publish(first + 1, model.merged_weights())
    workers.apply(first + 1)
    resumed = [replace(one, resume_from=c) for one, c in zip(asked, paused, strict=True)]
    whole = run(workers, resumed)
    for one, c, before in zip(asked, whole, paused, strict=True):
        assert c.stop_reason == "length" and len(c.tokens) == 12
        assert np.array_equal(c.tokens[:5], before.tokens)
        assert c.weight_versions.tolist() == [first] * 5 + [first + 1] * 7
        assert largest_gap(model, [one], [c]) < GAP


@needs_vllm
def test_a_cancelled_request_ends_and_the_others_go_on(vllm):
    workers, model, _, _ = vllm
    asked = [request(n, max_new_tokens=200) for n in range(3)]
    tickets = [workers.submit(one) for one in asked]
    until(workers, lambda: any(w.tickets for w in workers._workers.values()))
    workers.cancel(tickets[1])
    assert tickets[1].completion.stop_reason == "cancelled"
    until(workers, lambda: all(t.completion is not None for t in tickets))
    assert [t.completion.stop_reason for t in tickets] == ["length", "cancelled", "length"]
    until(workers, lambda: all_idle(workers))
    assert largest_gap(model, asked[:1], [tickets[0].completion]) < GAP


@needs_vllm
def test_a_run_with_vllm_is_bounded_and_replayed_from_its_journal(tmp_path):
    """The steps are learned again bit by bit; of vLLM's log-probs the gap is told."""
    _, _, _, command, recipe, *overrides = prepare(tmp_path, 2, "train")
    make_tiny(tmp_path / "vllm", **SHAPE)
    changes = ["rollout.engine=vllm", "rollout.workers=1", "rl.correction=tis", "eval.samples=1"]
    folder = tmp_path / "run"
    changes += [f"run.folder={folder}", f"model.path={tmp_path / 'vllm'}", "eval.greedy=false"]
    train(command, load_config(recipe, [*overrides, *changes]), folder)
    rows = [row for row in read_metrics(folder) if "reward" in row]
    assert len(rows) == 2 and all(0 < row["logprob_gap_mean"] < GAP for row in rows)
    report = replay(open_past(folder), 2, lambda text: None)
    assert report.divergence is None and report.weights and report.tokens == 0
    [note] = [note for note in report.notes if "rollout.engine = vllm" in note]
    assert re.search(r"under weights 1 .* tokens differ by .*e-\d+ nats in the mean", note)


def test_an_interpreter_without_vllm_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv(vllm_worker.VARIABLE, str(tmp_path / "python"))
    with pytest.raises(UserError, match="there is no vLLM to roll out with") as caught:
        vllm_worker.command()
    assert "make cluster" in caught.value.next and str(tmp_path) in caught.value.found
    monkeypatch.setenv(vllm_worker.VARIABLE, sys.executable)
    assert vllm_worker.find_python() == sys.executable


@pytest.mark.parametrize(
    ("tokens", "pause_at", "ending"),
    [
        ([1, 2], 0, None),
        ([1, 9], 0, ("1", "stop")),
        ([1, 2, 3, 4], 0, ("1234", "length")),
        ([1, 2], 2, ("12", "paused")),
        ([5, 6, 7], 0, ("5", "stop")),
        ([5, 6, 7, 8], 4, ("5", "stop")),
        ([1, 2, 3, 9], 4, ("123", "stop")),
    ],
)
def test_the_ending_of_a_completion(tokens, pause_at, ending):
    params = SamplingParams(max_new_tokens=4, stop_token_ids=(9,), stop=("67",))
    assert find_ending(params, tokens, pause_at, lambda ids: "".join(map(str, ids))) == ending
