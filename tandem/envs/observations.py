"""Checks of the chats and observations that a user's environment returns."""

import math
import re
from typing import Any

import numpy as np

from tandem.envs.calls import EnvironmentFailed
from tandem.runtime.image_parts import shows_images
from tandem.types import Observation

# half of a surrogate pair, which cannot be encoded
_HALF = re.compile("[\ud800-\udfff]")


def check_opening(chat: Any) -> None:
    """Raise EnvironmentFailed unless `reset` returned a chat."""
    if not _is_chat(chat):
        raise EnvironmentFailed(
            f"reset returned {_short(chat)}, expected a chat: messages with role and content"
        )


def check_observation(observation: Any) -> Observation:
    """Return the observation of `step`; raise EnvironmentFailed if no episode can go on with it."""
    if not isinstance(observation, Observation):
        raise EnvironmentFailed(f"step returned {_short(observation)}, expected an Observation")
    if not observation.done or observation.messages:
        messages: Any = observation.messages
        if not _is_chat(messages) or any(m["role"] == "assistant" for m in messages):
            found = _short(messages) if messages else "none"
            raise EnvironmentFailed(
                f"step returned messages {found}; expected some with role and content that are not "
                "the assistant's, or done"
            )
    parts = observation.parts
    if not isinstance(parts, dict) or not all(isinstance(n, str) and n != "env" for n in parts):
        raise EnvironmentFailed(
            "step returned parts that are no names with numbers ('env' is the reward's own)"
        )
    numbers = {**parts, "reward": observation.reward, "penalty": observation.penalty}
    for name, value in numbers.items():
        if not _is_number(value) or (name == "penalty" and value < 0):
            bound = " >= 0" * (name == "penalty")
            raise EnvironmentFailed(
                f"step returned {name} = {_short(value)}, expected a finite number{bound}"
            )
    return observation


def malformed_thinking(text: str) -> bool:
    """Tell whether <think> tags are not one pair in order; a prompt may have opened it, so a lone
    closing tag is well formed."""
    tags = re.findall(r"</?think>", text)
    return tags not in ([], ["</think>"], ["<think>", "</think>"])


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, int | float | np.number) and math.isfinite(value)
    except OverflowError:
        return False


def _is_chat(messages: Any) -> bool:
    return isinstance(messages, list | tuple) and bool(messages) and all(map(_is_message, messages))


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
        return False
    texts = list(message.values())
    if shows_images(message):
        texts = [value for name, value in message.items() if name != "content"]
        parts = [part if isinstance(part, dict) else {} for part in message["content"]]
        texts += [part.get("text", part.get("image")) for part in parts]
    return all(isinstance(text, str) and not _HALF.search(text) for text in texts)


def _short(value: Any) -> str:
    return ascii(f"{type(value).__name__} {str(value)[:80]}")
