"""Rows of fixed data: read_rows(path, parse_chat, key="sft.train"), parse_preference.

A row of chats holds `messages`, or a `prompt` (text or messages) and a `response`; or it follows
the data sets of TRL, ShareGPT, Alpaca or xLAM. A row of preferences holds `prompt`, `chosen` and
`rejected`, or `chosen` and `rejected` as whole chats whose common start is the prompt
(docs/guide/data.md). Beside them are `tools`, JSON schemas, and `chat_template_kwargs`, further
variables of the chat template. Does not know tokens, what a template makes of these, or losses.
"""

from dataclasses import dataclass, field
from typing import Any

from tandem.data.messages import (
    chat_messages,
    parsed,
    prompt_messages,
    require_user_first,
    tool_calls,
    with_images,
    without_nulls,
)
from tandem.data.prompt_columns import MEDIA, RENAME, refuse_columns, with_opening
from tandem.data.readers import Row, RowError, column, show
from tandem.runtime.image_parts import image_column
from tandem.types import Message, Tool

Messages = tuple[Message, ...]

FITS_CHAT = 'write a row as {"prompt": "1 + 1 =", "response": "2"}'
FITS_PAIR = 'write a row as {"prompt": "1 + 1 =", "chosen": "2", "rejected": "3"}'

RESERVED = ("messages", "tools", "add_generation_prompt", "chat_template")  # variables of our own
# refused in rows of chats and preferences: name -> what to do
OF_CHATS = {
    "functions": 'rename it to tools, a list of {"type": "function", "function": {...}}',
    "documents": "write them into a message",
    **MEDIA,
}


def parse_chat(row: Row) -> Messages:
    """Return the row's chat, which ends with the assistant's message. Raises RowError."""
    return with_images(_chat(row), row)


def _chat(row: Row) -> Messages:
    # `messages` wins over `prompt`: data sets with both keep the whole chat in `messages`.
    for name in ("messages", "conversations"):
        if row.values.get(name) is not None:
            chat = with_opening(chat_messages(row.values[name], field=name, images=True), row)
            return _whole_chat(chat, field=name)
    if row.values.keys() >= {"query", "answers"}:  # xLAM's
        query = with_opening(prompt_messages(row.values["query"], field="query"), row)
        calls = tool_calls(row.values["answers"], field="answers")
        return (*query, {"role": "assistant", "content": "", "tool_calls": calls})
    if row.values.keys() >= {"instruction", "output"}:
        # Alpaca's prompt: the instruction, an empty line, and its input
        pair, answer = [row.values["instruction"], row.values.get("input") or ""], "output"
        if not all(isinstance(part, str) for part in pair):
            raise RowError(show(pair), "text", field="instruction and input")
        prompt = "\n\n".join(part for part in pair if part)
    else:
        if "prompt" not in row.values:
            column(row, {"messages": "rename {} to messages"}, otherwise=FITS_CHAT)
        prompt = column(row, {"prompt": "rename {} to prompt"})
        answer = "completion" if row.values.get("completion") is not None else "response"
    messages = with_opening(prompt_messages(prompt, field="prompt"), row)
    response = column(row, {answer: "rename {} to response"})
    if isinstance(response, list):
        return _whole_chat((*messages, *chat_messages(response, field=answer)), field=answer)
    if not isinstance(response, str) or not response:
        raise RowError(
            "empty text" if response == "" else show(response), "the assistant's text", field=answer
        )
    return (*messages, {"role": "assistant", "content": response})


def _whole_chat(messages: Messages, *, field: str) -> Messages:
    last = messages[-1]["role"]
    if last != "assistant":
        found = f"a last message from {last!r}"
        raise RowError(found, "a chat that ends with the assistant's message", field=field)
    if all(message.get("weight") == 0 for message in messages if message["role"] == "assistant"):
        raise RowError("weight 0 in every turn", "a turn of another weight", field=field)
    require_user_first(messages, field=field)
    return messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """A prompt and two continuations that differ; prompt + chosen and prompt + rejected are whole
    chats.

    Example: Preference(prompt=({"role": "user", "content": "1 + 1 ="},), chosen=({"role":
    "assistant", "content": "2"},), rejected=({"role": "assistant", "content": "3"},))
    """

    prompt: Messages  # holds a user's message, and ends with a message that is not the assistant's
    chosen: Messages  # starts and ends with the assistant's messages; mostly one
    rejected: Messages  # likewise


