"""The real SDK against `tandem serve --train`, a process of its own."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

tinker = pytest.importorskip("tinker", reason="needs pip install 'tandem-rl[tinker]'")

from tinker import types

from tandem.model.tiny import make_tiny
from tests.support.byte_models import make_model
from tests.support.command import ROOT

ADAM = types.AdamParams(learning_rate=0.02)
TEXT = "1+1=2 and 2+2=4"
KNOWN = "Qwen/Qwen3-8B"
ALL = "env/all/reward/total"


@contextmanager
def served(folder, model="tiny", key=""):
    """Serve a model of a folder to one that trains; end the process by its id."""
    command = [sys.executable, "-m", "tandem", "serve", model, "--train", "--port=0"]
    process = subprocess.Popen(
        [*command, f"--folder={folder / 'checkpoints'}"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TANDEM_API_KEY": key},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process.stdout.readline().split()[-1], process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tinker")
    make_tiny(folder / "tiny", hidden=64, layers=2, intermediate=128)
    return folder


@pytest.fixture(scope="module")
def server(folder):
    with served(folder) as server:
        yield server


@pytest.fixture(scope="module")
def url(server):
    return server[0]


def client(url, key="tml-any"):
    return tinker.ServiceClient(base_url=url, api_key=key)


def datum(tokens, prompt=0, **of_completion):
    """Return a datum; of the completion's tokens: an array, or one value for all of them."""
    size = len(tokens) - 1
    inputs = {"target_tokens": np.array(tokens[1:])}
    for name, values in of_completion.items():
        inputs[name] = np.zeros(size, np.float32)
        inputs[name][max(prompt - 1, 0) :] = values
    return types.Datum(types.ModelInput.from_ints(tokens[:-1]), inputs)


def train(client, data, loss="cross_entropy", steps=1):
    """Make steps on data; return the losses before each of them."""
    futures = []
    for _ in range(steps):
        futures.append(client.forward_backward(data, loss))
        client.optim_step(ADAM)
    return [future.result().metrics["loss:sum"] for future in futures]


def logprobs(client, data):
    outputs = client.forward(data, "cross_entropy").result().loss_fn_outputs
    return [output["logprobs"].to_numpy() for output in outputs]


def test_two_clients_learn_texts_at_once_each_in_an_adapter_of_its_own(url):
    trainers = [client(url).create_lora_training_client("tiny", rank=8).result() for _ in "ab"]
    tokens = trainers[0].get_tokenizer().encode(TEXT)
    both = [[datum(tokens, weights=1)], [datum(tokens[::-1], weights=1)]]
    with ThreadPoolExecutor() as pool:
        alone, other = pool.map(lambda one: train(*one, steps=4), zip(trainers, both, strict=True))
    assert alone[3] < alone[0] and other[3] < other[0]
    again = client(url).create_lora_training_client("tiny", rank=8).result()
    assert train(again, both[0], steps=4) == alone


def test_a_custom_loss_is_that_of_the_server_where_it_is_the_same(url):
    def cross_entropy(data, found):
        return -sum(one.sum() for one in found), {}

    tokens, (named, custom) = list(range(5, 20)), pair(url)
    named.forward_backward([datum(tokens, weights=1)], "cross_entropy").result()
    custom.forward_backward_custom([datum(tokens, weights=1)], cross_entropy).result()
    found = [one.optim_step(ADAM).result().metrics["grad_norm"] for one in (named, custom)]
    assert found[0] == found[1]


def pair(url):
    return [client(url).create_lora_training_client("tiny", rank=4).result() for _ in "ab"]


def test_sampled_logprobs_are_trained_logprobs_by_weights_of_any_time(url):
    trainer, _ = pair(url)
    prompt = list(range(10, 18))
    data = [datum(prompt, weights=1)]
    train(trainer, data)
    sampler = trainer.save_weights_and_get_sampling_client().result()
    ask = {"prompt": types.ModelInput.from_ints(prompt), "num_samples": 4}
    params = types.SamplingParams(max_tokens=6, seed=3)
    answer = sampler.sample(**ask, sampling_params=params, include_prompt_logprobs=True).result()
    texts = [datum(prompt + one.tokens, weights=1) for one in answer.sequences]
    for one, found in zip(answer.sequences, logprobs(trainer, texts), strict=True):
        assert np.array_equal(found[len(prompt) - 1 :], one.logprobs_np)
        assert np.array_equal(found[: len(prompt) - 1], answer.prompt_logprobs_np[1:])
    [one], size = answer.sequences[:1], len(answer.sequences[0].tokens)
    own = datum(prompt + one.tokens, len(prompt), logprobs=one.logprobs_np, advantages=1)
    for loss, drift in (("ppo", "approx_kl"), ("cispo", "clip_share")):
        found = trainer.forward([own], loss).result().metrics
        assert [found["tokens:sum"], found["ratio:sum"], found[f"{drift}:sum"]] == [size, size, 0]
    before = logprobs(trainer, data)[0]
    train(trainer, data)
    after = logprobs(trainer, data)[0]
    again = sampler.sample(**ask, sampling_params=params).result()  # by the older weights
    assert [one.tokens for one in again.sequences] == [one.tokens for one in answer.sequences]
    assert sampler.compute_logprobs(ask["prompt"]).result()[1:] == before.tolist()
    assert np.array_equal(logprobs(trainer, data)[0], after) and not np.array_equal(before, after)


