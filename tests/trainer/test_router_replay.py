"""Router replay (rl.router_replay): the engine's experts travel with the tokens, and the trainer
computes with them."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tandem.model.expert_choices import ReplayedExperts, replayed_experts
from tandem.model.forward import batch_logprobs
from tandem.model.load import load_model
from tandem.model.tiny import make_tiny
from tandem.rollout_workers.pool import EngineSpec
from tandem.runtime.errors import InvariantError
from tandem.trainer.batch import Models
from tandem.trainer.pack import pack
from tandem.types import Sample, SamplingDistribution
from tandem.weights.shared import SharedWeights
from tests.support import dense
from tests.support.engines import paged_engine, request
from tests.support.episodes import changed, episodes_of, learn, learn_once, sampled_groups, trained
from tests.support.episodes import settings as learn_settings
from tests.support.tiny import exact_model, random_samples, random_tokens, stock_model, tiny_config
from tests.support.updates import SAMPLING
from tests.support.working import bits, open_workers, run

KIND, EXPERTS, K, LAYERS = "qwen3_moe", 5, 2, 2


engine_of = partial(paged_engine, max_batch=8, record_experts=True)


def sample_of(asked, completion):
    tokens = np.concatenate([asked.prompt, completion.tokens])
    return Sample(
        tokens=tokens,
        loss_mask=np.arange(len(tokens)) >= len(asked.prompt),
        prefix=len(asked.prompt),
        experts=completion.experts,
    )


def shared_requests():
    """Groups that share prompts, of less and of more than a page."""
    rng = np.random.default_rng(0)
    prompts = [random_tokens(rng, n).tolist() for n in (3, 120, 140, 250)]
    return [request(n, prompts[n % 4], max_new_tokens=5 + 40 * (n % 2)) for n in range(12)]


def experts_alone(model, sample):
    """The choices of the model's own routers for a sequence by itself, computed without a cache."""
    [batch] = pack([replace(sample, prefix=0)], 10_000)
    found = []
    routers = [layer.mlp.gate for layer in model.module.model.layers]
    for router in routers:
        router.observe = lambda _, chosen: found.append(chosen[: len(batch.tokens)].numpy())
    with torch.no_grad():
        batch_logprobs(model, replace(batch, experts=batch.experts[:0]), SAMPLING)
    for router in routers:
        router.observe = None
    return np.stack(found, 1)


# ---- the engine


@pytest.mark.parametrize(
    "options",
    [{}, {"pages": 6}, {"chunk_tokens": 7}, {"pages": 5, "chunk_tokens": 50}],
    ids=["plain", "few pages", "chunks", "both"],
)
def test_an_engine_reports_the_experts_of_all_tokens_but_the_last(options):
    model, asked = exact_model(KIND), shared_requests()
    engine = engine_of(model, **options)
    completions = engine.generate(asked)
    for one, completion in zip(asked, completions, strict=True):
        sample = sample_of(one, completion)
        assert completion.experts.dtype == np.int16
        assert completion.experts.shape == (len(sample.tokens) - 1, LAYERS, K)
        assert np.array_equal(completion.experts, experts_alone(model, sample))
    assert engine.stats()["prompt_tokens_cached"] > 0
    assert (engine.stats()["preemptions"] > 0) == ("pages" in options)
    assert len(np.unique(completions[-1].experts)) == EXPERTS


def test_recording_changes_no_other_bit_and_without_it_there_is_none():
    model = exact_model(KIND)
    with_them = engine_of(model).generate(shared_requests())
    without = engine_of(model, record_experts=False).generate(shared_requests())
    assert all(completion.experts.shape == (0, 0, 0) for completion in without)
    bare = [replace(c, experts=np.zeros((0, 0, 0), np.int16)) for c in with_them]
    assert list(map(bits, bare)) == list(map(bits, without))


