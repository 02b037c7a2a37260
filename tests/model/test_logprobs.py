"""Log-probs of the distribution sampled from: chunked = whole, filters = their definition,
gradients = autograd's."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.model.linear import multiply, pack
from tandem.model.logprobs import (
    CHUNK_BYTES,
    SamplingDistribution,
    SeenTokens,
    log_distribution,
    penalize,
    token_logprobs,
)

FILTERS = [
    SamplingDistribution(),
    SamplingDistribution(temperature=0.7),
    SamplingDistribution(temperature=1.6),
    # greedy: the distribution at temperature 1, without filters
    SamplingDistribution(temperature=0.0, top_k=3, top_p=0.2),
    SamplingDistribution(top_k=5),
    SamplingDistribution(top_p=0.6),
    SamplingDistribution(temperature=1.3, top_k=12, top_p=0.8),
    SamplingDistribution(min_p=0.1),
    SamplingDistribution(temperature=1.7, top_k=20, top_p=0.95, min_p=0.02),
]
WIDTH = 16


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def logits(rows=8, vocabulary=40, seed=0):
    return noise(rows, vocabulary, seed=seed) * 3


def kept_by_definition(row, how):
    """The indices that stay, for one row of logits without ties, in Python floats."""
    if how.temperature == 0.0:
        return set(range(len(row)))
    weights = [math.exp(float(x) / how.temperature) for x in row]
    ranked = sorted(range(len(row)), key=lambda i: -weights[i])
    if how.top_k:
        ranked = ranked[: how.top_k]
    kept, mass, total = [], 0.0, math.fsum(weights[i] for i in ranked)
    for index in ranked:
        if mass >= how.top_p * total:
            break
        kept.append(index)
        mass += weights[index]
    return {i for i in kept if weights[i] >= how.min_p * max(weights)}


def by_definition(row, how, forced=None):
    """Log-probs of one row, -inf outside the kept set, in Python floats."""
    kept = kept_by_definition(row, how) | ({int(forced)} if forced is not None else set())
    scaled = [float(x) / (how.temperature or 1.0) for x in row]
    normalizer = math.log(math.fsum(math.exp(scaled[i]) for i in kept))
    return [scaled[i] - normalizer if i in kept else -math.inf for i in range(len(row))]


@pytest.mark.parametrize("how", FILTERS, ids=str)
def test_the_distribution_is_the_definition_of_temperature_top_k_and_top_p(how):
    table = logits()
    found = log_distribution(table, how)
    expected = torch.tensor([by_definition(row, how) for row in table.tolist()])
    assert torch.equal(found.isinf(), expected.isinf())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(len(table)))


@pytest.mark.parametrize("how", FILTERS[4:], ids=str)
def test_a_forced_token_is_kept_and_the_rest_of_the_set_stays(how):
    table = logits()
    forced = table.argmin(-1)  # outside every filter
    expected = torch.tensor(
        [by_definition(row, how, f) for row, f in zip(table.tolist(), forced.tolist(), strict=True)]
    )
    found = log_distribution(table, how, forced)
    assert torch.equal(found.isinf(), expected.isinf())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("how", FILTERS, ids=str)
def test_forcing_a_token_that_is_in_the_set_changes_no_bit(how):
    table = logits()
    assert torch.equal(log_distribution(table, how, table.argmax(-1)), log_distribution(table, how))


def test_ties_at_the_edge_are_all_kept():
    tied = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    kept = [False, False, False, False, True]
    assert log_distribution(tied, SamplingDistribution(top_k=2)).isinf().tolist() == [kept]
    assert log_distribution(tied, SamplingDistribution(top_p=0.5)).isinf().tolist() == [kept]


def test_the_likeliest_token_is_kept_by_the_smallest_filters_and_all_by_the_largest():
    table = logits()
    for how in (SamplingDistribution(top_k=1), SamplingDistribution(top_p=1e-6)):
        assert torch.equal(log_distribution(table, how).argmax(-1), table.argmax(-1))
        assert ((log_distribution(table, how) == 0.0).sum(-1) == 1).all()
    for size in (40, 41):
        assert not log_distribution(table, SamplingDistribution(top_k=size)).isinf().any()


@pytest.mark.parametrize("how", FILTERS, ids=str)
def test_a_row_does_not_see_the_other_rows(how):
    table = logits(rows=33, vocabulary=97)
    whole = log_distribution(table, how)
    for rows in (1, 2, 3, 7):
        for start in (0, 5):
            assert torch.equal(
                log_distribution(table[start : start + rows].clone(), how),
                whole[start : start + rows],
            )


def case(rows, vocabulary, seed=0):
    hidden, weight = noise(rows, WIDTH, seed=seed), noise(vocabulary, WIDTH, seed=seed + 1) * 0.5
    targets = torch.from_numpy(np.random.default_rng(seed).integers(0, vocabulary, rows))
    return hidden, weight, targets


def test_a_vocabulary_that_needs_several_chunks_gives_the_bits_of_one_pass():
    vocabulary = 40_000
    rows = 2 * CHUNK_BYTES // (4 * vocabulary) + 7
    hidden, weight, targets = case(rows, vocabulary)
    packed = pack(weight)
    for how in (SamplingDistribution(), SamplingDistribution(temperature=0.8, top_k=50)):
        found, entropy = token_logprobs(hidden, weight, packed, targets, how)
        table = log_distribution(multiply(hidden, packed), how, targets)
        assert torch.equal(found, table.gather(1, targets[:, None])[:, 0])
        assert entropy.shape == found.shape and (entropy > 0).all()


def test_the_gradient_of_several_chunks_is_the_gradient_of_autograd():
    vocabulary = 40_000
    hidden, weight, targets = case(CHUNK_BYTES // (4 * vocabulary) + 30, vocabulary)
    above = noise(len(targets), seed=3)
    ours = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    found, _ = token_logprobs(*ours, pack(weight), targets, SamplingDistribution(temperature=0.8))
    (found * above).sum().backward()
    theirs = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    table = ((theirs[0] @ theirs[1].t()) / 0.8).log_softmax(-1)
    (table.gather(1, targets[:, None])[:, 0] * above).sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        # float32 on both sides
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", FILTERS, ids=str)
def test_the_gradient_is_that_of_log_softmax_over_the_kept_set(how):
    hidden, weight, targets = case(12, 40)
    above = noise(12, seed=3)
    ours = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    found, _ = token_logprobs(*ours, pack(weight), targets, how)
    (found * above).sum().backward()
    theirs = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    scaled = theirs[0] @ theirs[1].t() / (how.temperature or 1.0)
    outside = [
        [i not in kept_by_definition(row, how) | {int(t)} for i in range(40)]
        for row, t in zip((hidden @ weight.t()).tolist(), targets, strict=True)
    ]
    expected = (
        scaled.masked_fill(torch.tensor(outside), -math.inf)
        .log_softmax(-1)
        .gather(1, targets[:, None])[:, 0]
    )
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)
    (expected * above).sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", FILTERS, ids=str)
def test_the_entropy_is_that_of_the_distribution_sampled_from(how):
    hidden, weight, targets = case(12, 40)
    _, entropy = token_logprobs(hidden, weight, pack(weight), targets, how)
    expected = []
    for row, target in zip((hidden @ weight.t()).tolist(), targets, strict=True):
        logprobs = by_definition(row, how, target)
        expected.append(-math.fsum(math.exp(x) * x for x in logprobs if x > -math.inf))
    np.testing.assert_allclose(entropy, expected, rtol=1e-4, atol=1e-5)


def tables_in_float64(hidden, weight, targets, how):
    """(leaves, log-probs [N, V]) after temperature and filters, for autograd; -inf outside the kept
    sets."""
    leaves = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    scaled = leaves[0] @ leaves[1].t() / (how.temperature or 1.0)
    if how.temperature == 0.0:
        return leaves, scaled.log_softmax(-1)
    ranked, order = scaled.detach().sort(-1, descending=True)
    place = torch.arange(scaled.shape[1])
    probs = ranked.masked_fill(place >= (how.top_k or len(place)), -math.inf).softmax(-1)
    kept = (
        (probs > 0)
        & (probs.cumsum(-1) - probs < how.top_p)
        & (ranked >= ranked[:, :1] + math.log(how.min_p or 1e-300))
    )
    outside = torch.empty_like(kept).scatter_(1, order, ~kept).scatter_(1, targets[:, None], False)
    return leaves, scaled.masked_fill(outside, -math.inf).log_softmax(-1)


def assert_gradients_with_entropy(hidden, weight, targets, how, *, of_logprobs):
    """Of logprobs x noise (or 0) + entropy x other noise, ours against autograd's."""
    above, above_entropy = noise(len(targets), seed=3) * of_logprobs, noise(len(targets), seed=4)
    ours = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    found, entropy = token_logprobs(*ours, pack(weight), targets, how)
    loss = (entropy * above_entropy).sum()
    (loss + (found * above).sum() if of_logprobs else loss).backward()
    theirs, table = tables_in_float64(hidden, weight, targets, how)
    terms = table.exp() * table.masked_fill(table.isinf(), 0.0)
    chosen = table.gather(1, targets[:, None])[:, 0]
    (-(terms.sum(-1) * above_entropy).sum() + (chosen * above).sum()).backward()
    for one, other in zip(ours, theirs, strict=True):
        scale = float(other.grad.abs().max())
        # float32 sums over the vocabulary; measured: under 3e-6 of the largest entry
        torch.testing.assert_close(one.grad, other.grad.float(), rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize("of_logprobs", [0.0, 1.0], ids=["entropy alone", "with log-probs"])
@pytest.mark.parametrize("how", FILTERS, ids=str)
def test_the_gradient_of_the_entropy_is_autograds(how, of_logprobs):
    assert_gradients_with_entropy(*case(12, 40), how, of_logprobs=of_logprobs)


@pytest.mark.parametrize("beyond", [0, 1])
@pytest.mark.parametrize(
    "how",
    [
        SamplingDistribution(temperature=0.7),
        SamplingDistribution(temperature=0.7, top_k=50, top_p=0.9),
    ],
    ids=str,
)
def test_the_gradient_of_the_entropy_is_autograds_at_the_edge_of_a_chunk(how, beyond):
    vocabulary = 40_000
    assert_gradients_with_entropy(
        *case(CHUNK_BYTES // (4 * vocabulary) + beyond, vocabulary), how, of_logprobs=1.0
    )


def test_an_entropy_that_is_not_used_changes_the_gradient_of_the_logprobs_by_rounding_only():
    gradients = []
    for share in (None, 0.0):
        hidden, weight, targets = case(12, 40)
        hidden.requires_grad_(), weight.requires_grad_()
        found, entropy = token_logprobs(
            hidden, weight, pack(weight.detach()), targets, SamplingDistribution(temperature=0.7)
        )
        (found.sum() if share is None else found.sum() + share * entropy.sum()).backward()
        gradients.append((hidden.grad, weight.grad))
    for one, other in zip(*gradients, strict=True):
        # p (0 - g) + g and g - p g are rounded apart
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_no_targets_give_no_logprobs_and_a_gradient_of_zero():
    hidden, weight, _ = case(0, 40)
    weight.requires_grad_()
    found, _ = token_logprobs(
        hidden, weight, pack(weight), torch.zeros(0, dtype=torch.int64), SamplingDistribution()
    )
    found.sum().backward()
    assert len(found) == 0 and not weight.grad.any()


def penalized_by_definition(row, penalty, seen):
    return [
        x if i not in seen else x / penalty if x > 0 else x * penalty for i, x in enumerate(row)
    ]


def seen_by(rows):
    index = torch.tensor([row for row, tokens in enumerate(rows) for _ in tokens])
    return SeenTokens(index, torch.tensor([token for tokens in rows for token in tokens]))


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_the_repetition_penalty_weakens_what_was_seen_before_and_nothing_else(penalty):
    table, rows = logits(3), [[0, 5, 39, 5], [], [7]]
    expected = [
        penalized_by_definition(row, penalty, set(seen))
        for row, seen in zip(table.tolist(), rows, strict=True)
    ]
    penalize(table, penalty, seen_by(rows))
    torch.testing.assert_close(table, torch.tensor(expected))


@pytest.mark.parametrize(
    "how",
    [
        SamplingDistribution(repetition_penalty=1.4),
        SamplingDistribution(repetition_penalty=1.4, temperature=0.7, top_k=15),
    ],
    ids=str,
)
def test_the_gradient_goes_through_the_repetition_penalty(how):
    hidden, weight, targets = case(12, 40)
    above, rows = noise(12, seed=3), [list(range(n, 40, n + 2)) for n in range(12)]
    ours = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    found, _ = token_logprobs(
        *ours, pack(weight), targets, how, lambda start, stop: seen_by(rows[start:stop])
    )
    (found * above).sum().backward()
    theirs = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    raw, mask = theirs[0] @ theirs[1].t(), torch.zeros(12, 40, dtype=torch.bool)
    for row, tokens in enumerate(rows):
        mask[row, tokens] = True
    weakened = torch.where(raw > 0, raw / how.repetition_penalty, raw * how.repetition_penalty)
    scaled = torch.where(mask, weakened, raw)
    outside = [
        [i not in kept_by_definition(row, how) | {int(t)} for i in range(40)]
        for row, t in zip(scaled.tolist(), targets, strict=True)
    ]
    expected = (
        (scaled / how.temperature).masked_fill(torch.tensor(outside), -math.inf).log_softmax(-1)
    )
    expected = expected.gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)
    (expected * above).sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad.float(), rtol=1e-4, atol=1e-5)


