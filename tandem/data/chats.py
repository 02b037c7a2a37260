"""Rows of chats for supervised fine-tuning: read_rows(path, parse_chat, key="sft.train").

A row holds `messages`, or a `prompt` (text or messages) and a `response`; or it follows the data
sets of TRL, ShareGPT, Alpaca or xLAM (docs/guide/data.md). Does not know tokens or chat templates:
renderer.py decides what carries loss.
"""

from tandem.data.messages import (
    chat_messages,
    prompt_messages,
    require_user_first,
    tool_calls,
    with_images,
)
from tandem.data.prompt_columns import with_opening
from tandem.data.readers import Row, RowError, column, show
from tandem.types import Message

FITS = 'write a row as {"prompt": "1 + 1 =", "response": "2"}'


def parse_chat(row: Row) -> tuple[Message, ...]:
    """Return the row's chat, which ends with the assistant's message. Raises RowError."""
    return with_images(_chat(row), row)


def _chat(row: Row) -> tuple[Message, ...]:
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
            column(row, "messages", rename="rename {} to messages", otherwise=FITS)
        prompt = column(row, "prompt", rename="rename {} to prompt")
        answer = "completion" if row.values.get("completion") is not None else "response"
    messages = with_opening(prompt_messages(prompt, field="prompt"), row)
    response = column(row, answer, rename="rename {} to response")
    if isinstance(response, list):
        return _whole_chat((*messages, *chat_messages(response, field=answer)), field=answer)
    if not isinstance(response, str) or not response:
        raise RowError(
            "empty text" if response == "" else show(response), "the assistant's text", field=answer
        )
    return (*messages, {"role": "assistant", "content": response})


def _whole_chat(messages: tuple[Message, ...], *, field: str) -> tuple[Message, ...]:
    last = messages[-1]["role"]
    if last != "assistant":
        found = f"a last message from {last!r}"
        raise RowError(found, "a chat that ends with the assistant's message", field=field)
    if all(message.get("weight") == 0 for message in messages if message["role"] == "assistant"):
        raise RowError("weight 0 in every turn", "a turn of another weight", field=field)
    require_user_first(messages, field=field)
    return messages
