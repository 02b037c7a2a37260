"""Chat templates in Jinja's immutable sandbox, with a cap on the text while it is being written.

A template is a program from someone else, and the chats come from anyone: the cap stops a rendering when a text grows too
long and not after it filled the memory. Below the cap the text is what transformers' apply_chat_template writes, byte
for byte (filters, globals and the generation tag are those of transformers 5.23). It bounds text that is written,
captured (macros, set blocks, loops that are called) or made with `+`, `*` and `~`; other string methods and the time that
a template takes are not bounded, so serve only templates that you would run. Does not know tokenizers.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from tandem.types import Message, Tool

LONGEST_TEXT = 4 << 20  # characters of one rendered chat, or of a part of it
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of a message's thoughts; templates read the first


class TextTooLong(Exception):
    """A text of the template grew beyond LONGEST_TEXT."""


class ChatTemplate:
    """A compiled chat template. Raises jinja2.TemplateError for one that cannot be compiled."""

    def __init__(self, source: str):
        self._template = _Environment().from_string(source)

    def render(
        self, messages: Sequence[Message], *, open_turn: bool, special_tokens: Mapping[str, object],
        tools: Sequence[Tool] = (),
    ) -> str:  # fmt: skip
        """The text of the chat. Raises TextTooLong, and whatever the template's own errors are."""
        if not messages:
            raise ValueError("a chat without messages")
        pieces = self._template.generate(
            **{**special_tokens, "messages": [_plain(message) for message in messages]},
            tools=list(tools) or None, documents=None, add_generation_prompt=open_turn,
        )  # fmt: skip
        return "".join(_capped(pieces))


def _plain(message: Message) -> Message:
    """The message without empty keys; thoughts under any of their names are also found under the usual one."""
    message = {name: text for name, text in message.items() if text is not None}
    thoughts = next((message[name] for name in REASONING if name in message), None)
    return message if thoughts is None else {"thinking": thoughts, **message, "reasoning_content": thoughts}


def _capped(pieces: Iterable[str]) -> Iterator[str]:
    length = 0
    for piece in pieces:
        length = _within(length + len(piece))
        yield piece


def _within(length: int) -> int:
    if length > LONGEST_TEXT:
        raise TextTooLong
    return length


class _Buffer(list[str]):
    """What a macro, a set block or a called loop has written so far."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def append(self, text: str) -> None:
        self.length = _within(self.length + len(text))
        super().append(text)

    def extend(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.append(text)


class _CappedCode(CodeGenerator):
    """Compiles captured text and `~` to calls that count."""

    def buffer(self, frame: Frame) -> None:
        frame.buffer = self.temporary_identifier()
        self.writeline(f"{frame.buffer} = environment.new_buffer()")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.join_texts((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for other tools; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return caller()


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _CappedCode
    intercepted_binops = frozenset({"+", "*"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _tojson
        self.globals |= {"raise_exception": _raise_exception, "dict": _Dict(), "namespace": _Namespace}

    def new_buffer(self) -> _Buffer:
        return _Buffer()

    def join_texts(self, parts: Sequence[object]) -> str:
        return "".join(_capped(map(str, parts)))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for text, count in ((left, right), (right, left)):
                if isinstance(text, str | list | tuple) and isinstance(count, int):
                    _within(len(text) * count)
        elif isinstance(left, str | list | tuple) and type(left) is type(right):
            _within(len(left) + len(right))
        return super().call_binop(context, operator, left, right)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:  # fmt: skip
    """Jinja's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Dict:
    """`dict` without the attributes of the type."""

    def __call__(self, *pairs: Any, **named: Any) -> dict[Any, Any]:
        return dict(*pairs, **named)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        return dict.fromkeys(*arguments)


class _Namespace(Namespace):
    """`namespace`, in which no name begins with an underscore."""

    def __init__(*args: Any, **named: Any) -> None:  # so that a name may be `self`
        self, *pairs = args
        attributes = dict(*pairs, **named)
        for name in attributes:
            _Namespace._check(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: str) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace has no attribute {name!r}")
