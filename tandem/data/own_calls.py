"""The round trip of tool calls through a model's chat template: are its own calls read?

A turn with calls is rendered, cut out as the engine would have sampled it, decoded and read. What
comes back must be what was written, byte for byte.
"""

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from tandem.data.renderer import ChatRenderer, called, first_difference
from tandem.model.tool_calls import BadCall, read_calls, split_calls
from tandem.runtime.errors import UserError
from tandem.types import Tool

logger = logging.getLogger(__name__)

Arguments = dict[str, Any]

NAME = "look_up"
TYPES = {"text": "string", "count": "integer", "exact": "boolean", "fields": "object"}
TOOL: Tool = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Look something up.",
        "parameters": {
            "type": "object",
            "properties": {n: {"type": t, "description": n} for n, t in TYPES.items()},
            "required": ["text"],
        },
    },
}
EXAMPLE: Arguments = {"text": 'a "b"\n<c>', "count": 7, "exact": True, "fields": {"d": [1, "e"]}}


@lru_cache(maxsize=8)
def warn_of_unread_calls(renderer: Any) -> None:
    """Say once if tool calls in the own form of a renderer's model are not read."""
    if isinstance(renderer, ChatRenderer) and (reason := unread_calls(renderer)):
        logger.warning(
            "tool calls in this model's own form are not read (%s; found: %s): show the model "
            "another form in data.chat_template",
            renderer.template.where,
            reason,
        )


def unread_calls(renderer: ChatRenderer, calls: Sequence[Arguments] = (EXAMPLE,)) -> str:
    """Say why calls in the template's own form are not read; empty if they are, or if the template
    writes none."""
    try:
        text = sampled_turn(renderer, calls)
    except UserError:
        return ""
    _, read = split_calls(text, [TOOL])
    if NAME not in text or [call.arguments for call in read] == list(calls):
        return ""
    tried = read_calls(text, tools=(NAME,)).calls
    reasons = [call.reason for call in tried if isinstance(call, BadCall)]
    return reasons[0] if reasons else "other calls are read than were written" if tried else "none"


def sampled_turn(renderer: ChatRenderer, calls: Sequence[Arguments]) -> str:
    """Return the text that an engine would have of a turn with these calls. Raises UserError if
    the template refuses them."""
    question, turn = called([(NAME, arguments) for arguments in calls])
    [prompt] = renderer.prompts([[question]], [TOOL])
    [whole] = renderer.chats([[question, turn]], [TOOL])
    tokens = whole[first_difference(prompt, whole) :]
    ends = np.flatnonzero(np.isin(tokens, renderer.stop_token_ids))
    return renderer.decode(tokens[: ends[-1]] if len(ends) else tokens)
