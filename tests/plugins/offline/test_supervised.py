"""Learning from fixed data against stock transformers on padded batches: SFT, DPO and its kin,
reward models."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tandem.config.schema import Preference
from tandem.plugins.offline.pair_losses import dpo
from tandem.plugins.offline.supervised import (
    answer_pair,
    answers,
    pair_loss,
    preference_step,
    reference_answers,
    reward_model_step,
    scored_pair,
    sft_step,
)
from tandem.trainer.pack import pack
from tandem.trainer.ranks import ALONE
from tests.support import dense
from tests.support.episodes import adapted_model, recorded, trained
from tests.support.tiny import exact_model, random_samples, random_tokens, twins, value_twins

LOSSES = {
    "dpo": Preference(beta=0.3),
    "dpo, smoothed": Preference(beta=0.3, label_smoothing=0.2),
    "dpo, of means": Preference(beta=2.0, length_normalized=True),
    "ipo": Preference(loss="ipo", beta=0.3),
    "ipo, of sums": Preference(loss="ipo", beta=0.3, length_normalized=False),
}
WITH_NLL = {**LOSSES, "dpo, with the chosen answers": Preference(beta=0.3, nll_coef=0.7)}


def rendering(*parts):
    """(tokens, mask): parts of a chat, every second one an answer."""
    return np.concatenate(parts), np.concatenate(
        [np.full(len(p), bool(n % 2)) for n, p in enumerate(parts)]
    )


def random_pairs(seed=0, count=5):
    """Renderings of pairs; the answers of every other one start alike, and one is of two turns."""
    rng, pairs = np.random.default_rng(seed), []
    for number in range(count):
        prompt = random_tokens(rng, int(rng.integers(1, 15)))
        start = random_tokens(rng, 2 * (number % 2))
        answers = [
            np.concatenate([start, random_tokens(rng, int(rng.integers(1, 9)))]) for _ in range(2)
        ]
        more = [random_tokens(rng, 3), random_tokens(rng, 4)] if number == 2 else []
        pairs.append((rendering(prompt, answers[0], *more), rendering(prompt, answers[1])))
    return pairs


def packed(pairs, make=answer_pair, budget=40, numbers=None):
    samples = [make(n, *pair) for n, pair in zip(numbers or range(len(pairs)), pairs, strict=True)]
    return pack([sample for pair in samples for sample in pair], budget, keep_groups=True)


def padded_logprobs(stock, renderings):
    """Return log-probs [B, T - 1] of every answer out of one padded batch, and which of them
    count."""
    longest = max(len(tokens) for tokens, _ in renderings)
    ids, counts, there = (
        torch.zeros(len(renderings), longest, dtype=torch.int64) for _ in range(3)
    )
    for row, (tokens, mask) in enumerate(renderings):
        ids[row, : len(tokens)] = torch.from_numpy(tokens)
        counts[row, : len(tokens)] = torch.from_numpy(mask)
        there[row, : len(tokens)] = 1
    table = stock(input_ids=ids, attention_mask=there).logits[:, :-1].log_softmax(-1)
    return table.gather(2, ids[:, 1:, None])[:, :, 0] * counts[:, 1:], counts[:, 1:]


def padded_margins(stock, stock_reference, pairs, preference):
    """Return how much more than the reference the policy prefers each chosen answer."""
    renderings, scores = [side for pair in pairs for side in pair], []
    for model in (stock, stock_reference):
        logprobs, counts = padded_logprobs(model, renderings)
        total = logprobs.sum(1)
        scores.append(total / counts.sum(1) if preference.length_normalized else total)
    gap = scores[0] - scores[1].detach()
    return gap[0::2] - gap[1::2]


def losses_of(margin, preference):
    if preference.loss == "ipo":
        return (margin - 1 / (2 * preference.beta)) ** 2
    right, wrong = ((1 + (-sign * preference.beta * margin).exp()).log() for sign in (1, -1))
    return (1 - preference.label_smoothing) * right + preference.label_smoothing * wrong


# ---- chats


def test_sft_has_the_gradient_of_stock_cross_entropy():
    exact, stock = twins("qwen3")
    samples = random_samples(np.random.default_rng(0), 4)
    learner, loss, tokens = recorded(exact), 0.0, sum(int(s.loss_mask.sum()) for s in samples)
    row = sft_step(learner, pack(samples, 40))
    for sample in samples:
        labels = torch.from_numpy(np.where(sample.loss_mask, sample.tokens, -100))
        logits = stock(input_ids=torch.from_numpy(sample.tokens)[None]).logits[0]
        loss = loss + F.cross_entropy(logits[:-1], labels[1:], reduction="sum") / tokens
    loss.backward()
    dense.assert_gradients(learner.optimizer.updates[0], stock)
    assert row["nll"] == pytest.approx(loss.item(), rel=1e-5) and row["num_loss_tokens"] == tokens


# ---- pairs


def test_prefix_of_a_pair_is_what_both_share_before_the_answers():
    prompt = np.array([5, 9, 2])
    chosen = rendering(prompt, np.array([7, 7, 1]))
    rejected = rendering(prompt, np.array([7, 8, 1]))
    one, other = answer_pair(4, chosen, rejected)
    # an answer's start is not shared
    assert (one.prefix, other.prefix, one.group, other.group) == (3, 3, 4, 4)
    assert np.array_equal(one.tokens, chosen[0]) and np.array_equal(other.loss_mask, rejected[1])
    apart = rendering(np.array([5, 8, 2]), np.array([7]))
    assert [sample.prefix for sample in answer_pair(0, chosen, apart)] == [1, 1]


@pytest.mark.parametrize("preference", WITH_NLL.values(), ids=WITH_NLL)
def test_pair_loss_and_gradient_are_those_of_padded_stock(preference):
    pairs = random_pairs()
    (exact, stock), (reference, stock_reference) = twins("qwen3"), twins("qwen3", seed=5)
    batches = packed(pairs)
    assert len(batches) > 2
    learner = recorded(exact)
    row = preference_step(learner, reference, batches, preference)
    margin = padded_margins(stock, stock_reference, pairs, preference)
    logprobs, counts = padded_logprobs(stock, [chosen for chosen, _ in pairs])
    nll = (-logprobs.sum(1) / counts.sum(1)).mean()
    loss = losses_of(margin, preference).mean() + preference.nll_coef * nll
    loss.backward()
    dense.assert_gradients(learner.optimizer.updates[0], stock)
    assert row["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert row["margin"] == pytest.approx(preference.beta * margin.mean().item(), rel=1e-3)
    assert row["accuracy"] == (margin > 0).float().mean() and 0.0 < row["accuracy"] < 1.0
    if preference.nll_coef:
        assert row["nll"] == pytest.approx(nll.item(), rel=1e-4)


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_margin_at_the_start_is_exactly_0(name, adapter):
    policy = adapted_model() if adapter else exact_model("qwen3")
    reference, preference = policy if adapter else exact_model("qwen3"), LOSSES[name]
    learner = trained(policy, 1e-4)
    pairs = packed(random_pairs())
    rows = [preference_step(learner, reference, pairs, preference) for _ in range(4)]
    assert rows[0]["margin"] == 0.0 and rows[0]["accuracy"] == 0.5
    start = 1 / (4 * preference.beta**2) if preference.loss == "ipo" else math.log(2)
    assert rows[0]["loss"] == pytest.approx(start, rel=1e-7)  # a float32
    assert rows[-1]["loss"] < start and rows[-1]["margin"] > 0.0


@pytest.mark.parametrize(
    "numbers", [[3, 4, 3, 4, 4], [0, 1, 2, 3, 4]], ids=["as one group", "as groups of their own"]
)
@pytest.mark.parametrize("budget", [40, 10_000])
def test_pair_repeated_in_a_batch_counts_as_often(numbers, budget):
    (exact, stock), (reference, stock_reference) = twins("qwen3"), twins("qwen3", seed=5)
    two, preference = random_pairs(count=2), LOSSES["dpo"]
    pairs = [two[n] for n in (0, 1, 0, 1, 1)]
    learner = recorded(exact)
    batches = packed(pairs, budget=budget, numbers=numbers)
    row = preference_step(learner, reference, batches, preference)
    losses = losses_of(padded_margins(stock, stock_reference, two, preference), preference)
    loss = (2 * losses[0] + 3 * losses[1]) / 5
    loss.backward()
    dense.assert_gradients(learner.optimizer.updates[0], stock)
    assert row["loss"] == pytest.approx(loss.item(), rel=1e-4)


def test_margins_beyond_the_range_of_exp_stay_finite():
    margin = torch.tensor([-1e4, 1e4], requires_grad=True)
    losses, _ = dpo(margin, beta=1.0, label_smoothing=0.25)
    losses.sum().backward()
    assert losses.tolist() == [7500.0, 2500.0] and margin.grad.tolist() == [-0.75, 0.25]


def test_pairs_without_a_common_first_token_stay_together():
    rng = np.random.default_rng(3)
    sides = [rendering(np.array([n % 2]), random_tokens(rng, 9)) for n in range(1, 7)]
    pairs = list(zip(sides[::2], sides[1::2], strict=True))
    model, batches = exact_model("qwen3"), packed(pairs, budget=16)
    assert [batch.samples.tolist() for batch in batches] == [[0, 1], [2, 3], [4, 5]]
    for batch in batches:
        fixed = reference_answers(model, [batch], ALONE)
        assert pair_loss(answers(model, batch), batch, fixed, LOSSES["dpo"])[0].shape == (1,)


# ---- reward models


def stock_scores(stock, renderings):
    """Return a stock classifier's scores of each sequence, alone: those of its last token."""
    return torch.cat(
        [stock(input_ids=torch.from_numpy(tokens)[None]).logits[:, 0] for tokens, _ in renderings]
    )


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_score_and_gradient_are_those_of_a_stock_classifier(kind):
    value, stock = value_twins(kind)
    pairs = [pair[:: 1 - 2 * (number % 2)] for number, pair in enumerate(random_pairs())]
    learner = recorded(value)
    row = reward_model_step(learner, packed(pairs, scored_pair))
    chosen, rejected = zip(*pairs, strict=True)
    margin = stock_scores(stock, chosen) - stock_scores(stock, rejected)
    loss = (1 + (-margin).exp()).log().mean()
    loss.backward()
    dense.assert_gradients(learner.optimizer.updates[0], stock)
    assert row["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert row["margin"] == pytest.approx(margin.mean().item(), rel=1e-3, abs=1e-5)
    assert row["accuracy"] == (margin > 0).float().mean() and 0.0 < row["accuracy"] < 1.0
