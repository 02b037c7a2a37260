"""The policy against stock transformers run sample by sample: gradients, log-probs, and the weights after a step."""

import numpy as np
import pytest
import torch

from tandem.config import RL
from tandem.model.logprobs import Filter
from tandem.rl.kl import kl_estimate
from tandem.train.optimizer import Optimizer
from tandem.train.pack import pack
from tandem.train.policy import Policy, batch_logprobs
from tests.tiny import (
    CONFIGS,
    exact_logits,
    exact_model,
    make_sample,
    random_samples,
    random_tokens,
    stock_logits,
    stock_model,
    tiny_config,
    twins,
)

# Relative to the largest entry of a parameter's gradient. float32 sums over some 300 rows, in another order and by
# other kernels than transformers': a few hundred roundings of 6e-8 on terms that partly cancel. Measured: under 1e-6.
GRADIENT = 5e-6
PLAIN = Filter()


class Recorder:
    """Stands for the optimizer: keeps the gradients, changes nothing."""

    def __init__(self, model):
        self.parameters = dict(model.module.named_parameters())

    def update(self):
        self.gradients = {name: p.grad.clone() for name, p in self.parameters.items() if p.grad is not None}
        for parameter in self.parameters.values():
            parameter.grad = None
        return {}


def adam(model, learning_rate=0.01):
    return Optimizer(
        dict(model.module.named_parameters()), learning_rate=learning_rate, schedule="constant", warmup_steps=0,
        total_steps=100, weight_decay=0.0, betas=(0.9, 0.95), max_grad_norm=1.0,
    )  # fmt: skip


def stock_logprobs(model, sample, how=PLAIN):
    """Log-probs of the sample's loss tokens, the sample alone, in plain transformers and log_softmax."""
    places = np.flatnonzero(sample.loss_mask)
    table = (stock_logits(model, sample.tokens) / how.temperature).log_softmax(-1)
    return table[places - 1, sample.tokens[places]]


def assert_close_gradients(found, model):
    expected = {name: p.grad for name, p in model.named_parameters()}
    assert set(found) == set(expected)
    for name, gradient in found.items():
        scale = expected[name].abs().max()
        assert scale > 0, name
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=GRADIENT * scale, msg=name)


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_gradient_of_a_packed_prefix_shared_batch_is_that_of_stock_transformers_sample_by_sample(kind):
    exact, stock = twins(kind)
    samples = random_samples(np.random.default_rng(0), 4)
    recorder = Recorder(exact)
    batches = pack(samples, 90)
    assert len(batches) > 2
    for batch in batches:
        logprobs, _ = batch_logprobs(exact, batch, Filter())
        (logprobs * torch.from_numpy(batch.advantages)).sum().backward()
    recorder.update()
    for sample in samples:
        (stock_logprobs(stock, sample).sum() * float(sample.advantages[-1])).backward()
    assert_close_gradients(recorder.gradients, stock)


def test_the_whole_clipped_loss_with_kl_has_the_gradient_of_its_formula_on_stock_transformers():
    exact, stock = twins("qwen3")
    reference, stock_reference = twins("qwen3", seed=5)
    how, rl = Filter(temperature=0.7), RL(clip_low=0.1, clip_high=0.15, kl_coef=0.3)
    rng = np.random.default_rng(1)
    samples = []
    for sample in random_samples(rng, 4):
        engine = np.zeros(len(sample.tokens), np.float32)
        with torch.no_grad():  # near the policy's own, so that some ratios are clipped and some are not
            near = stock_logprobs(stock, sample, how).numpy() + rng.normal(0, 0.2, sample.loss_mask.sum())
        engine[sample.loss_mask] = near
        samples.append(
            make_sample(
                sample.tokens, sample.loss_mask, prefix=sample.prefix, group=sample.group,
                advantage=sample.advantages[-1], engine_logprobs=engine,
            )
        )  # fmt: skip
    recorder = Recorder(exact)
    metrics = Policy(exact, recorder, reference).learn(pack(samples, 120), rl, how, denominator=77.0)
    loss = 0.0
    for sample in samples:
        policy = stock_logprobs(stock, sample, how)
        ratio = (policy - torch.from_numpy(sample.engine_logprobs[sample.loss_mask])).exp()
        advantage = torch.from_numpy(sample.advantages[sample.loss_mask])
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.15) * advantage)
        d = policy - stock_logprobs(stock_reference, sample, how).detach()
        loss = loss - surrogate.sum() / 77.0 + 0.3 * ((-d).exp() - 1 + d).sum() / 77.0
    loss.backward()
    assert_close_gradients(recorder.gradients, stock)
    assert 0.1 < metrics["clip_share"] < 0.9 and metrics["reference_kl"] > 0
    assert metrics["num_loss_tokens"] == sum(s.loss_mask.sum() for s in samples)


def test_logprobs_are_those_of_stock_transformers():
    exact, stock = twins("llama")
    samples = random_samples(np.random.default_rng(2), 4)
    with torch.no_grad():
        found = torch.cat(Policy(exact, Recorder(exact)).proximal_logprobs(pack(samples, 100), Filter()))
        expected = torch.cat([stock_logprobs(stock, s) for s in samples])
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)  # two implementations of a float32 model


