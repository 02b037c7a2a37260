"""Random schedules for P1: generate with the engine, recompute with the policy's packed pass,
compare bit by bit."""

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tandem.engine.engine import make_engine
from tandem.model.forward import batch_logprobs
from tandem.model.load import make_exact
from tandem.runtime.rng import address
from tandem.trainer.optimizer import Optimizer, Settings
from tandem.trainer.pack import join, pack
from tandem.types import Request, Sample, SamplingParams
from tests.support.architectures import LEAN, architecture
from tests.support.architectures import VOCAB as VOCABULARY

CONFIGS = {kind: {} for kind in LEAN}  # changes of a model's kind
CONFIGS |= {"llama": {"attention_bias": True}, "qwen3": {"tie_word_embeddings": True}}
FILTERS = (
    SamplingParams(max_new_tokens=1),
    SamplingParams(max_new_tokens=48, stop_token_ids=(5, 6, 7)),
    SamplingParams(max_new_tokens=33, temperature=0.7, top_p=0.8, vocabulary=80),
    SamplingParams(max_new_tokens=20, temperature=1.3, top_k=10, stop=("9 9",)),
)


def random_model(name, seed=0, dtype=torch.float32, device="cpu"):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = AutoModelForCausalLM.from_config(architecture(name, **CONFIGS[name]), dtype=dtype)
        return make_exact(module.to(device))


def parity_of_model(model, schedules):
    """Return (tokens sampled, largest gap) over random schedules, with an optimizer step after
    each. The model has VOCABULARY tokens."""
    return gaps_of_model(model, schedules)[:2]


def gaps_of_model(model, schedules):
    """Return (tokens sampled, largest gap, mean gap), as `parity_of_model`."""
    optimizer = Optimizer(model.trainable(), Settings(learning_rate=1e-3, total_steps=9))
    tokens, gaps = 0, []
    for number in range(schedules):
        rng = np.random.default_rng(number)
        longest = 1800 if number % 10 == 9 else 200
        requests = random_requests(
            rng, prompts=int(rng.integers(1, 9)), longest=longest, group=int(rng.integers(1, 5))
        )
        completions = engine_for(model, max_batch=int(rng.integers(1, 40))).generate(requests)
        tokens += sum(len(c.tokens) for c in completions)
        gaps += gaps_of(model, requests, completions, int(rng.integers(100, 4000)), gradients=True)
        optimizer.update()
    found = np.concatenate(gaps)
    return tokens, float(found.max()), float(found.mean())  # np: a NaN must show


def words(tokens):
    return " ".join(map(str, tokens.tolist()))


def random_requests(rng, *, prompts, longest, group):
    """Groups that share a prompt, of all the kinds of sampling, in no order."""
    requests = []
    for number in range(prompts):
        prompt = rng.integers(0, VOCABULARY, int(rng.integers(1, longest))).astype(np.int64)
        params = FILTERS[int(rng.integers(len(FILTERS)))]
        keys = [address("parity", number, g) for g in range(group)]
        requests += [Request(key=key, prompt=prompt, params=params) for key in keys]
    return [requests[i] for i in rng.permutation(len(requests))]


def gap_of(model, seed=1, *, prompts=5, longest=200, group=3):
    """The largest gap of random requests, with gradients in the policy's pass."""
    requests = random_requests(
        np.random.default_rng(seed), prompts=prompts, longest=longest, group=group
    )
    completions = engine_for(model, max_batch=8).generate(requests)
    return largest_gap(model, requests, completions, 400, gradients=True)


def largest_gap(model, requests, completions, budget, *, gradients):
    """max |engine log-prob - policy log-prob| with samples packed, prompts shared, under a token
    budget."""
    found = gaps_of(model, requests, completions, budget, gradients=gradients)
    return float(np.concatenate(found).max())  # np: a NaN must show


def gaps_of(model, requests, completions, budget, *, gradients):
    """|engine log-prob - policy log-prob| of the tokens, as `largest_gap`."""
    numbers = {}
    for request in requests:
        numbers.setdefault(request.prompt.tobytes(), len(numbers))
    pairs = [
        (numbers[request.prompt.tobytes()], request, completion)
        for request, completion in zip(requests, completions, strict=True)
    ]
    pairs.sort(key=lambda pair: pair[0])
    gaps = []
    for params in FILTERS:
        mine = [pair for pair in pairs if pair[1].params == params]
        batches = pack([sample_of(r, c, number) for number, r, c in mine], budget)
        sampled = join(batches, [c.logprobs for _, _, c in mine])
        for batch, engine in zip(batches, sampled, strict=True):
            with torch.set_grad_enabled(gradients):
                logprobs, _ = batch_logprobs(model, batch, params)
            if gradients:
                logprobs.sum().backward()
            gaps.append(np.abs(logprobs.detach().cpu().numpy() - engine))
    return gaps


def sample_of(request, completion, group):
    before = len(request.prompt)
    tokens = np.concatenate([request.prompt, completion.tokens])
    return Sample(
        tokens=tokens, loss_mask=np.arange(len(tokens)) >= before, prefix=before, group=group
    )


def engine_for(model, *, max_batch=256):
    return make_engine(model, words, cache_bytes=1 << 30, max_batch=max_batch)
