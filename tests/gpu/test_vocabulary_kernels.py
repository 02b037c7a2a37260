"""Log-probs over the vocabulary: against float64, engine and trainer to the bit, and the gradients
of log-probs and entropies."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from tandem.engine.sampler import sample
from tandem.model.kernels import kernels_of
from tandem.model.logprobs import Head, SeenTokens, token_logprobs
from tandem.plugins.triton import vocabulary
from tandem.plugins.triton.vocabulary import draw, log_softmax, logprob_slope, target_logprobs
from tandem.types import SamplingDistribution
from tests.support.kernels import (
    BF16,
    DEVICE,
    FP32,
    assert_near,
    gradients,
    random,
    same_bits,
    triton_everywhere,
)

SIZES = pytest.mark.parametrize("size", [1, 97, 4096, 5001])  # 5001: two blocks
TEMPERATURES = pytest.mark.parametrize("temperature", [1.0, 0.7])


def logits_of(size, rows=6, dtype=FP32):
    """Logits of some certain and many equal tokens, and one without probability."""
    logits = 4 * random(1, rows, size, dtype=dtype)
    logits[0] += 80.0
    if size > 2:
        logits[1, 2] = 60.0
        logits[2, 1:] = float("-inf") if size < 100 else 0.0
        logits[3, 1] = float("-inf")
    return logits, torch.arange(rows, device=DEVICE) % size * (size // 7 + 1) % size


def in_float64(logits, targets, temperature):
    table = (logits.double() / temperature).log_softmax(-1)
    entropy = -(table.exp() * table.masked_fill(table == float("-inf"), 0.0)).sum(-1)
    return table.gather(1, targets[:, None])[:, 0], entropy


@TEMPERATURES
@SIZES
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_log_probs_and_entropies_are_near_float64(size, temperature, dtype):
    logits, targets = logits_of(size, dtype=dtype)
    targets[2] = 0
    found = target_logprobs(logits, targets, temperature, entropy=True)
    for mine, theirs in zip(found, in_float64(logits, targets, temperature), strict=True):
        assert_near(mine, theirs, FP32)
    assert target_logprobs(logits, targets, temperature, entropy=False)[1] is None


@TEMPERATURES
@SIZES
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_engine_table_and_trainer_log_probs_have_the_same_bits(size, temperature, dtype):
    logits, targets = logits_of(size, dtype=dtype)
    table = log_softmax(logits, temperature)
    logprobs, _ = target_logprobs(logits, targets, temperature, entropy=True)
    assert same_bits(table.gather(1, targets[:, None])[:, 0], logprobs)
    tokens, drawn = draw(logits, temperature, torch.linspace(0, 0.999, 6).to(DEVICE))
    assert same_bits(target_logprobs(logits, tokens, temperature, entropy=False)[0], drawn)


@SIZES
def test_a_row_has_the_same_bits_alone_and_in_any_batch(size):
    logits, targets = logits_of(size)
    above, whole = random(2, 6), target_logprobs(logits, targets, 0.7, entropy=True)
    table = log_softmax(logits, 0.7)
    slope = logprob_slope(logits.clone(), targets, 0.7, above, above)
    for rows in (slice(0, 1), slice(3, 4), slice(1, 6)):
        part = target_logprobs(logits[rows], targets[rows], 0.7, entropy=True)
        assert same_bits(part[0], whole[0][rows]) and same_bits(part[1], whole[1][rows])
        assert same_bits(log_softmax(logits[rows], 0.7), table[rows])
        grads = above[rows], above[rows]
        assert same_bits(
            logprob_slope(logits[rows].clone(), targets[rows], 0.7, *grads), slope[rows]
        )


@SIZES
@pytest.mark.parametrize("wanted", ["log-prob", "entropy", "both"])
def test_the_slope_is_the_gradient_of_float64(size, wanted):
    logits, targets = logits_of(size)
    targets[2] = 0
    above = [
        random(s, 6) if wanted in (name, "both") else None
        for s, name in enumerate(("log-prob", "entropy"))
    ]
    tempered = (logits / 0.7).double().requires_grad_()
    results = in_float64(tempered, targets, 1.0)
    loss = sum((r * a.double()).sum() for r, a in zip(results, above, strict=True) if a is not None)
    (expected,) = torch.autograd.grad(loss, tempered)
    found = 0.7 * logprob_slope(logits, targets, 0.7, *above)
    expected = expected.nan_to_num(0.0)  # 0 * -inf in the reference
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


SAMPLINGS = pytest.mark.parametrize(
    "sampling",
    [
        SamplingDistribution(),
        SamplingDistribution(temperature=0.0),
        SamplingDistribution(temperature=0.8, repetition_penalty=1.3),
        SamplingDistribution(temperature=0.8, top_k=20, top_p=0.9),
    ],
    ids=["plain", "greedy", "penalty", "filters"],
)


@SAMPLINGS
def test_engine_and_trainer_sum_logits_of_one_type(sampling, monkeypatch):
    """The threads of a GPU hold 16 bits otherwise than 32, and add them up in another order."""
    types, sums = [], vocabulary._sums

    def noted(logits, temperature):
        types.append(logits.dtype)
        return sums(logits, temperature)

    monkeypatch.setattr(vocabulary, "_sums", noted)
    hidden, weight = random(1, 4, 32, dtype=BF16), random(2, 97, 32, dtype=BF16)
    place = torch.arange(4, device=DEVICE)
    with triton_everywhere():
        head, seen = Head(hidden, weight, kernels_of(weight).pack(weight)), SeenTokens(place, place)
        sample(head.logits(slice(4)), sampling, place / 4, seen)
        engine, types = set(types), []
        token_logprobs(head, place, sampling, lambda start, stop: seen)
    assert set(types) == engine and len(engine) == 1


@SAMPLINGS
@pytest.mark.parametrize("known", [False, True])
def test_token_logprobs_and_their_gradients_are_near_those_of_the_cpu(sampling, known):
    """known: the loss knows beforehand what gradient the log-probs will receive."""
    hidden, weight, above = random(1, 40, 32), random(2, 97, 32), (random(3, 40), random(4, 40))
    above = above[:1] if known else above

    def run(hidden, weight):
        place = torch.arange(40, device=hidden.device)

        def seen(start, stop):
            return SeenTokens(place[start:stop] - start, place[start:stop] % 7)

        expected = above[0].to(hidden.device) if known else None
        return token_logprobs(
            Head(hidden, weight, kernels_of(weight).pack(weight)),
            *(place % 5, sampling, seen, expected),
            entropy=not known,
        )[: len(above)]

    with triton_everywhere():
        found = gradients(run, hidden, weight, above=above)
    on_cpu = [t.cpu() for t in (hidden, weight)]
    expected = gradients(run, *on_cpu, above=tuple(t.cpu() for t in above))
    for mine, theirs in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-4, atol=1e-4)
