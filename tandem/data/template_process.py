"""The process that renders chats with a template; the kernel ends it if it takes too much.

    python -P template_process.py MEMORY_BYTES CPU_S LONGEST_TEXT     (chat_template.py starts it)

JSON lines. The answer has the texts of the chats up to the first that is refused, and why it is:

    in   "{% for m in messages %}..."
    in   {"chats": [[{"role": "user", "content": "hi"}]], "short": 0, "variables": {"tools": null,
         ...}}
    out  {"texts": ["<|im_start|>user..."]}, with "error": "UndefinedError: ... (line 3)" or
         "too_long": true; or {"texts": [], "syntax": "unexpected '}'", "line": 3}

A text of at most "short" bytes is "" in the answer: nobody will read it.

The sandbox and what a template finds in it are those of transformers 5.23, so that the text is what
its apply_chat_template writes. Only the clock stands still and nothing is random: a prompt is the
same every time. Does not know tokenizers. Imports nothing of Tandem, because its imports are the
time that it takes to start.
"""

import json
import resource
import signal
import sys
import traceback
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# Templates that print today's date (Llama 3.2, Mistral, SmolLM3) would give a resumed run other
# prompts on the next day. They get Llama's default day instead.
TODAY = datetime(2024, 7, 26)
# names of a message's thoughts; templates read the first
REASONING = ("reasoning_content", "thinking", "reasoning")


def main(memory_bytes: int, cpu_s: float, longest_text: int) -> None:
    """Answer until standard input ends."""
    if sys.platform == "linux":
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    # The template needs no file: no core dump, no writing, no descriptors.
    for what, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 16),
    ):
        resource.setrlimit(what, (most, most))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    # Without a handler the timer's signal ends the process, in the middle of a C function too.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    source = json.loads(sys.stdin.buffer.readline())
    template = None
    for line in sys.stdin.buffer:
        texts: list[str] = []
        refused: dict[str, Any] = {}
        try:
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            request = json.loads(line)
            template = template or _environment().from_string(source)
            for messages in request["chats"]:
                signal.setitimer(signal.ITIMER_PROF, cpu_s)
                text = _render(template, messages, request["variables"])
                if len(text) > longest_text:
                    raise MemoryError
                texts.append("" if most_bytes(text) <= request["short"] else text)
        except MemoryError:
            refused = {"too_long": True}
        except TemplateSyntaxError as error:
            refused = {"syntax": error.message, "line": error.lineno}
        # A template is a program from someone else: it raises whatever its mistakes are.
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            lines = [f" (line {f.lineno})" for f in frames if f.filename == "<template>"]
            refused = {"error": f"{type(error).__name__}: {error}"[:1000] + "".join(lines[-1:])}
        print(json.dumps({"texts": texts, **refused}), flush=True)


def _render(template: Template, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
    if not messages:
        raise ValueError("a chat without messages")
    return template.render(messages=[_with_reasoning(m) for m in messages], **variables)


def most_bytes(text: str) -> int:
    """Return how many bytes a text has at most, as it is and in NFC, which is up to thrice as
    long."""
    return len(text) if text.isascii() else 3 * len(text.encode(errors="surrogatepass"))


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message without empty keys; thoughts under any of their names are also found under
    the usual one."""
    message = {name: value for name, value in message.items() if value is not None}
    thoughts = next((message[name] for name in REASONING if name in message), None)
    if thoughts is None:
        return message
    return {"thinking": thoughts, **message, "reasoning_content": thoughts}


# ---- the environment


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": TODAY.strftime,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    del environment.globals["lipsum"], environment.filters["random"]
    return environment


class _Generation(Extension):
    """The tag `{% generation %}...{% endgeneration %}`, which marks the assistant's text for other
    tools; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return caller()


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON that is not escaped for HTML, as Jinja's own is."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


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


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
