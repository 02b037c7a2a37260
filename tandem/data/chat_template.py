"""Chat templates: a program of the model's directory, or the user's, that writes chats as text.

Rendered by Jinja in the sandbox that transformers makes for templates, so that the text is what its
apply_chat_template writes. Only the clock stands still and nothing is random: a prompt is the same
every time. Does not know tokenizers.
"""

import json
import traceback
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tandem.model.config_file import read_json
from tandem.runtime.errors import UserError
from tandem.types import Message, Tool

# Templates that print today's date (Llama 3.2, Mistral, SmolLM3) would give a resumed run other
# prompts on the next day. They get Llama's default day instead.
TODAY = datetime(2024, 7, 26)

TOOLS_TEXT = (  # as the templates of Hermes and Qwen have it
    "# Tools\n\nYou may call one or more functions. You are provided with function signatures "
    "within <tools></tools> XML tags:\n<tools>\n{}\n</tools>\n\nFor each function call, return a "
    "json object with function name and arguments within <tool_call></tool_call> XML tags:\n"
    '<tool_call>\n{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)


class ChatTemplate:
    """A compiled chat template; threads may share it. Raises UserError if it is no Jinja.

    name: of the model, for errors.
    """

    def __init__(self, source: str, name: str):
        from jinja2 import TemplateSyntaxError
        from transformers.utils.chat_template_utils import _compile_jinja_template

        self.source, self.where = source, f"chat template of {name}"
        sandbox = _compile_jinja_template("").environment.overlay()
        sandbox.filters = {name: f for name, f in sandbox.filters.items() if name != "random"}
        sandbox.globals = {name: g for name, g in sandbox.globals.items() if name != "lipsum"}
        sandbox.globals["strftime_now"] = TODAY.strftime
        try:
            self._template = sandbox.from_string(source)
            # copied for each chat, and a copy of Jinja's chain of dicts takes longer than all else
            self._template.globals = dict(self._template.globals)
        except TemplateSyntaxError as error:
            raise UserError(
                "the chat template is no valid Jinja",
                where=f"{self.where}, line {error.lineno}",
                found=str(error.message),
                next="mend that line",
            ) from None

    def render(
        self,
        chats: Sequence[Sequence[Message]],
        *,
        open_turn: bool,
        variables: Mapping[str, object],
        tools: Sequence[Tool] = (),
    ) -> list[str]:
        """Render every chat; open_turn: with the header of the assistant's turn; variables: what
        else the template may read. Raises UserError for the first chat that cannot be rendered."""
        # thoughts under any of their three names are found under the others
        from transformers.utils.chat_template_utils import _alias_reasoning_fields as alias

        own = {**variables, "tools": list(tools) or None, "add_generation_prompt": open_turn}
        texts = []
        for chat in chats:
            # a key without a value says nothing, but the content of a message with calls
            messages = [
                {
                    k: v
                    for k, v in m.items()
                    if v is not None or (k == "content" and "tool_calls" in m)
                }
                for m in chat
            ]
            try:
                if not messages:
                    raise ValueError("a chat without messages")
                texts.append(self._template.render(messages=alias(messages), **own))
            # A template is a program from someone else: it raises whatever its mistakes are.
            except Exception as error:
                frames = traceback.extract_tb(error.__traceback__)
                lines = [f" (line {f.lineno})" for f in frames if f.filename == "<template>"]
                found = f"{type(error).__name__}: {error}"[:1000] + "".join(lines[-1:])
                raise UserError(
                    "the chat template refuses a chat",
                    where=self.where,
                    found=f"{found}; roles {', '.join(message['role'] for message in chat)}",
                    expected="a chat that this model's template can write",
                    next="change the chat, or the template",
                ) from None
        return texts


def read_template(file: str) -> str:
    """Read the chat template that a user names; "" without one. Raises UserError."""
    if not file:
        return ""
    source, found = "", "an empty file"
    try:
        source = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        found = str(error)
    if not source.strip():
        raise UserError(
            "the chat template cannot be read",
            where=f"data.chat_template = {file}",
            found=found,
            expected="a Jinja file, as the chat_template.jinja of a chat model",
            next="name another file, or drop data.chat_template if the tokenizer has a template",
        )
    return source


def model_template(model_path: str, tokenizer: Any) -> str:
    """Return the chat template of a model; "" without one. Older models of images have it in a file
    of their processor."""
    try:
        return str(tokenizer.get_chat_template())
    except ValueError:
        found = (read_json(model_path, "chat_template.json") or {}).get("chat_template")
        return found if isinstance(found, str) else ""


def with_tools(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Describe the tools in the chat's system message, in Hermes' way, for a template without a
    place for them."""
    text = TOOLS_TEXT.format("\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if messages and messages[0]["role"] == "system":
        text, messages = f"{messages[0]['content']}\n\n{text}", messages[1:]
    return [{"role": "system", "content": text}, *messages]


def with_calls_read(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Return the messages with the calls in the model's texts as `tool_calls`, as chat templates
    want them, and the ids of these in the results behind. A text that `split_calls` leaves whole
    stays as it is."""
    from tandem.model.tool_calls import split_calls

    read: list[Message] = []
    ids: list[str] = []  # of calls without a result
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            content, calls = split_calls(message["content"], tools)
            ids = [f"call{place:02}{number:03}" for number in range(len(calls))]
            written = [
                {
                    "id": id_,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for id_, call in zip(ids, calls, strict=True)
            ]
            message = message | ({"content": content, "tool_calls": written} if calls else {})
        elif message["role"] == "tool" and ids:
            message = message | {"tool_call_id": ids.pop(0)}
        read.append(message)
    return read


def with_calls(message: Message) -> Message:
    """Write the message's `tool_calls`, if any, into its content, as Hermes models do."""
    if "tool_calls" not in message:
        return message
    from tandem.model.tool_calls import Call, write_calls

    functions = [call["function"] for call in message["tool_calls"]]
    calls = [Call(name=function["name"], arguments=function["arguments"]) for function in functions]
    content = "\n".join(filter(None, [message["content"], write_calls(calls)]))
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return rest | {"content": content}
