"""Training over Triton, whole: an engine generates, and the trainer's packed pass, with gradients
on, has its log-probs to the bit and the gradients of the plain model in float64."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from tandem.engine.engine import Engine
from tandem.model.forward import batch_logprobs
from tandem.model.load import make_exact
from tandem.runtime.rng import address
from tandem.trainer.pack import join, pack
from tandem.types import Request, SamplingDistribution, SamplingParams
from tests.support.kernels import BF16, DEVICE, FP32, triton_everywhere
from tests.support.parity import sample_of, words
from tests.support.tiny import random_tokens, stock_model, tiny_config

SHAPE = {
    "hidden_size": 64,
    "head_dim": 16,
    "intermediate_size": 72,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
}
TEMPERATURE = 0.8
PARAMS = SamplingParams(max_new_tokens=3, temperature=TEMPERATURE)
# Largest error of a parameter's gradient, in units of that gradient's norm. In bf16 each product
# rounds its result to 8 bits, and the interpreter does so towards zero.
BOUND = {FP32: 5e-6, BF16: 7e-2}


def generate(model):
    """A prompt of three completions that share its pages, and one of another prompt."""
    rng = np.random.default_rng(0)
    prompts = [random_tokens(rng, 66)] * 3 + [random_tokens(rng, 5)]
    requests = [
        Request(key=address("training", n), prompt=prompt, params=PARAMS)
        for n, prompt in enumerate(prompts)
    ]
    engine = Engine(model, words, cache_bytes=1 << 21, max_batch=4, chunk_tokens=60)
    return requests, engine.generate(requests)


def weights_of(completion):
    """Coefficients of the log-probs and entropies in the loss: of both signs."""
    number = torch.arange(len(completion.tokens), dtype=torch.float64)
    return torch.cos(number + float(completion.tokens[0])), 0.1 * torch.sin(number)


def loss_in_float64(stock, requests, completions):
    """The same loss of plain transformers, one sequence after another."""
    loss = torch.zeros((), dtype=torch.float64)
    for request, completion in zip(requests, completions, strict=True):
        tokens = torch.from_numpy(np.concatenate([request.prompt, completion.tokens]))
        own = slice(len(request.prompt) - 1, -1)
        table = (stock(input_ids=tokens[None]).logits[0, own] / TEMPERATURE).log_softmax(-1)
        logprobs = table.gather(1, torch.from_numpy(completion.tokens)[:, None])[:, 0]
        first, second = weights_of(completion)
        loss = loss + (first * logprobs - second * (table.exp() * table).sum(-1)).sum()
    return loss


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("kind", ["qwen3", "mistral"])
def test_a_packed_pass_with_gradients_has_the_engine_s_log_probs_and_float64_s_gradients(
    kind, dtype
):
    stock = stock_model(tiny_config(kind, **SHAPE))
    for parameter in stock.parameters():  # and not the buffers: angles stay float32
        parameter.data = parameter.data.to(dtype)
    weights = {name: weight.clone() for name, weight in stock.state_dict().items()}
    with triton_everywhere():
        model = make_exact(stock.to(DEVICE))
        with torch.no_grad():
            requests, completions = generate(model)
        samples = [
            sample_of(r, c, number // 3)
            for number, (r, c) in enumerate(zip(requests, completions, strict=True))
        ]
        (batch,) = pack(samples, 1000)
        (engine,) = join([batch], [c.logprobs for c in completions])
        parts = [weights_of(c) for c in completions]
        first, second = (
            torch.from_numpy(joined).float()
            for joined in (join([batch], [p[i].numpy() for p in parts])[0] for i in (0, 1))
        )
        sampling = SamplingDistribution(temperature=TEMPERATURE)
        logprobs, entropy = batch_logprobs(model, batch, sampling)
        assert np.abs(logprobs.detach().numpy() - engine).max() == 0.0
        (first * logprobs + second * entropy).sum().backward()
    found = dict(model.module.named_parameters())
    plain = stock_model(tiny_config(kind, **SHAPE)).double()
    plain.load_state_dict({name: weight.double() for name, weight in weights.items()})
    loss_in_float64(plain, requests, completions).backward()
    for name, parameter in plain.named_parameters():
        error = (found[name].grad.cpu().double() - parameter.grad).norm() / parameter.grad.norm()
        assert error < BOUND[dtype], f"{name}: {error:.1e}"
