"""Chat templates in Jinja's immutable sandbox, with a bound on the work of a rendering and on every
text in it.

A template is a program from someone else, and the chats come from anyone: the bounds
(template_budget.py) stop a rendering before it has filled the memory or taken minutes. Below them
the text is what transformers' apply_chat_template writes, byte for byte (filters, globals and the
generation tag are those of transformers 5.23, without what draws lots). The price of a block of
statements is counted when it is compiled, and paid whenever it runs. Does not know tokenizers.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from types import BuiltinMethodType, GeneratorType, MethodType
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Cycler, Namespace, _PassArg

from tandem.data.template_budget import (
    CALL,
    COMPARING_TESTS,
    FILTERS,
    LAZY,
    MAX_INDENT,
    METHODS,
    NODE,
    SEARCHING_BACKWARDS,
    WORK,
    Bound,
    Budget,
    check_width,
    within,
)
from tandem.types import Message, Tool

LONGEST_SOURCE = 1 << 17  # characters of a template: the longest of known models have 30,000
# names of a message's thoughts; templates read the first
REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A compiled chat template. Compiling one raises whatever its mistakes are."""

    def __init__(self, source: str):
        if len(source) > LONGEST_SOURCE:
            raise SecurityError(f"a template of more than {LONGEST_SOURCE:,} characters")
        self._environment = _Environment()
        self._template = self._environment.from_string(source)

    def render(
        self,
        messages: Sequence[Message],
        *,
        open_turn: bool,
        special_tokens: Mapping[str, object],
        tools: Sequence[Tool] = (),
    ) -> str:
        """The text of the chat. Raises TextTooLong, TooMuchWork, and whatever the template's own
        errors are."""
        if not messages:
            raise ValueError("a chat without messages")
        self._environment.budget.left = WORK
        pieces = self._template.generate(
            **{**special_tokens, "messages": [_plain(message) for message in messages]},
            tools=list(tools) or None,
            documents=None,
            add_generation_prompt=open_turn,
        )
        return "".join(_capped(pieces))


def _plain(message: Message) -> Message:
    """The message without empty keys; thoughts under any of their names are also found under the
    usual one."""
    message = {name: text for name, text in message.items() if text is not None}
    thoughts = next((message[name] for name in REASONING if name in message), None)
    return (
        message
        if thoughts is None
        else {"thinking": thoughts, **message, "reasoning_content": thoughts}
    )


def _capped(pieces: Iterable[str]) -> Iterator[str]:
    length = 0
    for piece in pieces:
        length = within(length + len(piece))
        yield piece


