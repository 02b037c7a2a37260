"""The trainer's packed pass over one sequence, for checks of engines."""

import numpy as np
import torch

from tandem.model.forward import batch_logprobs
from tandem.model.load import ExactModel
from tandem.types import Completion, Microbatch, Request, SamplingParams

PLAIN = SamplingParams(max_new_tokens=1)  # the model's own distribution


def packed_gap(model: ExactModel, request: Request, completion: Completion, version: int) -> float:
    """Compute the largest difference of a completion's log-probs from those of the trainer's packed
    pass, nats, over the tokens of the weights that the model has, which are that version."""
    logprobs = packed_logprobs(model, request.prompt, completion.tokens, request.params)
    own = completion.weight_versions == version  # older tokens were sampled before a pause
    return float(np.abs(logprobs - completion.logprobs)[own].max())


@torch.no_grad()
def packed_logprobs(
    model: ExactModel, prompt: np.ndarray, sampled: np.ndarray, params: SamplingParams = PLAIN
) -> np.ndarray:
    """Compute the log-probs of sampled tokens by the trainer's packed pass, float32 [n], nats."""
    tokens, before, count = np.concatenate([prompt, sampled]), len(prompt), len(sampled)
    segments = [(0, before, 0, 0)] + [(before, count - 1, 0, before)] * (count > 1)
    batch = Microbatch(
        tokens=tokens[:-1],
        positions=np.arange(len(tokens) - 1),
        segments=np.array(segments),
        rows=np.arange(before - 1, len(tokens) - 1),
        targets=sampled,
        samples=np.zeros(1, np.int64),
        sequences=np.zeros(count, np.int64),
    )
    logprobs, *_ = batch_logprobs(model, batch, params, entropy=False)
    return logprobs.cpu().numpy()
