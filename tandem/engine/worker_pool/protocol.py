"""The JSON lines between Workers and a rollout worker.

    to a worker    {"start": {"model_path", "cache_bytes", "max_batch", "layout", "beat_s"}}
                   {"apply": 4}                       with the descriptor of the weights of version 4 beside it
                   {"request": 7, "key", "prompt", "params", "drawn", "begun", "pause_after"}
                   {"cancel": 7}
                   {"check": 4}                       a completion of version 4 against the trainer's packed pass
    from a worker  {"alive": true}                    a sign of life, and whether it is at something; any other line is one too
                   {"ready": true}                    it has started, and waits for weights
                   {"applied": 4, "hash": "9f86..."}  what it runs now, hashed
                   {"completion": 7, "identity", "tokens", "logprobs", ...}
                   {"cancelled": 7}
                   {"checked": 4, "gap": 0.0}         Engine.logprob_gap
                   {"error": {"what", "where", "found", "expected", "next"}}   a UserError: it ends

Every request is answered by exactly one completion or one cancelled. Arrays travel as base64 of
their bytes, so a float32 keeps every bit, a NaN's included. Knows no process and no engine.
"""

import base64
import hashlib
import json
from dataclasses import asdict
from typing import Any

import numpy as np

from tandem.runtime.errors import UserError
from tandem.types import Array, Completion, Request, SamplingParams

LINE_BYTES = 256 * 2**20  # no line is longer: a completion of a million tokens has some 20 MB
Message = dict[str, Any]


class Garbage(ValueError):
    """A line that is no message."""


def encode(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


def decode(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise Garbage(f"not a message: {line[:60]!r}")
    return message


def request_message(number: int, request: Request) -> Message:
    return {
        "request": number,
        "key": request.key,
        "prompt": _packed(request.prompt, "<i8"),
        "params": asdict(request.params),
        "drawn": request.drawn,
        "pause_after": request.max_tokens_now,
        "begun": None if request.begun is None else _completion_fields(request.begun),
    }


def read_request(message: Message) -> Request:
    params, begun = message["params"], message["begun"]
    lists = {"stop": tuple(params["stop"]), "stop_token_ids": tuple(params["stop_token_ids"])}
    return Request(
        key=message["key"],
        prompt=_unpacked(message["prompt"], "<i8"),
        params=SamplingParams(**{**params, **lists}),
        drawn=message["drawn"],
        max_tokens_now=message["pause_after"],
        begun=None if begun is None else _read_fields(begun),
    )


def completion_message(number: int, identity: str, completion: Completion) -> Message:
    """identity: of the request that the completion was made for, so that no answer is taken for
    another's."""
    return {"completion": number, "identity": identity, **_completion_fields(completion)}


def read_completion(message: Message) -> Completion:
    """Raises Garbage where it is none."""
    try:
        completion = _read_fields(message)
    except (KeyError, TypeError, ValueError) as error:
        raise Garbage(f"not a completion: {type(error).__name__}: {error}") from None
    if not len(completion.tokens) == len(completion.logprobs) == len(completion.weight_versions):
        raise Garbage("a completion whose columns have different lengths")
    return completion


def identity_of(request: Request) -> str:
    """Hex digest of what is sampled from and where its draws are: prompt, key, and what had
    begun."""
    begun = np.zeros(0, np.int64) if request.begun is None else request.begun.tokens
    digest = hashlib.sha256(
        f"{request.key} {request.drawn} {len(request.prompt)} {len(begun)} ".encode()
    )
    digest.update(request.prompt.astype("<i8").tobytes())
    digest.update(begun.astype("<i8").tobytes())
    return digest.hexdigest()


def error_message(error: UserError) -> Message:
    return {
        "error": {
            "what": error.what,
            "where": error.where,
            "found": error.found,
            "expected": error.expected,
            "next": error.next,
        }
    }


def read_error(message: Message) -> UserError:
    fields = {name: str(value) for name, value in message["error"].items()}
    return UserError(fields.pop("what"), **fields)


def _completion_fields(completion: Completion) -> Message:
    return {
        "tokens": _packed(completion.tokens, "<i8"),
        "logprobs": _packed(completion.logprobs, "<f4"),
        "weight_versions": _packed(completion.weight_versions, "<i4"),
        "text": completion.text,
        "stop_reason": completion.stop_reason,
        "top_shape": completion.top_tokens.shape,
        "top_tokens": _packed(completion.top_tokens, "<i8"),
        "top_logprobs": _packed(completion.top_logprobs, "<f4"),
    }


def _read_fields(fields: Message) -> Completion:
    shape = tuple(fields["top_shape"])
    return Completion(
        tokens=_unpacked(fields["tokens"], "<i8"),
        logprobs=_unpacked(fields["logprobs"], "<f4"),
        weight_versions=_unpacked(fields["weight_versions"], "<i4"),
        text=str(fields["text"]),
        stop_reason=str(fields["stop_reason"]),
        top_tokens=_unpacked(fields["top_tokens"], "<i8").reshape(shape),
        top_logprobs=_unpacked(fields["top_logprobs"], "<f4").reshape(shape),
    )


def _packed(array: Array, dtype: str) -> str:
    return base64.b64encode(array.astype(dtype).tobytes()).decode()


def _unpacked(text: str, dtype: str) -> Array:
    array = np.frombuffer(base64.b64decode(text, validate=True), dtype)
    return array.astype(array.dtype.newbyteorder("="))  # a copy that may be written
