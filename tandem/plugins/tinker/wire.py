"""Arrays in the protobuf messages of the `tinker` SDK. Knows no model and no HTTP."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tinker.proto import tinker_public_pb2 as pb

from tandem.api.session import Datum
from tandem.plugins.tinker.losses import Loss
from tandem.runtime.errors import UserError
from tandem.types import Array, Completion

DTYPES = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64}
STOPS = {"stop": pb.STOP_REASON_STOP, "length": pb.STOP_REASON_LENGTH}


def read_datum(message: Any, loss: Loss) -> tuple[Datum, Array]:
    """Read a datum; return it with a mask, bool [N], of the targets that are scored.

    The sequence is its model input and its last target. A target that is not the sequence's next
    token is of no loss, as in a padded prompt. Raises UserError for what is not offered.
    """
    if not all(chunk.HasField("encoded_text") for chunk in message.model_input):
        raise UserError("images and audio are not offered", where="model_input")
    chunks = [np.frombuffer(chunk.encoded_text.tokens, np.int32) for chunk in message.model_input]
    inputs = {name: array_of(name, tensor) for name, tensor in message.loss_fn_inputs.items()}
    unlike = set(inputs).symmetric_difference(loss.inputs)
    tokens = np.concatenate([*chunks, np.zeros(1, np.int64)])
    sizes = {name: array.shape for name, array in inputs.items()}
    if unlike or len(tokens) < 2 or set(sizes.values()) != {(len(tokens) - 1,)}:
        raise UserError(
            "the inputs of the loss do not fit",
            where="loss_fn_inputs",
            found=", ".join(f"{name} {list(size)}" for name, size in sizes.items()),
            expected=f"{', '.join(loss.inputs)}, each [{len(tokens) - 1}], of at least 1 token",
        )
    targets = inputs["target_tokens"]
    tokens[-1] = targets[-1]
    of_tokens = inputs["weights" if "weights" in inputs else "advantages"]
    scored = (targets == tokens[1:]) & (inputs[loss.mask] != 0 if loss.mask else True)
    lost = np.flatnonzero(~scored & (of_tokens != 0))
    if len(lost) or not scored.any():
        raise UserError(
            "a target with a weight or an advantage is not the next token",
            where=f"target_tokens[{lost[0] if len(lost) else 0}]",
            expected="the tokens of model_input, moved by one"
            + f", where {loss.mask} is not 0" * bool(loss.mask),
        )

    def aligned(array: Array) -> Array:
        return np.concatenate([np.zeros(1, np.float32), array.astype(np.float32)])

    logprobs = inputs.get("logprobs", np.zeros(len(targets), np.float32))
    datum = Datum(
        tokens=tokens,
        weights=aligned(scored),
        advantages=aligned(of_tokens),
        logprobs=aligned(logprobs),
    )
    return datum, scored


def array_of(name: str, tensor: Any) -> Array:
    """Read an array; name: for the UserError of a sparse one."""
    if not tensor.HasField("dense"):
        raise UserError("sparse tensors are not offered", where=name)
    return np.frombuffer(tensor.dense, DTYPES[tensor.dtype]).reshape(tuple(tensor.shape) or -1)


def forward_output(
    found: Sequence[Array], masks: Sequence[Array], metrics: Mapping[str, float]
) -> bytes:
    """Write the log-probs of the scored targets, and 0 for the others."""
    columns = [np.zeros(len(mask), np.float32) for mask in masks]
    for column, mask, logprobs in zip(columns, masks, found, strict=True):
        column[mask] = logprobs
    offsets = np.cumsum([0, *(column.nbytes for column in columns)])
    field = pb.BatchedTensor(
        data=b"".join(column.tobytes() for column in columns),
        offsets=offsets.astype(np.int64).tobytes(),
        dtype=pb.DTYPE_FLOAT32,
    )
    record = pb.ArrayRecord(fields={"logprobs": field}, num_datums=len(columns))
    message = pb.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics=metrics
    )
    return bytes(message.SerializeToString())


def sample_output(
    completions: Sequence[Completion], prompt_scores: Sequence[Any], first: int
) -> bytes:
    """Write completions of a prompt, and the scores of its tokens from the place `first` on, if
    there are any; the tokens before have NaN."""
    message = pb.SampleResponse()
    for one in completions:
        sequence = message.sequences.add(
            stop_reason=STOPS[one.stop_reason],
            tokens=one.tokens.astype(np.int32).tobytes(),
            logprobs=one.logprobs.astype(np.float32).tobytes(),
        )
        if one.top_tokens.size:
            _top(sequence.topk_sampled_logprobs, one.top_tokens, one.top_logprobs)
    if prompt_scores:
        tokens, logprobs = (
            np.concatenate([getattr(scores, name) for scores in prompt_scores])
            for name in ("top_tokens", "top_logprobs")
        )
        own = np.concatenate([[np.nan], *(scores.logprobs for scores in prompt_scores)])
        own[:first] = np.nan
        message.prompt_logprobs = own.astype(np.float32).tobytes()
        if tokens.size:
            none = np.full((1, tokens.shape[1]), -99999.0)  # the SDK's mark of no tokens
            logprobs = np.concatenate([none, logprobs])
            tokens = np.concatenate([np.zeros_like(none), tokens])
            tokens[:first], logprobs[:first] = 0, none
            _top(message.topk_prompt_logprobs, tokens, logprobs)
    return bytes(message.SerializeToString())


def _top(message: Any, tokens: Array, logprobs: Array) -> None:
    message.token_ids = tokens.astype(np.int32).tobytes()
    message.logprobs = logprobs.astype(np.float32).tobytes()
    message.length, message.k = tokens.shape