def test_each_loss_is_its_formula_off_policy(url):
    trainer, _ = pair(url)
    tokens = list(range(30, 60))
    [policy] = logprobs(trainer, [datum(tokens, weights=1)])
    rng = np.random.default_rng(0)
    sampled, advantages = policy + rng.normal(0, 0.3, 29).astype(np.float32), rng.normal(size=29)
    ratio = np.exp(policy - sampled)
    mean = np.exp(np.mean((policy - sampled)[9:]))
    clipped = [min(r * a, np.clip(r, 0.9, 1.3) * a) for r, a in zip(ratio, advantages, strict=True)]
    clip = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3}
    expected = {
        "importance_sampling": (ratio * advantages, {}),
        "ppo": (clipped, clip),
        "cispo": (np.clip(ratio, 0.9, 1.3) * advantages * policy, clip),
        "dro": (policy * advantages - 0.05 * (policy - sampled) ** 2, {"beta": 0.1}),
        "gspo": ([min(mean * a, np.clip(mean, 0.9, 1.3) * a) for a in advantages[9:]], clip),
    }
    for name, (objective, config) in expected.items():
        inputs = {"logprobs": sampled, "advantages": advantages}
        if name == "gspo":
            mask = (np.arange(29) >= 9).astype(np.float32)
            inputs = {**inputs, "advantages": advantages * mask, "sequence_ratio_mask": mask}
        metrics = trainer.forward([datum(tokens, **inputs)], name, config).result().metrics
        assert metrics["loss:sum"] == pytest.approx(-np.sum(objective), rel=1e-4), name


def test_what_is_not_offered_is_refused_by_name(url):
    tokens, (trainer, other) = list(range(8)), pair(url)
    data, policy = [datum(tokens, weights=1)], [datum(tokens, logprobs=-1, advantages=1)]
    moved = types.Datum(types.ModelInput.from_ints(tokens[1:]), data[0].loss_fn_inputs)
    wild = [[datum([*tokens, last], weights=1)] for last in (-100, 9999)]
    refused = [
        ("'stable_reinforce' is not offered", trainer.forward, data, "stable_reinforce"),
        ("expected: target_tokens, weights", trainer.forward, policy, "cross_entropy"),
        ("is not the next token", trainer.forward, [moved], "cross_entropy"),
        ("at least 1 token", trainer.forward, [datum([0], weights=1)], "cross_entropy"),
        ("clip_low_threshold", trainer.forward, policy, "ppo", {"clip_low_threshold": 5.0}),
        ("expected: tiny", client(url).create_lora_training_client, "large"),
        ("rank", client(url).create_lora_training_client, "tiny", -1),
        ("no path of such a checkpoint", other.save_state, "../../up"),
        ("learning_rate", trainer.optim_step, types.AdamParams(learning_rate=-1.0)),
        ("beta1", trainer.optim_step, types.AdamParams(beta1=2.0)),
        *(("no tokens of the model", trainer.forward, one, "cross_entropy") for one in wild),
    ]
    for words, ask, *given in refused:
        with pytest.raises(tinker.RequestFailedError, match=words) as caught:
            ask(*given).result()
        assert caught.value.category == types.RequestErrorCategory.User


def test_a_bad_sample_breaks_no_other(url):
    one, other = (client(url).create_sampling_client(base_model="tiny").result() for _ in "ab")
    params = [{"temperature": -1.0}, {"top_p": 2.0}, {"max_tokens": 0}, {"max_tokens": -1}]
    params.append({"stop": ""})
    prompts = map(types.ModelInput.from_ints, ([], [1, 99999], [1, -3], [5] * 9999))
    bad = [{"prompt": prompt} for prompt in prompts] + [{"num_samples": 0}]
    bad += [{"sampling_params": types.SamplingParams(**one)} for one in params]
    bad += [{"topk_prompt_logprobs": k, "include_prompt_logprobs": True} for k in (3000, -3)]
    good = {"prompt": types.ModelInput.from_ints([5, 6]), "num_samples": 1}
    good["sampling_params"] = types.SamplingParams(max_tokens=2)
    for mistake in bad:
        wrong, right = one.sample(**{**good, **mistake}), other.sample(**good)
        with pytest.raises(tinker.RequestFailedError) as caught:
            wrong.result()
        assert caught.value.category == types.RequestErrorCategory.User, mistake
        assert right.result().sequences and one.sample(**good).result().sequences