class _Buffer(list[str]):
    """What a macro, a set block or a called loop has written so far."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def append(self, text: str) -> None:
        self.length = within(self.length + len(text))
        super().append(text)

    def extend(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.append(text)


class _PricedCode(CodeGenerator):
    """Compiles in what has no function of the environment that could count it: blocks, captured
    text, literals, comparisons and slices."""

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self._work: dict[int, int] = {}  # of the blocks that can run more than once, by identity
        # what loops with a condition go through, and the work of the condition
        self._filtered: dict[int, int] = {}

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        for part in node.find_all(nodes.Node):
            if isinstance(part, nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block):
                self._work[id(part.body)] = NODE * sum(1 for _ in part.find_all(nodes.Node))
        for loop in node.find_all(nodes.For):
            if loop.test is not None:
                self._filtered[id(loop.iter)] = self._work[id(loop.body)]
        super().visit_Template(node, frame)

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        if work := self._work.get(id(nodes)):
            self.writeline(f"environment.budget.spend({work})")
        super().blockvisit(nodes, frame)

    def visit(self, node: nodes.Node, *arguments: Any, **named: Any) -> None:
        work = self._filtered.get(id(node))
        if work is None:
            super().visit(node, *arguments, **named)
        else:
            self._wrapped("each", super().visit, node, *arguments, more=f", {work}", **named)

    def _wrapped(
        self,
        function: str,
        visit: Callable[..., None],
        *arguments: Any,
        more: str = "",
        **named: Any,
    ) -> None:
        self.write(f"environment.budget.{function}(")
        visit(*arguments, **named)
        self.write(f"{more})")

    def buffer(self, frame: Frame) -> None:
        frame.buffer = self.temporary_identifier()
        self.writeline(f"{frame.buffer} = environment.new_buffer()")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.join_texts((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._literal(node, node.items, super().visit_List, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        self._literal(node, node.items if node.ctx == "load" else [], super().visit_Tuple, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._literal(
            node,
            [part for pair in node.items for part in (pair.key, pair.value)],
            super().visit_Dict,
            frame,
        )

    def _literal(
        self, node: nodes.Node, items: list[nodes.Expr], visit: Callable[..., None], frame: Frame
    ) -> None:
        if all(isinstance(item, nodes.Const) for item in items):
            visit(node, frame)
        else:
            self._wrapped("made", visit, node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Slice):
            self._wrapped("sliced", super().visit_Getitem, node, frame)
        elif isinstance(node.arg, nodes.Const):
            super().visit_Getitem(node, frame)
        else:
            self.write("environment.getitem(")
            self.visit(node.node, frame)
            self.write(", ")
            self._wrapped("paid", self.visit, node.arg, frame)
            self.write(")")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        inside = any(operand.op in ("in", "notin") for operand in node.ops)
        operands = [node.expr, *(operand.expr for operand in node.ops)]
        # no more than the smallest is looked at
        cheap = not inside and any(map(_is_small, operands))
        self.write("(")
        for operator, operand in zip(
            ["", *(operand.op for operand in node.ops)], operands, strict=True
        ):
            self.write(f" {operators[operator]} " if operator else "")
            if cheap or _is_small(operand):
                self.visit(operand, frame)
            else:
                self._wrapped(
                    "searched" if operator in ("in", "notin") else "paid",
                    self.visit,
                    operand,
                    frame,
                )
        self.write(")")


def _is_small(node: nodes.Expr) -> bool:
    return isinstance(node, nodes.Const) or (
        isinstance(node, nodes.List | nodes.Tuple | nodes.Dict) and not node.items
    )


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for other tools; here it
    is only its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return caller()


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _PricedCode
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=self._printed,
        )
        self.budget = Budget()
        bounds = {**FILTERS, "format": self._formatted, "tojson": None}
        self.filters["tojson"] = _tojson
        self.filters = {
            name: self._priced(name, self.filters[name], bound) for name, bound in bounds.items()
        }
        self.tests |= {name: self._looking(self.tests[name]) for name in COMPARING_TESTS}
        del self.globals["lipsum"]  # it draws lots
        self.globals |= {
            "raise_exception": _raise_exception,
            "dict": _Dict(),
            "namespace": _Namespace,
        }

    def new_buffer(self) -> _Buffer:
        return _Buffer()

    def join_texts(self, parts: Sequence[object]) -> str:
        return str(self.budget.made("".join(_capped(str(self._printed(part)) for part in parts))))

    def _printed(self, value: Any) -> Any:
        if not isinstance(value, str):
            self.budget.paid([value] if isinstance(value, Namespace) else value)
        return value

    def _formatted(self, text: str, *values: Any, **named: Any) -> int:
        return self.budget.formatted(text, values or named)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.budget.operate(operator, left, right)
        return self.budget.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = __self.budget
        budget.spend(CALL)
        if isinstance(__obj, METHOD_TYPES):
            args = __self._price_method(__obj, args, kwargs)
        elif isinstance(__obj, Macro) and (__obj.catch_varargs or __obj.catch_kwargs):
            budget.weigh([*args, *kwargs.values()])
        return budget.made(super().call(__context, __obj, *args, **kwargs))

    def _price_method(
        self, method: BuiltinMethodType | MethodType, args: tuple[Any, ...], kwargs: Any
    ) -> tuple[Any, ...]:
        """Pay for a method before it runs; returns its arguments, such that they can be read
        twice."""
        owner: Any = method.__self__
        if isinstance(owner, OWN_METHODS):
            return args
        kind = str if isinstance(owner, str) else type(owner)
        bound = METHODS.get(kind, {}).get(method.__name__)
        if bound is None:
            raise SecurityError(
                f"a template may not call {method.__name__!r} of {type(owner).__name__!r}"
            )
        if kind is not dict:
            self.budget.spend(len(owner))
        if not (args or kwargs):
            return args
        if method.__name__ in SEARCHING_BACKWARDS:
            self.budget.spend(
                len(owner)
                * sum(len(text) for text in (*args, *kwargs.values()) if isinstance(text, str))
            )
        if args and isinstance(args[0], GeneratorType):
            args = (list(args[0]), *args[1:])
        within(bound(owner, *args, **kwargs))
        return args

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        if type(value.__self__) is not str:
            raise SecurityError("a template may not format a text that is marked as safe")
        formatter, text, is_map = _Formatter(self), value.__self__, value.__name__ == "format_map"
        return lambda *args, **kwargs: formatter.vformat(
            text, () if is_map else args, args[0] if is_map else kwargs
        )

    def _priced(
        self, name: str, filter: Callable[..., Any], bound: Bound | None
    ) -> Callable[..., Any]:
        skipped = 1 if _PassArg.from_obj(filter) is not None else 0  # arguments that are jinja's

        @wraps(filter)
        def run(*args: Any, **kwargs: Any) -> Any:
            mine, rest = args[:skipped], list(args[skipped:])
            if bound is not None and isinstance(rest[0], GeneratorType):
                rest[0] = list(rest[0])
            self.budget.spend(CALL)
            if name not in LAZY:
                self.budget.paid(rest[0])
            if bound is not None:
                within(bound(*rest, **kwargs))
            return self.budget.made(filter(*mine, *rest, **kwargs))

        return run

    def _looking(self, test: Any) -> Callable[..., bool]:
        def run(*args: Any) -> Any:
            self.budget.spend(NODE)
            return test(*map(self.budget.paid, args))

        return run


class _Formatter(SandboxedFormatter):
    """`str.format` that stops before a text is too long."""

    def __init__(self, environment: _Environment):
        super().__init__(environment)
        self._printed = environment._printed

    def vformat(self, format_string: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        self._length = len(format_string)
        return super().vformat(format_string, args, kwargs)

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        value, name = super().get_field(field_name, args, kwargs)
        self._printed(value)
        return value, name

    def format_field(self, value: Any, format_spec: str) -> Any:
        check_width(format_spec)
        text = super().format_field(value, format_spec)
        self._length = within(self._length + len(text))
        return text


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes HTML. Indented, a deep value grows far beyond its own size, so its text
    is counted as it is made."""
    if len("".join(separators or ())) > MAX_INDENT:
        raise SecurityError(f"separators of JSON of more than {MAX_INDENT} characters")
    if indent is None:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys
        )
    if not 0 < (indent if isinstance(indent, int) else len(indent)) <= MAX_INDENT:
        raise SecurityError(f"an indent of JSON that is not of 1 to {MAX_INDENT} characters")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return "".join(_capped(encoder.iterencode(value)))


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


METHOD_TYPES = (BuiltinMethodType, MethodType)
OWN_METHODS = (LoopContext, Cycler, Extension, _Dict)  # of objects that are jinja's or ours
