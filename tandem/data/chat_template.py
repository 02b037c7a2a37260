"""Chat templates, rendered in a process whose memory and time the kernel bounds.

A template is a program from someone else, and the chats come from anyone. Jinja's sandbox keeps it
from Python; it does not keep `'a'.ljust(10**9)` from the memory, nor loops in loops from the
processor. Here a rendering that takes too much ends its process (template_process.py), and the run
goes on with one error. Does not know tokenizers.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tandem.model.config_file import read_json
from tandem.model.tool_calls import Call, write_calls
from tandem.runtime.errors import UserError
from tandem.types import Message, Tool

LONGEST_TEXT = 4 << 20  # characters of one rendered chat
MEMORY_MIB = 512  # address space of the process
CPU_S = 2.0  # for one chat; ordinary templates take less than a millisecond
IDLE = 2  # processes kept: of the server's small and large requests, or of rollouts and evaluation
BATCH = 1 << 20  # characters of JSON that are sent together: many chats, or one long one

TOOLS_TEXT = (  # as the templates of Hermes and Qwen have it
    "# Tools\n\nYou may call one or more functions. You are provided with function signatures "
    "within <tools></tools> XML tags:\n<tools>\n{}\n</tools>\n\nFor each function call, return a "
    "json object with function name and arguments within <tool_call></tool_call> XML tags:\n"
    '<tool_call>\n{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)

_PROCESS = Path(__file__).with_name("template_process.py")
_LIMITS = (MEMORY_MIB << 20, CPU_S, LONGEST_TEXT)
# of this process, for the one that renders: no keys or tokens
_ENVIRONMENT = (
    "PATH",
    "HOME",
    "LANG",
    "PYTHONPATH",
    "PYTHONHOME",
    "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
)
_ADVICE = "shorten the chat, or see what the template repeats"


class ChatTemplate:
    """A chat template and the processes that render it. A thread that renders has a process of its
    own; IDLE of them are kept for the next ones.

    name: of the model, for errors.
    """

    def __init__(self, source: str, name: str):
        self.source, self.where = source, f"chat template of {name}"
        self._lock = threading.Lock()
        self._idle: list[_TemplateProcess] = []

    def render(
        self,
        chats: Sequence[Sequence[Message]],
        *,
        open_turn: bool,
        variables: Mapping[str, object],
        tools: Sequence[Tool] = (),
        short: int = 0,
    ) -> list[str]:
        """Render every chat; open_turn: with the header of the assistant's turn; variables: what
        else the template may read; short: a text that has no more bytes than that comes as "".
        Raises UserError for the first chat that cannot be rendered."""
        own = {"tools": list(tools) or None, "add_generation_prompt": open_turn}
        texts: list[str] = []
        answers: Iterable[dict[str, Any]]
        try:
            batches = list(_batches([list(chat) for chat in chats]))
            shared = json.dumps({**variables, **own}, default=str)
        except (TypeError, ValueError, RecursionError) as error:
            raise self._refused(f"{type(error).__name__}: {error}", next(iter(chats), ())) from None
        shared = f'"short": {short}, "variables": {shared}'
        for batch, encoded in batches:
            answers = [self._ask(encoded, shared)]
            if len(batch) > 1 and answers[0].keys() & {"status", "too_long"}:
                # one of them took too much, or all together
                answers = (self._ask(json.dumps([chat]), shared) for chat in batch)
            for answer in answers:
                texts += answer.get("texts", [])
                if answer.keys() != {"texts"}:
                    raise self._explain(answer, chats[len(texts)])
        return texts

    def _ask(self, chats: str, shared: str) -> dict[str, Any]:
        """Return the answer to a request for some chats: their texts, up to the first that is
        refused, and how. shared: the rest of the request."""
        process: _TemplateProcess | None = (running := self._take())
        try:
            running.write(f'{{"chats": {chats}, {shared}}}\n')
            answer = running.read()
            with self._lock:
                # after any other answer the process may have ended
                if answer.keys() <= {"texts", "error"} and len(self._idle) < IDLE:
                    self._idle.append(running)
                    process = None
        finally:
            # An interrupted exchange would leave answers for the next one.
            if process is not None:
                process.end()
        return answer

    def _take(self) -> "_TemplateProcess":
        """Return an idle process that is still alive, or a new one."""
        while True:
            with self._lock:
                process = self._idle.pop() if self._idle else None
            if process is None:
                return _TemplateProcess(self.source)
            if process.is_alive():
                return process
            process.end()

    def _explain(self, answer: dict[str, Any], chat: Sequence[Message]) -> UserError:
        match answer:
            case {"error": str(found)}:
                return self._refused(found, chat)
            case {"syntax": str(found), "line": line}:
                return UserError(
                    "the chat template is no valid Jinja",
                    where=f"{self.where}, line {line}",
                    found=found,
                    next="mend that line",
                )
            case {"too_long": _}:
                return UserError(
                    "the chat template writes too long a text",
                    where=self.where,
                    expected=f"at most {LONGEST_TEXT:,} characters for a chat, in {MEMORY_MIB} MiB",
                    next=_ADVICE,
                )
            case {"status": status} if status == -signal.SIGPROF:
                return UserError(
                    "the chat template does not come to an end",
                    where=self.where,
                    found=f"{CPU_S:g} seconds for a chat of {len(chat)} messages",
                    expected="a template whose work grows as its chat does",
                    next=_ADVICE,
                )
        return UserError(
            "the chat template ends the process that renders it",
            where=self.where,
            found=f"exit status {answer['status']}",
            next=_ADVICE,
        )

    def _refused(self, found: str, chat: Sequence[Message]) -> UserError:
        return UserError(
            "the chat template refuses a chat",
            where=self.where,
            found=f"{found}; roles {', '.join(message['role'] for message in chat)}",
            expected="a chat that this model's template can write",
            next="change the chat, or the template",
        )


def read_template(file: str) -> str:
    """Read the chat template that a user names; "" without one. Raises UserError."""
    if not file:
        return ""
    source, found = "", "an empty file"
    try:
        source = Path(file).read_text(encoding="utf-8")
    except OSError as error:
        found = error.strerror or str(error)
    except UnicodeDecodeError as error:
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
        file = "chat_template.json"
        found = (read_json(model_path, file, what=file) or {}).get("chat_template")
        return found if isinstance(found, str) else ""


def with_tools(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Describe the tools in the chat's system message, in Hermes' way, for a template without a
    place for them."""
    text = TOOLS_TEXT.format("\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if messages and messages[0]["role"] == "system":
        text, messages = f"{messages[0]['content']}\n\n{text}", messages[1:]
    return [{"role": "system", "content": text}, *messages]


def with_calls(message: Message) -> Message:
    """Write the message's `tool_calls`, if any, into its content, as Hermes models do."""
    if "tool_calls" not in message:
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    calls = [Call(name=function["name"], arguments=function["arguments"]) for function in functions]
    content = "\n".join(filter(None, [message["content"], write_calls(calls)]))
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return rest | {"content": content}


def _batches(chats: list[list[Message]]) -> Iterator[tuple[list[list[Message]], str]]:
    """Yield the chats in order with their JSON, in batches of at most BATCH characters or one
    chat."""
    encoded = json.dumps(chats)
    if len(encoded) > BATCH and len(chats) > 1:
        half = len(chats) // 2
        yield from _batches(chats[:half])
        yield from _batches(chats[half:])
    elif chats:
        yield chats, encoded


class _TemplateProcess:
    """A process that renders one template (template_process.py), until it takes too much."""

    def __init__(self, source: str):
        # -P: does not import a user's json.py from the working directory. A session of its own:
        # Ctrl-C is this process's to handle.
        process = subprocess.Popen(
            [sys.executable, "-P", "-B", str(_PROCESS), *map(str, _LIMITS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            start_new_session=True,
        )
        assert process.stdin is not None and process.stdout is not None
        self.pid, self.stdin, self.stdout = process.pid, process.stdin, process.stdout
        self._process, self._owner = process, os.getpid()
        self.end = weakref.finalize(self, _end, process)
        self.write(f"{json.dumps(source)}\n")

    def is_alive(self) -> bool:
        """Tell whether the process runs, and is not one of a parent that has forked."""
        return self._owner == os.getpid() and self._process.poll() is None

    def write(self, text: str) -> None:
        """Write text to the process; if it has ended, `read` tells."""
        with suppress(BrokenPipeError):
            self.stdin.write(text.encode())
            self.stdin.flush()

    def read(self) -> dict[str, Any]:
        """Read an answer; {"status": exit status} if the process has ended."""
        line: bytes = self.stdout.readline()
        if not line.endswith(b"\n"):
            return {"status": self._process.wait()}
        answer: dict[str, Any] = json.loads(line)
        return answer


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with suppress(BrokenPipeError), process:
        pass
