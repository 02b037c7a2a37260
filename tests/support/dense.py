"""The trainer's arithmetic by definition: stock transformers, one sequence at a time, whole logits,
autograd, plain loops.

Shares no code with tandem: what is compared with it is computed twice.
"""

import math

import numpy as np
import torch

# Relative to the largest entry of a parameter's gradient. float32 sums over some 300 rows, in
# another order and by other kernels than transformers': a few hundred roundings of 6e-8 on terms
# that partly cancel. Measured: under 1e-6.
GRADIENT = 8e-6


def table(stock, tokens, temperature=1.0):
    """Log-probs [T, V] of the token after each."""
    return (stock(input_ids=torch.as_tensor(tokens)[None]).logits[0] / temperature).log_softmax(-1)


def logprobs(stock, tokens, mask, temperature=1.0):
    """Return the log-probs of the tokens under the mask."""
    places = np.flatnonzero(mask)
    return table(stock, tokens, temperature)[places - 1, tokens[places]]


def entropies(stock, tokens, mask, temperature=1.0):
    rows = table(stock, tokens, temperature)[np.flatnonzero(mask) - 1]
    return -(rows.exp() * rows).sum(-1)


def values(stock, tokens, mask):
    """A value model's numbers before each token under the mask."""
    hidden = stock.model(input_ids=torch.as_tensor(tokens)[None]).last_hidden_state[0]
    return stock.score(hidden)[np.flatnonzero(mask) - 1, 0]


def k3(policy, reference):
    return (reference - policy).exp() - 1 + policy - reference


def policy_terms(rl, logprobs, proximal, advantages):
    """The losses of one episode's tokens."""
    ratio = (logprobs - proximal).exp()
    low, high = 1 - rl.clip_low, 1 + rl.clip_high
    match rl.loss:
        case "reinforce":
            return -advantages * logprobs
        case "cispo":
            return -ratio.clamp(low, high).detach() * advantages * logprobs
        case "gspo":
            mean = ratio.prod().pow(1 / len(ratio)).detach()
            # each token passes its own gradient
            ratio = mean * (logprobs - logprobs.detach()).exp()
    terms = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    if rl.dual_clip:
        terms = torch.where(advantages < 0, torch.maximum(terms, rl.dual_clip * advantages), terms)
    return -terms


def aggregate(kind, terms, max_tokens):
    """One number out of every episode's terms."""
    match kind:
        case "token_mean":
            return sum(t.sum() for t in terms) / sum(len(t) for t in terms)
        case "sequence_mean":
            return sum(t.mean() for t in terms) / len(terms)
        case "fixed_length":
            return sum(t.sum() for t in terms) / (len(terms) * max_tokens)


def group_relative(rewards):
    """GRPO's advantages of one group."""
    mean = sum(rewards) / len(rewards)
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
    return [(r - mean) / (std + 1e-6) for r in rewards]


def gae(rewards, values, gamma, lam):
    """(advantages, returns) by the double sum of arXiv 1506.02438, eq. 16."""
    after = [*values[1:], 0.0]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, after, values, strict=True)]
    advantages = [
        sum((gamma * lam) ** (u - t) * deltas[u] for u in range(t, len(deltas)))
        for t in range(len(deltas))
    ]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def whitened(parts):
    """All parts shifted and scaled by the mean and std of all their numbers."""
    numbers = [x for part in parts for x in part]
    mean = sum(numbers) / len(numbers)
    std = math.sqrt(sum((x - mean) ** 2 for x in numbers) / len(numbers))
    return [[(x - mean) / (std + 1e-8) for x in part] for part in parts]


def assert_gradients(found, stock):
    """found: gradients by name; those of the stock model are what backward left in it, which is
    then cleared."""
    expected = {name: p.grad for name, p in stock.named_parameters()}
    stock.zero_grad()
    assert set(found) == set(expected)
    for name, gradient in found.items():
        scale = expected[name].abs().max()
        assert scale > 0, name
        torch.testing.assert_close(
            gradient, expected[name], rtol=0, atol=GRADIENT * scale, msg=name
        )
