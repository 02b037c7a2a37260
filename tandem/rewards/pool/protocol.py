"""The JSON lines between RewardPool and its workers, as RewardPool writes and reads them.

    to a worker    {"id": 7, "problem": {"uid", "messages", "answer", ...}, "attempt": {"text", "messages", ...}}
    from a worker  {"id": -1, "ready": true}
                   {"id": -1, "failed": "ModuleNotFoundError: ...", "where": "rewards.py:3"}
                   {"id": 7, "at": 1}           the second function is running (for id -1: is being loaded), and so on
                   {"id": 7, "loading": true}   Math-Verify is being imported (false: it is); the clock may allow for it
                   {"id": 7, "reward": 1.0, "parts": {"answer": 1.0}, "error": "", "kind": "", "last": false}

A text travels as its last TEXT_CHARS characters, and so does each message of an attempt; of its
tokens the last TOKENS. Metadata arrives as JSON has it (tuples are lists, keys are strings). It
knows no process, and believes nothing that a worker wrote.
"""

import json
import math
from typing import Any

import numpy as np

from tandem.types import Attempt, Problem, Score

HELLO = -1  # the id of what a worker says before its first item
TEXT_CHARS = 500_000
TOKENS = 128_000
REQUEST_BYTES = 8 * 2**20
LINE_BYTES = 2**20  # no answer is longer
_PROBLEM = ("uid", "messages", "answer", "category", "metadata", "conversational")


def encode(index: int, problem: Problem, attempt: Attempt) -> bytes:
    """One request line. Raises TypeError, ValueError or RecursionError if the metadata is not JSON,
    or is huge."""
    request = {
        "id": index,
        "problem": {name: getattr(problem, name) for name in _PROBLEM},
        "attempt": _brief(attempt),
    }
    # as it is, not escaped: half the time and bytes; surrogates that UTF-8 cannot write pass
    line = (
        json.dumps(request, default=_plain, ensure_ascii=False).encode("utf-8", "surrogatepass")
        + b"\n"
    )
    if len(line) > REQUEST_BYTES:
        raise ValueError(f"it has {len(line)} bytes, more than {REQUEST_BYTES}")
    return line


def _brief(attempt: Attempt) -> dict[str, Any]:
    """The attempt, cut to size. A single turn's only message is the text again: the worker makes it
    (see worker.py)."""
    lone = len(attempt.messages) == 1 and attempt.messages[0] == {
        "role": "assistant",
        "content": attempt.text,
    }
    messages = () if lone else attempt.messages
    return {
        "text": attempt.text[-TEXT_CHARS:],
        "messages": [
            {key: value[-TEXT_CHARS:] for key, value in message.items()} for message in messages
        ],
        "stop_reason": attempt.stop_reason,
        "tokens": attempt.tokens[-TOKENS:],
        "given": attempt.given,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, (np.generic, np.ndarray)):  # as Parquet gives them
        return value.tolist()
    raise TypeError(f"found a {type(value).__name__} in it")


def decode(line: bytes) -> dict[str, Any]:
    """A worker's message; empty if it is none."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}


def read_score(message: dict[str, Any]) -> tuple[Score | None, str]:
    """(score, kind of failure) of an answer, and (None, "") if it is none: hostile code may have
    written it."""
    match message:
        case {
            "reward": float(reward),
            "parts": dict(parts),
            "error": str(error),
            "kind": str(kind),
            "last": bool(),
        }:
            finite = all(
                isinstance(value, float) and math.isfinite(value)
                for value in (reward, *parts.values())
            )
            if finite and kind in ("", "exception", "bad_value"):
                return Score(reward=reward, parts=parts, error=error), kind
    return None, ""