class Operators(TorchDispatchMode):
    """Counts the operators that run inside of it."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("frozen", [True, False])
def test_nothing_is_spent_on_the_gradient_of_a_frozen_output_projection(frozen):
    hidden, weight = (
        noise(8, WIDTH).requires_grad_(),
        noise(40, WIDTH, seed=1).requires_grad_(not frozen),
    )
    logprobs, _ = token_logprobs(
        hidden, weight, pack(weight), torch.arange(8), SamplingDistribution()
    )
    with Operators() as run:
        logprobs.sum().backward()
    assert hidden.grad.any() and (weight.grad is None) == frozen
    assert run.counts["aten.addmm_.default"] == (0 if frozen else 1)


@pytest.mark.parametrize(
    "how",
    [SamplingDistribution(), SamplingDistribution(temperature=0.7, top_k=9)],
    ids=["plain", "filtered"],
)
@pytest.mark.parametrize("frozen", [False, True], ids=["trained head", "frozen head"])
def test_a_gradient_that_was_expected_gives_the_same_bits_and_another_one_its_own(how, frozen):
    rng = torch.Generator().manual_seed(0)
    rows, vocabulary, width = 40, 300_000, 8  # several chunks
    weight = torch.randn(vocabulary, width, generator=rng).requires_grad_(not frozen)
    targets, above = (
        torch.randint(vocabulary, (rows,), generator=rng),
        torch.randn(rows, generator=rng),
    )
    start = torch.randn(rows, width, generator=rng)

    def gradients(expected, arriving):
        hidden = start.clone().requires_grad_()
        logprobs, entropy = token_logprobs(
            hidden, weight, pack(weight), targets, how, None, expected
        )
        logprobs.backward(arriving)
        head, weight.grad = weight.grad, None
        return logprobs.detach(), entropy.detach(), hidden.grad, head

    for expected, arriving in ((above, above), (above + 1, above), (torch.zeros(rows), above)):
        for found, truth in zip(
            gradients(expected, arriving), gradients(None, arriving), strict=True
        ):
            assert (found is None and truth is None and frozen) or torch.equal(found, truth)


@pytest.mark.parametrize(("shift", "products"), [(0.0, 0), (1.0, 1)])
def test_the_backward_pass_computes_no_logits_again_where_the_gradient_was_expected(
    shift, products
):
    hidden, weight, above = (
        torch.randn(6, 8).requires_grad_(),
        torch.randn(50, 8).requires_grad_(),
        torch.randn(6),
    )
    logprobs, _ = token_logprobs(
        hidden, weight, pack(weight), torch.arange(6), SamplingDistribution(), None, above + shift
    )
    with Operators() as ran:
        logprobs.backward(above)
    assert sum(count for name, count in ran.counts.items() if "linear" in name) == products
