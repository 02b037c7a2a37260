"""vLLM as the engine of rollout workers: the trainer's log-probs before and after an update, the
ends of Tandem's completions, pauses, and an interpreter that is not there.

One vLLM is started for the file, where an interpreter has it.
"""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tandem.cli.train import train
from tandem.config.recipe import load_config
from tandem.engine.dispatch import devices_of
from tandem.engine.packed import packed_logprobs
from tandem.engine.sync_check import make_probe
from tandem.model.load import load_model
from tandem.model.logprobs import UNNAMED
from tandem.model.tiny import make_tiny
from tandem.model.tokenizer import decode_text, load_tokenizer
from tandem.plugins.audit.replay import replay
from tandem.plugins.vllm import MOST_BIASED, bias
from tandem.plugins.vllm import worker as vllm_worker
from tandem.rollout_workers.pool import EngineSpec
from tandem.run_folder.metrics import read_metrics
from tandem.run_folder.read import open_past
from tandem.runtime.errors import UserError
from tandem.runtime.processes import descendants, started_at
from tandem.trainer.parity import MAX_MEAN
from tandem.weights.shared import SharedWeights
from tests.support.runs import prepare
from tests.support.waiting import eventually
from tests.support.working import all_idle, groups, open_workers, processes, request, run, until

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


@contextmanager
def vllm_workers(path, command, tensor_parallel=1, experts=0):
    """A worker with vLLM, the trainer's model, whose head is tied, and its published weights.
    experts: features of each of its experts, if it is a mixture."""
    make_tiny(path, **{**SHAPE, "kv_heads": tensor_parallel})
    if experts:
        mix(path, experts)
    model, reports = load_model(path), []
    spec = EngineSpec(
        model_path=path, cache_mb=16, max_batch=32, longest=LONGEST, tensor_parallel=tensor_parallel
    )
    assert model.config.tie_word_embeddings
    with (
        closing(SharedWeights(model.merged_weights())) as shared,
        open_workers(spec, shared, reports, command, forks=False) as workers,
    ):
        publish(shared, model, 0)
        workers.apply(0)
        # its first start on a machine inspects the model's class, a minute beside other tests
        assert eventually(lambda: workers.step() or all_idle(workers), within_s=300.0)
        assert reports == []
        yield workers, model, shared, path