def test_a_paused_completion_goes_on_with_experts_of_the_newest_weights():
    """The engine computes all keys again, so these are what the last tokens were sampled with."""
    model = exact_model(KIND)
    engine, whole = engine_of(model), request(0, range(20), max_new_tokens=12)
    [paused] = engine.generate([replace(whole, max_tokens_now=5)])
    assert paused.stop_reason == "paused" and len(paused.experts) == 24
    engine.apply(1, lambda: model.load_weights(exact_model(KIND, seed=1).named_weights()))
    [completion] = engine.generate([replace(whole, resume_from=paused)])
    assert len(completion.experts) == 31
    assert np.array_equal(completion.experts, experts_alone(model, sample_of(whole, completion)))
    assert not np.array_equal(completion.experts[:24], paused.experts)


@pytest.fixture(scope="module")
def moe_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe")
    make_tiny(folder, hidden=64, layers=2, intermediate=128)
    vocabulary = load_model(str(folder)).config.vocab_size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        shape = tiny_config(KIND, vocab_size=vocabulary)
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape.to_dict())).save_pretrained(folder)
    return str(folder)


def test_a_worker_reports_the_experts_of_the_inline_engine(moe_folder):
    model, asked = load_model(moe_folder), shared_requests()
    shared = SharedWeights(model.merged_weights())
    shared.publish(0, model.merged_weights())
    sizes = {"cache_mb": 4, "max_batch": 8, "longest": 400, "record_experts": True}
    spec = EngineSpec(model_path=moe_folder, matmul=model.kernels.chosen, **sizes)
    with open_workers(spec, shared, []) as workers:
        workers.apply(0)
        found = run(workers, asked)
    shared.close()
    assert list(map(bits, found)) == list(map(bits, engine_of(model).generate(asked)))
    assert all(len(completion.experts) for completion in found)


# ---- packing and the trainer's pass


def test_samples_of_other_experts_do_not_share_a_prompt():
    one = sample_of(
        shared_requests()[0], engine_of(exact_model(KIND)).generate(shared_requests())[0]
    )
    other = replace(one, experts=np.flip(one.experts, -1).copy())
    [shared], [own] = pack([one, one], 1000), pack([one, other], 1000)
    assert len(own.tokens) == len(shared.tokens) + one.prefix
    assert np.array_equal(own.experts[: len(one.experts)], one.experts)
    assert np.array_equal(own.experts[len(one.experts) :], other.experts)


def forced(stock, experts):
    """A stock model whose routers take the experts, int64 [T, layers, K], by the definition of R3:
    a softmax over its own logits, gathered and made to sum to 1."""

    def hook(number):
        def force(_, inputs, output):
            scores = output[0].float().softmax(-1).gather(1, experts[:, number])
            return output[0], scores / scores.sum(-1, keepdim=True), experts[:, number]

        return force

    for number, layer in enumerate(stock.model.layers):
        layer.mlp.gate.register_forward_hook(hook(number))
    return stock


@pytest.mark.parametrize("checkpointing", [False, True])
def test_stale_choices_are_those_of_a_stock_model_whose_routers_are_forced(checkpointing):
    samples = random_samples(np.random.default_rng(1), 2)
    rng, given = np.random.default_rng(2), []
    for _, prefix in enumerate([0] * 3 + [samples[3].prefix] * 3):
        rows = rng.permuted(np.tile(np.arange(EXPERTS, dtype=np.int16), (60, LAYERS, 1)), axis=2)
        rows[:prefix] = np.arange(K, dtype=np.int16).tolist() + [0] * (EXPERTS - K)
        given.append(rows[..., :K])
    samples = [
        replace(s, experts=e[: len(s.tokens) - 1]) for s, e in zip(samples, given, strict=True)
    ]
    model, grads = exact_model(KIND), {}
    model.checkpointing = checkpointing
    [batch] = pack(samples, 1000)
    choices = ReplayedExperts(batch.experts, model.device)
    logprobs, _ = batch_logprobs(model, batch, SAMPLING, choices=choices)
    assert 0.3 < float(choices.changed(batch.rows).mean()) < 0.9
    logprobs.sum().backward()
    expected = []
    for sample in samples:
        experts = torch.from_numpy(sample.experts.astype(np.int64))
        # the last token's row, which nothing is computed from
        stock = forced(stock_model(tiny_config(KIND)), torch.cat([experts, experts[-1:]]))
        own = dense.logprobs(stock, sample.tokens, sample.loss_mask)
        own.sum().backward()
        expected.append(own.detach())
        for name, parameter in stock.named_parameters():
            if parameter.grad is not None:
                grads[name] = grads.get(name, 0) + parameter.grad
    torch.testing.assert_close(logprobs.detach(), torch.cat(expected), rtol=1e-4, atol=1e-5)
    for name, parameter in model.module.named_parameters():
        if parameter.grad is not None:
            bound = dense.GRADIENT * float(grads[name].abs().max())
            assert float((parameter.grad - grads[name]).abs().max()) <= bound, name
    with torch.no_grad():
        assert not torch.equal(batch_logprobs(model, batch, SAMPLING)[0], logprobs)


