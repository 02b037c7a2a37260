"""Bytes that autograd keeps of a microbatch for its backward pass, by arithmetic over the shapes.

The operators are those of model/layers.py and model/logprobs.py on a CPU; fused kernels keep less.
Of transformers' dense layers (model/general.py) it is a bound; of their experts it is not, which
keep up to twice as much. D, H, K and E are hidden size, query heads, key/value heads and head size.
"""

from typing import Any

import torch

from tandem.model.config_file import head_size, heads_of, inner_size, is_sparse, kv_heads_of
from tandem.model.onednn import padded_rows
from tandem.model.paths import divisible

FLOAT32, INT64 = 4, 8  # bytes


def activation_bytes(
    shape: Any, tokens: int, dtype: torch.dtype, *, checkpointing: bool, head: bool = True
) -> int:
    """Return the most bytes kept at once of so many tokens, all of which carry loss.

    shape: the transformers config. With checkpointing those are the layers' inputs and one layer,
    which is run again. head: the output projection is trained, so the log-probs keep its gradient.
    """
    outer = outer_bytes(shape, tokens, dtype, head=head)
    return layers_bytes(shape, tokens, dtype, checkpointing=checkpointing) + outer


def layers_bytes(
    shape: Any, tokens: int, dtype: torch.dtype, *, checkpointing: bool, microbatches: int = 1
) -> int:
    """Return the bytes of so many tokens in the layers; microbatches: those whose backward pass is
    to come."""
    width, layers = dtype.itemsize, shape.num_hidden_layers
    each = [_layer_bytes(shape, number, width, whole=checkpointing) for number in range(layers)]
    inputs = layers * width * shape.hidden_size
    kept = microbatches * inputs + max(each) if checkpointing else microbatches * sum(each)
    return int(padded_rows(tokens, dtype) * kept)


def outer_bytes(shape: Any, tokens: int, dtype: torch.dtype, *, head: bool = True) -> int:
    """Return the bytes of so many tokens outside of the layers: the rotation, the last norm, the
    states before the output projection with their gradient, log-probs and indices."""
    width, vocabulary = dtype.itemsize, FLOAT32 * shape.vocab_size * shape.hidden_size * head
    rotation, states = 2 * width * head_size(shape), 2 * width * shape.hidden_size
    norm = _norm_bytes(shape.hidden_size, width if divisible(shape) else 2 * FLOAT32)
    each = rotation + norm + states + 2 * FLOAT32 + 3 * INT64
    return int(padded_rows(tokens, dtype) * each + vocabulary)


def _layer_bytes(shape: Any, number: int, width: int, *, whole: bool) -> int:
    """Return bytes of a token in a layer. whole: with what its backward pass would make again
    (`made_again`)."""
    hidden, size = shape.hidden_size, head_size(shape)
    query, keys = heads_of(shape) * size, kv_heads_of(shape) * size
    if not divisible(shape):  # a bound of dense layers: operators differ from model to model
        return int(width * (13 * hidden + 2 * (query + keys) + 4 * inner_size(shape)))
    rotated, values, attended = query + keys, keys, query
    kept = 2 * _norm_bytes(hidden, width) + width * (whole * hidden + rotated + values + attended)
    if shape.model_type.startswith("qwen3"):  # norms of queries and keys, which keep their input
        heads = shape.num_attention_heads + shape.num_key_value_heads
        kept += heads * _norm_bytes(size, width)
    if is_sparse(shape, number):
        # of each of its experts the input, gate and up, their product, the value, also weighted
        chosen = shape.num_experts_per_tok
        expert = width * (2 * hidden + 3 * shape.moe_intermediate_size) + FLOAT32 * hidden
        indices = INT64 * 2 + FLOAT32 * 2
        kept += width * hidden + FLOAT32 * shape.num_experts + chosen * (expert + indices)
        return int(kept)
    return int(kept + width * (whole * hidden + (2 + whole) * shape.intermediate_size))


def _norm_bytes(features: int, width: int) -> int:
    return width * features + FLOAT32
