"""Columns that change what a model reads beside the prompt: rendered, or refused by name.

    system (system_prompt)   the system message
    history                  pairs of the user's and the assistant's texts before the prompt

In rows of problems the environment shows the tools, so a column of them is refused; those of chats
are read in plugins/offline/rows.py. Does not know tokens.
"""

from collections.abc import Collection, Mapping
from typing import Any

from tandem.data.readers import Row, RowError, show
from tandem.types import Message

Messages = tuple[Message, ...]

EMPTY: tuple[Any, ...] = (None, "", [], {}, "[]", "{}")  # values that say nothing

RENAME = "rename the column if it is something else"
MEDIA = dict.fromkeys(("videos", "audios"), "leave the column out: of media only images are read")
# refused in rows of problems: name -> what to do
OF_PROBLEMS = {
    "tools": "leave the column out, or rename it if a reward reads it; the tools that a model is "
    "shown are those of env.name",
    "chat_template_kwargs": "leave the column out, and set the variables in data.chat_template",
    **MEDIA,
}


def with_opening(messages: Messages, row: Row, used: Collection[str] = ()) -> Messages:
    """Put the row's history and its system message before its messages. used: columns that have
    another meaning. Raises RowError."""
    for name in ("history", "system", "system_prompt"):
        value = row.values.get(name)
        if value in EMPTY or name in used:
            continue
        if name == "history":
            messages = _with_history(messages, value)
            continue
        if not isinstance(value, str):
            raise RowError(show(value), "a system message, text", field=name, next=RENAME)
        own = [message["content"] for message in messages if message["role"] == "system"]
        if own and own[0] != value:
            raise RowError(
                f"{show(value)}, and {show(own[0])} in the chat",
                "one system message",
                field=name,
                next=f"leave out the column {name}, or the system message of the chat",
            )
        messages = messages if own else ({"role": "system", "content": value}, *messages)
    return messages


def _with_history(messages: Messages, pairs: Any) -> Messages:
    is_pairs = isinstance(pairs, list) and all(
        isinstance(pair, list) and list(map(type, pair)) == [str, str] for pair in pairs
    )
    if not is_pairs or [m["role"] for m in messages if m["role"] != "system"] != ["user"]:
        raise RowError(
            "a chat of several messages" if is_pairs else show(pairs),
            "pairs of text, [user, assistant], and a prompt of one message",
            field="history",
            next="write the whole chat as messages, and leave the column history out; " + RENAME,
        )
    roles = ("user", "assistant")
    earlier = [
        {"role": r, "content": t} for pair in pairs for r, t in zip(roles, pair, strict=True)
    ]
    return (*messages[:-1], *earlier, messages[-1])


def refuse_columns(row: Row, refused: Mapping[str, str], used: Collection[str] = ()) -> None:
    """Raise RowError for a column that would be left out. refused: name -> what to do; used:
    columns that have another meaning."""
    for name, advice in refused.items():
        if row.values.get(name) not in EMPTY and name not in used:
            raise RowError(
                show(row.values[name]),
                "no such column: the model would not read it",
                field=name,
                next=advice,
            )