# ---- updates


def routed(groups, model):
    """The groups with the choices of a model."""
    for row, group in enumerate(groups):
        for place, episode in enumerate(group.episodes):
            sample = Sample(tokens=episode.tokens, loss_mask=episode.loss_mask)
            experts = experts_alone(model, sample).astype(np.int16)
            groups = changed(groups, (row, place), experts=experts)
    return groups


def test_a_first_update_checks_that_engine_and_trainer_chose_the_same():
    model, settings = exact_model(KIND), learn_settings(router_replay=True)
    groups = routed(sampled_groups(model), model)
    row, gradients = learn_once(model, groups, settings, exact=True)
    assert row["router/replay_changed"] == 0.0 and row["logprob_gap"] == 0.0
    plain, same = learn_once(model, groups, learn_settings(), exact=True)
    assert all(torch.equal(gradients[name], grad) for name, grad in same.items())
    assert {**plain, "router/replay_changed": 0.0} == row

    at = int(np.flatnonzero(groups[1].episodes[2].loss_mask)[0]) - 1
    experts = groups[1].episodes[2].experts.copy()
    experts[at, 1, 0] = min(set(range(EXPERTS)) - set(experts[at, 1].tolist()))
    with pytest.raises(InvariantError, match="do not choose the same experts") as caught:
        learn_once(model, changed(groups, (1, 2), experts=experts), settings, exact=True)
    assert caught.value.found.startswith("other choices for 1 of ")
    groups = changed(groups, (1, 2), experts=experts[:-1])
    with pytest.raises(InvariantError, match="has not the experts that its engine chose"):
        learn_once(model, groups, settings, exact=True)


def test_stale_tokens_are_trained_with_the_old_choices():
    old, model = exact_model(KIND), exact_model(KIND, seed=1)
    groups = routed(sampled_groups(old), old)
    settings = {"correction": "decoupled", "clip_low": 0.9, "clip_high": 9.0}
    rows = {
        on: learn(
            Models(policy=trained(exact_model(KIND, seed=1))),
            groups,
            learn_settings(router_replay=on, **settings),
            version=1,
        )
        for on in (True, False)
    }
    assert "router/replay_changed" not in rows[False]
    assert 0.1 < rows[True]["router/replay_changed"] < 0.9
    for name in ("entropy", "logprob_error_mean", "grad_norm"):
        assert rows[True][name] != rows[False][name]
    # the recomputed log-probs are the policy's, so they replay too
    errors = []
    for episode in episodes_of(groups):
        sample = Sample(tokens=episode.tokens, loss_mask=episode.loss_mask, experts=episode.experts)
        [batch] = pack([sample], 1000)
        with torch.no_grad():
            choices = replayed_experts(batch, model.device)
            sampling = SamplingDistribution(temperature=0.7)
            own = batch_logprobs(model, batch, sampling, choices=choices)[0].numpy()
        errors.append(np.exp(np.abs(own - episode.engine_logprobs[episode.loss_mask])).mean())
    assert rows[True]["logprob_error_mean"] == pytest.approx(float(np.mean(errors)), rel=1e-5)
