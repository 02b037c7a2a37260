"""Episodes by hand, of which a test says what it is about."""

import numpy as np

from tandem.types import Episode


def attempt(uid="a", sample_index=0, tokens=(5, 9, 2, 7, 1), read=3, version=4, **fields):
    """An episode whose tokens after the first `read` were sampled by weights `version`."""
    size = len(tokens)
    sampled = np.arange(size) >= read
    by_hand = {
        "tokens": np.array(tokens, np.int64),
        "loss_mask": sampled,
        "engine_logprobs": np.where(sampled, -0.5, 0).astype(np.float32),
        "weight_versions": np.where(sampled, version, -1).astype(np.int32),
        "penalties": np.zeros(size, np.float32),
        "num_prompt_tokens": read,
        "messages": ({"role": "assistant", "content": "x"},),
        "stop_reason": "stop",
    }
    return Episode(**by_hand | fields, uid=uid, sample_index=sample_index)