def mix(path, experts):
    """Put a mixture of 12 experts in the place of a model."""
    config = Qwen3MoeConfig.from_pretrained(path)
    config.moe_intermediate_size, config.num_experts, config.num_experts_per_tok = experts, 12, 3
    config.architectures = ["Qwen3MoeForCausalLM"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(config).save_pretrained(path)


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    with vllm_workers(str(tmp_path_factory.mktemp("model")), vllm_worker.command()) as opened:
        yield opened


def publish(shared, model, version):
    """Publish the model's weights, with what the worker compares itself with."""
    probe = make_probe(
        lambda tokens: packed_logprobs(model, tokens[:1], tokens[1:]),
        model.config.vocab_size,
        LONGEST,
        MAX_MEAN[torch.float32],
    )
    shared.publish(version, model.merged_weights(), probe)


def update(opened, version):
    """Change all weights, and have the worker take them."""
    workers, model, shared, _ = opened
    change(model, seed=version)
    publish(shared, model, version)
    workers.apply(version)


def change(model, seed):
    with torch.no_grad():
        for weight in model.trainable().values():
            noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
            weight.add_(0.02 * noise)


def largest_gap(model, requests, completions):
    gaps = []
    for asked, completion in zip(requests, completions, strict=True):
        expected = packed_logprobs(model, asked.prompt, completion.tokens, asked.params)
        gaps.append(float(np.abs(expected - completion.logprobs).max()))
    return max(gaps)


def every_kind():
    kinds = [
        {},
        {"temperature": 0.7, "top_p": 0.8, "vocabulary": 90},
        {"top_k": 9, "temperature": 1.3},
        {"top_k": 20, "top_p": 0.9},
        {"min_p": 0.02, "top_k": 30},
        {"repetition_penalty": 1.3},
    ]
    prompts = [np.random.default_rng(n).integers(9, 100, n) for n in (3, 40, 17, 130, 64, 33)]
    return [request(n, prompts[n % 6], max_new_tokens=16, **kinds[n % 6]) for n in range(12)]


def test_ids_without_a_token_are_biased_away_and_no_others():
    """In every_kind vLLM itself has such ids."""
    assert bias(0, 100) is bias(100, 100) is None
    assert bias(97, 100) == {97: UNNAMED, 98: UNNAMED, 99: UNNAMED}
    assert len(bias(97, 5000)) == MOST_BIASED


@needs_vllm
def test_vllm_samples_from_the_trainers_distribution_before_and_after_updates(vllm):
    """The head is tied, and vLLM does not renew its packed copy by itself."""
    workers, model, _, _ = vllm
    requests = every_kind()
    assert largest_gap(model, requests, run(workers, requests)) < GAP
    for version in (1, 2):
        update(vllm, version)
        completions = run(workers, requests)
        assert 0 < workers.logprob_gap() < GAP  # of the fixed sequence, after the sync
        assert largest_gap(model, requests, completions) < GAP
        assert all((c.weight_versions == version).all() for c in completions)


@needs_vllm
@pytest.mark.parametrize("experts", [96, 72])
def test_a_mixture_of_experts_has_new_weights_after_each_update(experts, tmp_path):
    """vLLM packs experts, and pads them to a multiple of 32 features, once."""
    with vllm_workers(str(tmp_path), vllm_worker.command(), experts=experts) as opened:
        workers, model, _, _ = opened
        requests = every_kind()
        for version in (0, 1, 2):
            if version:
                update(opened, version)
            assert largest_gap(model, requests, run(workers, requests)) < GAP
            assert 0 < workers.logprob_gap() < GAP


@needs_vllm
def test_a_tied_head_that_is_not_renewed_stops_the_run_at_the_sync(tmp_path):
    """No token is sampled first, so it also holds with rollout.staleness."""
    script = Path(__file__).parents[2] / "support" / "forgetful_worker.py"
    command = vllm_worker.find_python(), str(script)
    stops = pytest.raises(UserError, match="does not run the trainer's model")
    with stops as caught, vllm_workers(str(tmp_path), command):
        pass
    assert "tied head" in caught.value.next and "weights 0" in caught.value.where


@pytest.fixture(scope="module")
def recorded():
    """Output of sleeping_vllm.py, which has a fake of LLMEngine: vLLM sleeps on GPUs alone."""
    script = Path(__file__).parents[2] / "support" / "sleeping_vllm.py"
    said = subprocess.run(
        [vllm_worker.find_python(), str(script)], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(said.stdout.splitlines()[-1])


@needs_vllm
def test_a_worker_that_rests_sleeps_after_the_check_and_wakes_weights_before_they_come(recorded):
    kept, rested, _ = recorded
    begin = ["init_weight_transfer_engine"]
    load = ["start_weight_update", "update_weights", "finish_weight_update"]
    assert kept == begin + 2 * [*load, "reset_prefix_cache"]
    woken = ["wake weights", *load, "wake kv_cache", "reset_prefix_cache", "sleep 2"]
    assert rested == [*begin, *load, "reset_prefix_cache", "sleep 2", *woken]


@needs_vllm
def test_an_update_that_vllm_refuses_in_any_part_is_the_users_error_and_no_death(recorded):
    assert recorded[2] == [
        "RuntimeError: The size of tensor a (192) must match",
        "KeyError: 'layers.0.mlp'",
        "AssertionError: ",
    ]


@needs_vllm
def test_new_weights_reach_every_tensor_parallel_rank_and_none_outlives_its_worker(tmp_path):
    """Its experts are divided into such of 48 features, which vLLM pads."""
    with vllm_workers(str(tmp_path), vllm_worker.command(), 2, experts=96) as opened:
        workers, model, _, _ = opened
        update(opened, 1)
        requests = every_kind()
        assert largest_gap(model, requests, run(workers, requests)) < GAP
        assert 0 < workers.logprob_gap() < GAP
        [worker] = processes(workers)
        ranks = [rank.pid for rank in descendants(worker.pid)]
        assert len(ranks) >= 2
        os.kill(worker.pid, signal.SIGKILL)
        assert eventually(lambda: not any(map(started_at, ranks)), within_s=60.0)


@pytest.mark.parametrize(
    ("number", "ranks", "devices", "visible", "shown"),
    [
        (0, 1, ["cuda:0"], "", "0"),
        (3, 1, ["cuda:0", "cuda:1"], "", "1"),
        (1, 2, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"], "", "2,3"),
        (1, 2, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"], "4,5,6,7", "6,7"),
        (2, 2, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"], "", "0,1"),
        (0, 1, ["cuda"], "GPU-1f,GPU-2a", "GPU-1f"),
    ],
)
def test_each_worker_sees_its_own_gpus(number, ranks, devices, visible, shown):
    assert vllm_worker.visible_devices(devices_of(number, ranks, devices), visible) == shown
    assert devices_of(number, ranks, ["cpu"]) == "cpu"


@pytest.mark.parametrize(("options", "compiles"), [({}, False), ({"enforce_eager": False}, True)])
def test_only_a_vllm_that_is_not_eager_may_compile(options, compiles, monkeypatch):
    found = {}
    monkeypatch.setattr(os, "environ", found)
    vllm_worker.set_environment("cpu", options)
    assert ("TORCHDYNAMO_DISABLE" not in found) == compiles
    sent = EngineSpec(model_path="", cache_mb=1, max_batch=1, longest=1, options=options)
    assert sent.start_of(0)["options"] == options


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
    publish(shared, model, first + 1)
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
    until(workers, lambda: all(t.completion is not None for t in tickets))
    assert [t.completion.stop_reason for t in tickets] == ["length", "cancelled", "length"]
    until(workers, lambda: all_idle(workers))
    assert largest_gap(model, asked[:1], [tickets[0].completion]) < GAP


def train_with_vllm(folder, steps, *changes):
    """Train in folder / "run", with one worker and a correction; return that folder."""
    _, _, _, command, recipe, *overrides = prepare(folder, steps, "train")
    changes += ("rollout.engine=vllm", "rollout.workers=1", "rl.correction=tis", "eval.samples=1")
    changes += ("eval.greedy=false", f"run.folder={folder / 'run'}")
    train(command, load_config(recipe, [*overrides, *changes]), folder / "run")
    return folder / "run"


@needs_vllm
def test_a_run_ahead_of_its_training_measures_the_gap_after_each_sync(tmp_path):
    """The tokens of its steps are of older weights, and tell nothing."""
    make_tiny(tmp_path / "vllm", **SHAPE)
    changes = f"model.path={tmp_path / 'vllm'}", "rollout.staleness=1"
    folder = train_with_vllm(tmp_path, 3, *changes)
    gaps = [row["sync_logprob_gap"] for row in read_metrics(folder, "timings.jsonl")[1:]]
    assert len(gaps) == 3 and all(0 < gap < GAP for gap in gaps)


@needs_vllm
def test_a_run_with_vllm_is_bounded_and_replayed_from_its_journal(tmp_path):
    """The steps are learned again bit by bit; of vLLM's log-probs the gap is told."""
    make_tiny(tmp_path / "vllm", **SHAPE)
    folder = train_with_vllm(tmp_path, 2, f"model.path={tmp_path / 'vllm'}")
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
    monkeypatch.chdir(tmp_path)
    Path("vllm").mkdir()  # no package of that interpreter's
    monkeypatch.setenv(vllm_worker.VARIABLE, sys.executable)
    with pytest.raises(UserError, match="there is no vLLM to roll out with") as caught:
        vllm_worker.command()
    assert f"no vllm in {sys.executable}" in caught.value.found
    Path("notes").write_text("no program")
    Path("notes").chmod(0o755)
    monkeypatch.setenv(vllm_worker.VARIABLE, "./notes")
    with pytest.raises(UserError, match="there is no vLLM to roll out with"):
        vllm_worker.command()


def test_a_model_that_vllm_refuses_ends_the_run_before_its_first_evaluation(tmp_path, monkeypatch):
    """By an interpreter that says that it has vLLM, and starts a worker that refuses."""
    python = tmp_path / "python"
    worker = Path(__file__).parents[2] / "support" / "odd_worker.py"
    has_vllm = 'case "$2" in *find_spec*) exit 0;; esac'
    python.write_text(f'#!/bin/sh\n{has_vllm}\nexec {sys.executable} {worker} refuse "" "$4"\n')
    python.chmod(0o755)
    monkeypatch.setenv(vllm_worker.VARIABLE, str(python))
    with pytest.raises(UserError, match="the model cannot be loaded"):
        train_with_vllm(tmp_path, 1)
    assert not list(tmp_path.glob("run/episodes/*"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_vllm_asks_for_the_memory_that_it_uses_and_not_for_the_whole_gpu(ranks):
    """For 8B parameters in bfloat16, a cache of 4 GiB, and passes of 4096 tokens."""
    shapes = [(151936, 4096), *96 * [(14336, 4096)], *128 * [(4096, 4096)], (4096,)]
    layout = [[str(n), "torch.bfloat16", list(shape)] for n, shape in enumerate(shapes)]
    start = {"layout": layout, "dtype": "bfloat16", "tensor_parallel": ranks, "max_batch": 256}
    start["cache_bytes"], gib = 4 << 30, 2**30
    weights = sum(2 * np.prod(shape) for shape in shapes) / ranks / gib
    needed = 80 * vllm_worker.memory_share(start, 4096, 80 << 30)
    assert 0.5 < needed - weights - 4 < 3.0
    # longer passes, and more that are sampled at once, need more
    assert 80 * vllm_worker.memory_share(start, 32768, 80 << 30) - needed > 3.0
    assert 80 * vllm_worker.memory_share({**start, "max_batch": 2048}, 4096, 80 << 30) > needed + 2
    assert vllm_worker.memory_share(start, 4096, 6 << 30) == 1.0  # vLLM says what is missing
