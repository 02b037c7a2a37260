"""The JSON lines between Workers and a rollout worker.

    to a worker    {"start": {"model_path", "dtype", "splits", "tensor_parallel", "matmul",
                    "cache_bytes", "max_batch", "longest", "layout", "record_experts",
                    "release_cache", "trust_remote_code", "beat_s"}}
                   {"apply": 4, "from": {"transport", "names", "digests", "probe", ...}}   an
                    offer of weights/shared.py, with the descriptor of the weights beside it or not
                   {"request": 7, "key", "prompt", "params", "num_sampled", "resume_from",
                    "max_tokens_now"}
                   {"cancel": 7}
                   {"check": 4}        a completion of version 4 against the trainer's packed pass;
                    then, with "release_cache", an idle engine rests
    from a worker  {"alive": true}     a sign of life, as any line is, and whether it is at work
                   {"ready": true}     it has started, and waits for weights
                   {"applied": 4, "hash": "9f86...", "differ": []}   the weights that it runs now,
                    hashed, and names of tensors that are not as they were published
                   {"applied": 4, "failed": "..."}     it has not got them, and runs what it had
                   {"completion": 7, "identity", "tokens", "logprobs", ...}
                   {"cancelled": 7}
                   {"checked": 4, "gap": 0.0}          Engine.logprob_gap, or that to the probe
                   {"error": {"what", "where", "found", "expected", "next"}}   a UserError: it ends

Every request is answered by exactly one completion or one cancelled. Arrays travel as base64 of
their bytes, so a float32 keeps every bit, a NaN's included. Knows neither processes nor engines.
"""

import base64
from dataclasses import asdict

import numpy as np

from tandem.types import Array, Completion, Request, SamplingParams
from tandem.workers.channel import Message, ProtocolError


def request_message(number: int, request: Request) -> Message:
    assert request.mask is None, "a mask has its state in this process"
    return {
        "request": number,
        "key": request.key,
        "prompt": _encode_array(request.prompt, "<i8"),
        "params": asdict(request.params),
        "num_sampled": request.num_sampled,
        "max_tokens_now": request.max_tokens_now,
        "resume_from": None
        if request.resume_from is None
        else _completion_fields(request.resume_from),
    }


def read_request(message: Message) -> Request:
    params, resume_from = message["params"], message["resume_from"]
    lists = {"stop": tuple(params["stop"]), "stop_token_ids": tuple(params["stop_token_ids"])}
    return Request(
        key=message["key"],
        prompt=_decode_array(message["prompt"], "<i8"),
        params=SamplingParams(**{**params, **lists}),
        num_sampled=message["num_sampled"],
        max_tokens_now=message["max_tokens_now"],
        resume_from=None if resume_from is None else _read_completion_fields(resume_from),
    )


def completion_message(number: int, identity: str, completion: Completion) -> Message:
    """Encode a completion. identity: of its request, so that no answer is taken for another."""
    return {"completion": number, "identity": identity, **_completion_fields(completion)}


def read_completion(message: Message) -> Completion:
    """Decode a completion. Raises ProtocolError if it is malformed."""
    try:
        completion = _read_completion_fields(message)
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"not a completion: {type(error).__name__}: {error}") from None
    if not len(completion.tokens) == len(completion.logprobs) == len(completion.weight_versions):
        raise ProtocolError("a completion whose columns have different lengths")
    return completion


def _completion_fields(completion: Completion) -> Message:
    return {
        "tokens": _encode_array(completion.tokens, "<i8"),
        "logprobs": _encode_array(completion.logprobs, "<f4"),
        "weight_versions": _encode_array(completion.weight_versions, "<i4"),
        "text": completion.text,
        "stop_reason": completion.stop_reason,
        "top_shape": completion.top_tokens.shape,
        "top_tokens": _encode_array(completion.top_tokens, "<i8"),
        "top_logprobs": _encode_array(completion.top_logprobs, "<f4"),
        "experts_shape": completion.experts.shape,
        "experts": _encode_array(completion.experts, "<i2"),
    }


def _read_completion_fields(fields: Message) -> Completion:
    shape = tuple(fields["top_shape"])
    return Completion(
        tokens=_decode_array(fields["tokens"], "<i8"),
        logprobs=_decode_array(fields["logprobs"], "<f4"),
        weight_versions=_decode_array(fields["weight_versions"], "<i4"),
        text=str(fields["text"]),
        stop_reason=fields["stop_reason"],
        top_tokens=_decode_array(fields["top_tokens"], "<i8").reshape(shape),
        top_logprobs=_decode_array(fields["top_logprobs"], "<f4").reshape(shape),
        experts=_decode_array(fields["experts"], "<i2").reshape(tuple(fields["experts_shape"])),
    )


def _encode_array(array: Array, dtype: str) -> str:
    return base64.b64encode(array.astype(dtype).tobytes()).decode()


def _decode_array(text: str, dtype: str) -> Array:
    array = np.frombuffer(base64.b64decode(text, validate=True), dtype)
    return array.astype(array.dtype.newbyteorder("="))  # a copy that may be written
