"""The JSON lines between RewardPool and its workers (workers/serve.py has those of all pools).

    start          {"functions", "weights", "options", "memory_mb"}
    to a worker    {"id": 7, "problem": {"uid", ...}, "attempt": {"text", "messages", ...}}
    from a worker  {"id": 7, "at": 1}          the second function runs now
                   {"id": 7, "reward": 1.0, "parts": {"answer": 1.0}, "error": "", "kind": "",
                    "last": false}

A text travels as its last MAX_CHARS characters, and so does each message of an attempt; of its
tokens the last MAX_TOKENS. Metadata arrives as JSON has it (tuples are lists, keys are strings).
Does not trust a worker's lines.
"""

import json
import math
from typing import Any

import numpy as np

from tandem.types import Attempt, Problem, Score
from tandem.workers.channel import Message, ProtocolError

Scoring = tuple[Problem, Attempt]
MAX_CHARS = 500_000
MAX_TOKENS = 128_000
MAX_REQUEST_BYTES = 8 * 2**20
_PROBLEM = ("uid", "messages", "answer", "category", "metadata", "conversational")


def request_line(index: int, problem: Problem, attempt: Attempt) -> bytes:
    """Encode one request. Raises as `encode_request`."""
    # A single message that repeats the text is left out; the worker makes it again.
    repeated = [{"role": "assistant", "content": attempt.text}]
    messages = () if list(attempt.messages) == repeated else attempt.messages
    cut = {
        "text": attempt.text[-MAX_CHARS:],
        "messages": [
            {key: value[-MAX_CHARS:] for key, value in message.items()} for message in messages
        ],
        "stop_reason": attempt.stop_reason,
        "tokens": attempt.tokens[-MAX_TOKENS:],
        "env_rewards": attempt.env_rewards,
    }
    return encode_request({"id": index, "problem": problem_fields(problem), "attempt": cut})


def problem_fields(problem: Problem) -> Message:
    return {name: getattr(problem, name) for name in _PROBLEM}


def read_problem(fields: Message) -> Problem:
    return Problem(**{**fields, "messages": tuple(fields["messages"])})


def encode_request(request: Message) -> bytes:
    """Encode a request of a worker. Raises TypeError, ValueError or RecursionError if a problem's
    metadata is not JSON, or is huge."""
    # not escaped: half the time and bytes. "surrogatepass" for characters that UTF-8 cannot write
    text = json.dumps(request, default=_numpy_value, ensure_ascii=False)
    line = text.encode("utf-8", "surrogatepass") + b"\n"
    if len(line) > MAX_REQUEST_BYTES:
        raise ValueError(f"it has {len(line)} bytes, more than {MAX_REQUEST_BYTES}")
    return line


def _numpy_value(value: Any) -> Any:
    if isinstance(value, (np.generic, np.ndarray)):  # as Parquet gives them
        return value.tolist()
    raise TypeError(f"found a {type(value).__name__} in it")


def read_request(request: Message) -> Scoring:
    """Return what a request asks to score."""
    attempt = request["attempt"]
    # request_line left out a single message that repeats the text
    messages = attempt.get("messages") or [{"role": "assistant", "content": attempt["text"]}]
    return (
        read_problem(request["problem"]),
        Attempt(**{**attempt, "messages": tuple(messages), "tokens": tuple(attempt["tokens"])}),
    )


def read_score(message: Message) -> tuple[Score, str, bool]:
    """Return (score, kind of failure, whether the worker ends now) of an answer. Raises
    ProtocolError if it is malformed, as hostile code may have written it."""
    match message:
        case {
            "reward": float(reward),
            "parts": dict(parts),
            "error": str(error),
            "kind": "" | "exception" | "bad_value" as kind,
            "last": bool(last),
        } if all(
            isinstance(value, float) and math.isfinite(value) for value in (reward, *parts.values())
        ):
            return Score(reward=reward, parts=parts, error=error), kind, last
    raise ProtocolError(f"not an answer: {str(message)[:200]}")
