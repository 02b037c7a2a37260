"""The JSON lines between Workers and a rollout worker.

    to a worker    {"start": {"model_path", "dtype", "splits", "tensor_parallel", "options",
                    "matmul", "threads", "cache_bytes", "max_batch", "longest", "layout",
                    "record_experts", "release_cache", "trust_remote_code", "beat_s"}}
                   {"apply": 4, "from": {"transport", "names", "digest", "digests", "probe",
                    ...}}   an offer of weights/shared.py, with the descriptor of the weights beside
                    it or not
                   {"request": 7, "is": {"key", "prompt", "params", ...}}   types.Request
                   {"cancel": 7}
                   {"check": 4}        a completion of version 4 against the trainer's packed pass;
                    then, with "release_cache", an idle engine rests
    from a worker  {"alive": true}     a sign of life, as any line is, and whether it is at work
                   {"ready": true}     it has started, and waits for weights
                   {"applied": 4, "hash": "9f86...", "differ": []}   the weights that it runs now,
                    hashed, and names of tensors that are not as they were published
                   {"applied": 4, "failed": "..."}     it has not got them, and runs what it had
                   {"completion": 7, "identity", "is": {"tokens", ...}}   types.Completion
                   {"cancelled": 7}
                   {"checked": 4, "gap": 0.0}          Engine.logprob_gap, or that to the probe
                   {"error": {"what", "where", "found", "expected", "next"}}   a UserError: it ends

Every request is answered by exactly one completion or one cancelled. Arrays travel as [dtype,
shape, base64 of their bytes], so a float32 keeps every bit, a NaN's included. Knows neither
processes nor engines.
"""

import base64
from typing import Any

import msgspec
import numpy as np

from tandem.types import Array, Completion, Request
from tandem.workers.channel import Message, ProtocolError


def request_message(number: int, request: Request) -> Message:
    assert request.mask is None, "a mask has its state in this process"
    return {"request": number, "is": msgspec.to_builtins(request, enc_hook=_encode_array)}


def read_request(message: Message) -> Request:
    return msgspec.convert(message["is"], Request, dec_hook=_decode_array)


def completion_message(number: int, identity: str, completion: Completion) -> Message:
    """Encode a completion. identity: of its request, so that no answer is taken for another."""
    fields = msgspec.to_builtins(completion, enc_hook=_encode_array)
    return {"completion": number, "identity": identity, "is": fields}


def read_completion(message: Message) -> Completion:
    """Decode a completion. Raises ProtocolError if it is malformed."""
    try:
        completion = msgspec.convert(message["is"], Completion, dec_hook=_decode_array)
    except (KeyError, msgspec.ValidationError) as error:
        raise ProtocolError(f"not a completion: {type(error).__name__}: {error}") from None
    if not len(completion.tokens) == len(completion.logprobs) == len(completion.weight_versions):
        raise ProtocolError("a completion whose columns have different lengths")
    return completion


def _encode_array(array: Array) -> list[Any]:
    return [array.dtype.str, array.shape, base64.b64encode(array.tobytes()).decode()]


def _decode_array(kind: type, value: Any) -> Array:
    dtype, shape, data = value
    return np.frombuffer(base64.b64decode(data, validate=True), dtype).reshape(shape).copy()