def test_a_killed_server_goes_on_from_the_last_save_for_who_has_its_key(folder, server):
    """The last test of the shared server."""
    data, (url, process) = [datum(list(range(20, 40)), weights=1)], server
    trainer, straight = pair(url)
    train(straight, data, steps=4)
    expected = logprobs(straight, data)[0]
    train(trainer, data, steps=2)
    path = trainer.save_state("two").result().path
    train(trainer, data)  # and is lost
    process.kill()
    with served(folder, key="tml-own") as (second, _):
        with pytest.raises(tinker.AuthenticationError):
            client(second, "tml-other").create_lora_training_client("tiny", rank=4)
        one = client(second, "tml-own")
        back = one.create_training_client_from_state_with_optimizer(path).result()
        train(back, data, steps=2)
        resumed = logprobs(back, data)[0]
        assert np.array_equal(resumed, expected)
        weights = back.save_weights_for_sampler("four").result().path
        sampler = one.create_sampling_client(model_path=weights).result()
        scores = sampler.compute_logprobs(types.ModelInput.from_ints(range(20, 40))).result()
        assert scores[1:] == resumed.tolist()
        fresh = one.create_training_client_from_state(path).result()
        train(fresh, data, steps=2)  # without the moments
        assert not np.array_equal(logprobs(fresh, data)[0], resumed)


@pytest.fixture
def recipes(folder, tmp_path, monkeypatch):
    """Return recipes of tinker-cookbook, whose rows are made up here, and a run of one of them: its
    model lies where the name of a known one leads, and its rewards are numbers of letters."""
    monkeypatch.setattr(
        tempfile, "tempdir", str(tmp_path)
    )  # wandb, which it imports, makes folders
    pytest.importorskip("tinker_cookbook", reason="needs tinker-cookbook")
    import datasets
    from tinker_cookbook.recipes import rl_loop, sl_loop
    from tinker_cookbook.recipes.math_rl import train as math_rl

    if not (folder / KNOWN).exists():
        characters = [chr(code) for code in range(256, 520)]  # as many as the other tokenizer has
        make_tiny(folder / KNOWN, characters=characters, hidden=64, layers=2, max_tokens=2048)
        make_model(folder / KNOWN)
    chat = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    one = {"messages": chat, "question": "1+1", "answer": "#### 2"}
    made_up = datasets.DatasetDict(train=datasets.Dataset.from_list([one] * 40))
    monkeypatch.setattr(datasets, "load_dataset", lambda *names: made_up)
    monkeypatch.setattr(rl_loop, "get_reward", lambda text, answer: sum(map(str.isalpha, text)))
    monkeypatch.setenv("TINKER_API_KEY", "tml-any")
    monkeypatch.chdir(folder)

    def run(start, config, url, log_path, **settings):
        given = {"base_url": url, "log_path": str(tmp_path / log_path), "model_name": KNOWN}
        start(config(**given, learning_rate=0.01, **settings))
        lines = (tmp_path / log_path / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    return sl_loop, rl_loop, math_rl, run


def test_the_recipes_of_the_cookbook_run_unchanged(folder, recipes):
    sl_loop, rl_loop, math_rl, run = recipes
    on_policy = {"loss_fn": "importance_sampling"}
    with served(folder, KNOWN) as (url, _):
        rows = run(sl_loop.main, sl_loop.Config, url, log_path="sl", batch_size=4)
        losses = [row["train_mean_nll"] for row in rows]
        assert losses[-1] < losses[0]
        sizes = {"batch_size": 4, "group_size": 8, "max_tokens": 8}
        rows = run(rl_loop.main, rl_loop.Config, url, log_path="rl", **sizes, **on_policy)
        rewards = [row["reward/total"] for row in rows]
        assert len(rows) == 10 and sum(rewards[-3:]) > 1.5 * sum(rewards[:3]), rewards
        sizes = {"groups_per_batch": 4, "group_size": 16, "max_steps": 6}
        arithmetic = lambda config: asyncio.run(math_rl.cli_main(config))  # noqa: E731
        rows = run(arithmetic, math_rl.CLIConfig, url, log_path="sums", **sizes, **on_policy)
        rewards = [row[ALL] for row in rows if ALL in row]
        assert len(rewards) == 6 and rewards[-1] > rewards[0] + 0.01, rewards  # -0.1: it never ends
