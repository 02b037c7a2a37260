"""Packed microbatches against stock transformers run sample by sample: values and gradients."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tandem.model.forward import batch_logprobs, reference_logprobs
from tandem.model.layers import norm
from tandem.trainer.pack import join, pack, split
from tandem.types import SamplingDistribution
from tests.support import dense
from tests.support.episodes import adapted_model
from tests.support.tiny import CONFIGS, exact_model, random_samples, stock_logits, twins

# Two implementations of a float32 model; measured: under 1e-5.
FORWARD = 2e-5


@pytest.mark.parametrize("shape", [(1, 96), (300, 576), (70, 3, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_norm_has_torchs_bits_and_the_gradients_of_float64(shape, dtype, plain_kernels):
    torch.manual_seed(0)
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.randn(shape[-1], dtype=dtype))
    module.variance_epsilon = 1e-5
    x, above = torch.randn(shape, dtype=dtype).requires_grad_(), torch.randn(shape, dtype=dtype)
    wide = [t.detach().double().requires_grad_() for t in (x, module.weight)]
    out = norm(module, x)
    with torch.no_grad():
        own = F.rms_norm(x.float(), shape[-1:], module.weight.float(), 1e-5).to(dtype)
        assert torch.equal(out, own) and torch.equal(norm(module, x), own)
    out.backward(above)
    F.rms_norm(wide[0], shape[-1:], wide[1], 1e-5).backward(above.double())
    closeness = 1e-6 if dtype == torch.float32 else 4e-3  # of the largest
    for found, expected in zip((x, module.weight), wide, strict=True):
        assert found.grad.dtype == dtype
        difference = (found.grad.double() - expected.grad).abs().max()
        assert difference <= closeness * expected.grad.abs().max()


@pytest.mark.parametrize("kind", CONFIGS)
def test_packed_gradient_is_transformers_sample_by_sample(kind):
    exact, stock = twins(kind)
    samples = random_samples(np.random.default_rng(0), 4)
    batches, random = pack(samples, 40), np.random.default_rng(0)
    assert len(batches) > 2
    # of every token another one, so that no two tokens' gradients can be exchanged
    above = [random.normal(size=s.loss_mask.sum()).astype(np.float32) for s in samples]
    for batch, part in zip(batches, join(batches, above), strict=True):
        logprobs, _ = batch_logprobs(exact, batch, SamplingDistribution())
        logprobs.backward(torch.from_numpy(part))
    for sample, part in zip(samples, above, strict=True):
        expected = dense.logprobs(stock, sample.tokens, sample.loss_mask)
        expected.backward(torch.from_numpy(part))
    gradients = {name: p.grad for name, p in exact.module.named_parameters() if p.grad is not None}
    dense.assert_gradients(gradients, stock)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_entropies_are_those_of_stock_transformers(temperature):
    exact, stock = twins("llama")
    samples = random_samples(np.random.default_rng(2), 4)
    batches = pack(samples, 100)
    sampling = SamplingDistribution(temperature=temperature)
    with torch.no_grad():
        said = [batch_logprobs(exact, batch, sampling) for batch in batches]
        for kind, define in enumerate((dense.logprobs, dense.entropies)):
            found = split(batches, [part[kind].numpy() for part in said])
            for number, sample in enumerate(samples):
                expected = define(stock, sample.tokens, sample.loss_mask, temperature).numpy()
                np.testing.assert_allclose(found[number], expected, rtol=0, atol=FORWARD)


def test_repetition_penalty_counts_prefix_and_sample_tokens():
    exact, stock = twins("llama")
    samples = random_samples(np.random.default_rng(2), 4)
    batches = pack(samples, 100)
    sampling = SamplingDistribution(repetition_penalty=1.5, temperature=0.7)
    with torch.no_grad():
        said = [batch_logprobs(exact, batch, sampling)[0].numpy() for batch in batches]
        found = split(batches, said)
        for number, sample in enumerate(samples):
            logits, expected = stock_logits(stock, sample.tokens), []
            for place in np.flatnonzero(sample.loss_mask):
                row, seen = logits[place - 1].clone(), sorted({*sample.tokens[:place].tolist()})
                row[seen] = torch.where(row[seen] > 0, row[seen] / 1.5, row[seen] * 1.5)
                expected.append(float((row / 0.7).log_softmax(-1)[sample.tokens[place]]))
            np.testing.assert_allclose(found[number], expected, rtol=0, atol=2 * FORWARD)


def test_reference_of_adapted_policy_is_the_base_to_the_bit():
    adapted, plain = adapted_model(), exact_model("qwen3")
    adapted.load_weights(
        {name: torch.full_like(w, 0.05) for name, w in adapted.adapter_weights().items()}
    )
    [batch] = pack(random_samples(np.random.default_rng(5), 3), 10_000)
    reference = reference_logprobs(adapted, batch, SamplingDistribution())
    with torch.no_grad():
        assert torch.equal(reference, batch_logprobs(plain, batch, SamplingDistribution())[0])
        assert not torch.equal(reference, batch_logprobs(adapted, batch, SamplingDistribution())[0])
    assert not reference.requires_grad