def parse_preference(row: Row) -> Preference:
    """Return the row's preference. Raises RowError."""
    chosen = column(row, {"chosen": "rename {} to chosen"}, otherwise=FITS_PAIR)
    rejected = column(row, {"rejected": "rename {} to rejected"}, otherwise=FITS_PAIR)
    if name := image_column(row.values):
        raise RowError("images", "a pair of texts", field=name, next="leave the column out")
    if row.values.get("prompt") is None and not isinstance(chosen, str):
        chats = _messages(chosen, field="chosen"), _messages(rejected, field="rejected")
        prompt = _common_prompt(*chats)
        chosen, rejected = (chat[len(prompt) :] for chat in chats)
    else:
        prompt = column(row, {"prompt": "rename {} to prompt"})
        prompt = prompt_messages(prompt, field="prompt", images=False, tools=True)
        require_user_first((*prompt, {"role": "assistant"}), field="prompt")
        chosen = _continuation(chosen, prompt, field="chosen")
        rejected = _continuation(rejected, prompt, field="rejected")
    if chosen == rejected:
        raise RowError(
            "the same as chosen",
            "another continuation than chosen",
            field="rejected",
            next="remove the row",
        )
    return Preference(prompt=with_opening(prompt, row), chosen=chosen, rejected=rejected)


def _continuation(value: Any, prompt: Messages, *, field: str) -> Messages:
    """Read the continuation of the prompt: the assistant's text, or messages, which may begin with
    the prompt."""
    if isinstance(value, str):
        value = [{"role": "assistant", "content": value}]
    if not isinstance(value, list):
        expected = "the assistant's text, or a list of messages {role, content}"
        raise RowError(show(value), expected, field=field)
    messages = _messages(value, field=field)
    if messages[: len(prompt)] == prompt:
        messages = messages[len(prompt) :]
    if messages[0]["role"] != "assistant":
        found = f"a first message from {messages[0]['role']!r} that is not the prompt's"
        expected = "the assistant's message, or a whole chat that starts with the prompt"
        raise RowError(found, expected, field=field)
    return messages


def _messages(value: Any, *, field: str) -> Messages:
    """Read messages that end with a text of the assistant."""
    messages = chat_messages(value, field=field)
    if messages[-1]["role"] != "assistant":
        found = f"a last message from {messages[-1]['role']!r}"
        raise RowError(found, "messages that end with the assistant's", field=field)
    if not (messages[-1]["content"].strip() or "tool_calls" in messages[-1]):
        raise RowError("an empty last message", "a message with text", field=field)
    return messages


def _common_prompt(chosen: Messages, rejected: Messages) -> Messages:
    """Return the longest common start of two chats that the assistant continues in both."""
    shorter = min(len(chosen), len(rejected))
    same = next((i for i in range(shorter) if chosen[i] != rejected[i]), shorter)
    starts = [
        i
        for i in range(1, min(same + 1, shorter))
        if _answered(chosen, i) and _answered(rejected, i)
    ]
    if not starts:
        place = min(same, shorter - 1)
        first, second = (
            f"{show(chat[place]['content'])} from {chat[place]['role']!r}"
            for chat in (chosen, rejected)
        )
        raise RowError(
            f"no common prompt: message {place + 1} is {first} in chosen, {second} in rejected",
            "two chats with the same messages up to one of the assistant's",
            field="rejected",
            next="name the prompt in a column prompt, or remove the row",
        )
    require_user_first(chosen, field="chosen")
    return chosen[: starts[-1]]


def _answered(chat: Messages, i: int) -> bool:
    return chat[i]["role"] == "assistant" != chat[i - 1]["role"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateInputs:
    """Tools and variables that a row gives the chat template beside its messages.

    Example: TemplateInputs(tools=[{"type": "function", "function": {"name": "add"}}],
    variables={"enable_thinking": False})
    """

    tools: list[Tool] = field(default_factory=list)
    variables: dict[str, Any] = field(default_factory=dict)


NOTHING = TemplateInputs()


def template_inputs(row: Row) -> TemplateInputs:
    """Return the tools and variables in a row of a chat or preference. Raises RowError."""
    refuse_columns(row, OF_CHATS)
    tools = _given(row, "tools", [], "a list of JSON schemas of functions")
    variables = _given(row, "chat_template_kwargs", {}, "an object, the template's variables")
    if not all(isinstance(tool, dict) for tool in tools):
        raise RowError(show(tools[0]), "JSON schemas of functions", field="tools")
    tools = [
        tool if "function" in tool else {"type": "function", "function": tool}
        for tool in without_nulls(tools)
    ]
    if reserved := [name for name in RESERVED if name in variables]:
        raise RowError(show(reserved[0]), "other variables than this", field="chat_template_kwargs")
    return TemplateInputs(tools=tools, variables=variables) if tools or variables else NOTHING


def _given(row: Row, name: str, default: Any, expected: str) -> Any:
    """Return a column's value, or what its JSON says."""
    value = parsed(row.values.get(name)) or default
    if type(value) is not type(default):
        raise RowError(show(value), expected, field=name, next=RENAME)
    return value