def test_one_microbatch_and_many_give_the_same_logprobs_exactly_and_close_gradients():
    model = exact_model("qwen3")
    samples = random_samples(np.random.default_rng(3), 6)
    logprobs, gradients = [], []
    for budget in (1, 64, 10_000):
        batches = pack(samples, budget)
        recorder = Recorder(model)
        policy = Policy(model, recorder)
        logprobs.append(torch.cat(policy.proximal_logprobs(batches, Filter())))
        policy.fit(batches)
        gradients.append(recorder.gradients)
    assert torch.equal(logprobs[0], logprobs[1]) and torch.equal(logprobs[0], logprobs[2])
    for other in gradients[1:]:
        for name, gradient in gradients[0].items():
            # the rows' contributions are added in another order; the tolerance is that of GRADIENT
            torch.testing.assert_close(other[name], gradient, rtol=0, atol=GRADIENT * gradient.abs().max(), msg=name)


def test_logprobs_have_the_same_bits_with_and_without_gradients():
    model = exact_model("qwen2")
    [batch] = pack(random_samples(np.random.default_rng(4), 4), 10_000)
    recorded, entropy = batch_logprobs(model, batch, Filter())
    with torch.no_grad():
        lean, _ = batch_logprobs(model, batch, Filter())
    assert recorded.requires_grad and not entropy.requires_grad and torch.equal(recorded, lean)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3_moe"])
def test_after_an_update_the_model_runs_its_new_weights_and_not_a_stale_pack(kind):
    model = exact_model(kind)
    rng = np.random.default_rng(5)
    document = random_tokens(rng, 30)
    batches = pack(random_samples(rng, 3), 200)
    policy = Policy(model, adam(model))
    for _ in range(2):
        with torch.no_grad():
            [before] = exact_logits(model, [document])
        policy.fit(batches)
        with torch.no_grad():
            [after] = exact_logits(model, [document])
            fresh = stock_logits(stock_model(tiny_config(kind), model.named_weights(), seed=9), document)
        assert (after - before).abs().max() > 1e-2
        torch.testing.assert_close(after, fresh, rtol=0, atol=1e-5)


def test_loading_weights_renews_the_packs_too():
    model, other = exact_model("qwen3", seed=0), exact_model("qwen3", seed=1)
    document = random_tokens(np.random.default_rng(0), 20)
    with torch.no_grad():
        exact_logits(model, [document])
        model.load_weights(other.named_weights())
        assert torch.equal(exact_logits(model, [document])[0], exact_logits(other, [document])[0])


def test_on_policy_the_gap_is_exactly_zero_and_the_ratio_exactly_one():
    model = exact_model("qwen3")
    samples = random_samples(np.random.default_rng(6), 3)
    batches = pack(samples, 10_000)
    [engine] = Policy(model, Recorder(model)).proximal_logprobs(batches, Filter())
    logprobs = iter(engine.numpy())
    on_policy = []
    for sample in samples:
        values = np.array([next(logprobs) if hit else 0.0 for hit in sample.loss_mask], np.float32)
        on_policy.append(
            make_sample(sample.tokens, sample.loss_mask, prefix=sample.prefix, group=sample.group, engine_logprobs=values)
        )  # fmt: skip
    metrics = Policy(model, Recorder(model), exact_model("qwen3")).learn(
        pack(on_policy, 60), RL(kl_coef=0.1), Filter(), denominator=10.0
    )
    names = ("logprob_gap", "ratio", "clip_share", "approx_kl", "reference_kl")
    assert {name: metrics[name] for name in names} == dict.fromkeys(names, 0.0) | {"ratio": 1.0}


def test_with_proximal_logprobs_the_ratio_is_to_them_and_the_engine_enters_by_the_capped_weight():
    model = exact_model("qwen3")
    batches = pack(random_samples(np.random.default_rng(7), 3), 80)  # engine log-probs 0: proximal / engine < 1
    gradients = []
    for cap in (1.0, 1e-9):
        recorder = Recorder(model)
        policy = Policy(model, recorder)
        proximal = policy.proximal_logprobs(batches, Filter())
        metrics = policy.learn(batches, RL(importance_cap=cap), Filter(), 10.0, proximal)
        gradients.append(recorder.gradients)
        assert metrics["ratio"] == 1.0 and metrics["logprob_gap"] > 1
    name = "model.layers.0.mlp.up_proj.weight"
    assert gradients[1][name].abs().max() < 1e-6 * gradients[0][name].abs().max()


def test_supervised_fine_tuning_overfits_one_batch():
    model = exact_model("qwen3")
    rng = np.random.default_rng(8)
    documents = [random_tokens(rng, n) for n in (9, 14, 20)]
    batches = pack([make_sample(d, np.arange(len(d)) > 0) for d in documents], 1000)
    policy = Policy(model, adam(model))
    losses = [policy.fit(batches)["nll"] for _ in range(40)]
    assert losses[0] > 3 and losses[-1] < 0.02


def test_the_reference_is_left_alone_and_its_kl_grows_from_zero():
    model, reference = exact_model("qwen3"), exact_model("qwen3")
    before = {name: w.clone() for name, w in reference.named_weights().items()}
    batches = pack(random_samples(np.random.default_rng(9), 2), 1000)
    policy = Policy(model, adam(model), reference)
    rows = [policy.learn(batches, RL(kl_coef=0.1), Filter(), 10.0) for _ in range(2)]
    assert rows[0]["reference_kl"] == 0.0 and rows[1]["reference_kl"] > 0.0
    assert all(torch.equal(w, before[name]) for name, w in reference.named_weights().items())
    assert all(p.grad is None for p in reference.module.parameters())
    assert kl_estimate("k3", torch.zeros(1), torch.zeros(1)).item() == 0.0
