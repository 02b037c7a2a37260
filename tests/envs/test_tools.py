"""Tools are called, and everything that is wrong with a call is told to the model."""

import asyncio
import sys
import threading
from enum import Enum
from fractions import Fraction
from typing import Literal

import pytest

from tandem.envs.tools import ToolEnv, ToolUnavailable
from tandem.model.tool_calls import Call, write_calls
from tandem.plugins.tasks.calculator import MAX_BITS, calculate
from tandem.runtime.errors import UserError
from tests.support.waiting import WAIT_S


class Color(Enum):
    RED = "red"


def add(a: int, b: int = 1) -> int:
    """Adds.

    Args:
        a: One number.
        b: The other.
    """
    return a + b


async def later(x: float) -> float:
    """Waits.

    Args:
        x: A number.
    """
    await asyncio.sleep(0)
    return x / 2


def say(value: object) -> object:
    return value


def fail(kind: str) -> None:
    raise {
        "value": ValueError("no such thing"),
        "empty": ValueError(),
        "key": KeyError("k"),
        "exit": SystemExit(3),
    }[kind]


def play(env, *texts):
    """The observations of some turns."""

    async def run():
        return [await env.step(text) for text in texts]

    return asyncio.run(run())


def call(name, **arguments):
    return write_calls([Call(name=name, arguments=arguments)])


def told(env, text):
    """Return the messages of the tools for one turn."""
    [observation] = play(env, text)
    return [message["content"] for message in observation.messages]


def test_calls_are_answered_in_order_and_no_call_is_the_end():
    env = ToolEnv([add, later])
    first, last = play(env, call("later", x=3) + call("add", a=1, b=2), "Answer: 3")
    assert first.messages == [
        {"role": "tool", "name": "later", "content": "1.5"},
        {"role": "tool", "name": "add", "content": "3"},
    ]
    assert (first.done, first.penalty, last.done, last.messages) == (False, 0.0, True, [])
    assert first.parts == last.parts == {"tool_calls": 2.0, "bad_calls": 0.0}


def test_the_schema_is_that_of_transformers_and_can_be_hidden():
    [schema] = ToolEnv(add).tools
    assert schema["function"]["name"] == "add"
    takes = schema["function"]["parameters"]
    assert takes["required"] == ["a"]
    assert takes["properties"]["b"] == {"type": "integer", "description": "The other."}
    assert ToolEnv(add, show_tools=False).tools == ()


@pytest.mark.parametrize(
    "text, answer",
    [
        (call("sub", a=1), "error: no tool 'sub'; there is add, fail"),
        (call("add", a="8"), "error: argument 'a': input should be a valid integer, found '8'"),
        (call("add", a=1.5), "error: argument 'a': input should be a valid integer, found '1.5'"),
        (call("add", a=True), "error: argument 'a': input should be a valid integer, found 'true'"),
        (call("add"), "error: argument 'a' is missing; it is add(a: int, b: int = 1)"),
        (call("add", a=1, c=2), "error: no argument 'c'; it is add(a: int, b: int = 1)"),
        (call("fail", kind="value"), "error: no such thing"),
        (call("fail", kind="empty"), "error: ValueError: "),
        (call("fail", kind="key"), "error: KeyError: 'k'"),
        (call("fail", kind="exit"), "error: SystemExit: 3"),
        ('<tool_call>{"name": "add"', "error: the call is not closed by </tool_call>"),
    ],
)
def test_what_is_wrong_with_a_call_is_told_counted_and_penalized(text, answer):
    env = ToolEnv([add, fail], show_tools=False, invalid_call_penalty=0.5)
    bad, good = play(env, text, call("add", a=1))
    assert bad.messages == [{"role": "tool", "content": answer}]
    assert (bad.done, bad.penalty, bad.parts) == (False, 0.5, {"tool_calls": 0.0, "bad_calls": 1.0})
    assert (good.messages[0]["content"], good.penalty, good.parts["bad_calls"]) == ("2", 0.0, 1.0)


def test_an_unavailable_tool_fails_the_episode():
    def down() -> None:
        raise ToolUnavailable("no network")

    with pytest.raises(ToolUnavailable, match="no network"):
        play(ToolEnv(down, show_tools=False), call("down"))


def test_arguments_arrive_in_the_types_of_the_hints():
    seen = []

    def take(a: float, b: tuple[int, str], c: Literal["x", "y"], d: Color, e: int | None = 1):
        seen.append((a, b, c, d, e))

    env = ToolEnv(take, show_tools=False)
    play(env, call("take", a=1, b=[1, "s"], c="y", d="red", e=None))
    assert seen == [(1.0, (1, "s"), "y", Color.RED, None)]
    assert told(env, call("take", a=1, b=[1, "s"], c="z", d="red")) == [
        "error: argument 'c': input should be 'x' or 'y', found 'z'"
    ]


def test_results_are_text_or_json_and_are_cut():
    env = ToolEnv(say, show_tools=False, max_result_chars=16)
    assert told(env, call("say", value={"ä": [1, None]})) == ['{"ä": [1, null]}']
    assert told(env, call("say", value="ä\n")) == ["ä\n"]
    assert told(env, call("say", value="1" * 19)) == ["1" * 16 + "... (3 more characters)"]

    def strange(kind: str) -> object:
        return {"half": "\ud800", "fraction": Fraction(1, 3)}[kind]

    env = ToolEnv(strange, show_tools=False)
    both = call("strange", kind="half") + call("strange", kind="fraction")
    assert told(env, both) == ["?", '"1/3"']


def test_blocking_tools_of_many_episodes_run_at_the_same_time():
    together = threading.Barrier(24, timeout=WAIT_S)

    def meet() -> str:
        together.wait()
        return "met"

    async def all_of_them():
        envs = [ToolEnv(meet, show_tools=False) for _ in range(24)]
        return await asyncio.gather(*(env.step(call("meet")) for env in envs))

    assert {o.messages[0]["content"] for o in asyncio.run(all_of_them())} == {"met"}


def test_a_subclass_has_its_methods_as_tools():
    class Shop(ToolEnv):
        def __init__(self):
            super().__init__(tools=[self.price, add])
            self.prices = {"tea": 3}

        def price(self, item: str) -> int:
            """The price.

            Args:
                item: What to buy.
            """
            return self.prices[item]

    one, two = Shop(), Shop()
    two.prices["tea"] = 4
    assert [tool["function"]["name"] for tool in one.tools] == ["price", "add"]
    assert [told(env, call("price", item="tea")) for env in (one, two)] == [["3"], ["4"]]
    assert told(one, call("price", itm="tea")) == [
        "error: no argument 'itm'; it is price(item: str)"
    ]


def no_docstring(a: int) -> int:
    return a


def undescribed(a: int, b: int) -> int:
    """Adds.

    Args:
        a: One.
    """
    return a + b


def no_hint(a) -> int:
    """Adds.

    Args:
        a: One.
    """
    return a


def starred(*a: int) -> int:
    return 0


def odd_type(a: threading.Thread) -> None:
    """Odd.

    Args:
        a: One.
    """


@pytest.mark.parametrize(
    "tools, words",
    [
        (no_docstring, ["no_docstring", "it has no docstring"]),
        (undescribed, ["undescribed", "argument 'b'", "Args:"]),
        (no_hint, ["no_hint", "'a' without a type hint"]),
        (starred, ["starred", "'*a: int'", "given by name"]),
        (odd_type, ["odd_type", "'a: threading.Thread'", "JSON"]),
        ([add, add], ["same name", "'add'"]),
        ([], ["no tools", "calculator"]),
        ("calc", ["no 'calc' among the tools", "calculator"]),
        (len, ["not a function"]),
        ("no_such_file.py:add", ["no file no_such_file.py", "working directory"]),
        ("tandem.plugins.tasks.calculator:no", ["no 'no' in tandem.plugins.tasks", "calculate"]),
        ("tandem.no:no", ["tandem.no cannot be loaded", "ModuleNotFoundError"]),
    ],
)
def test_an_unfit_tool_is_refused_with_name_and_argument(tools, words):
    with pytest.raises(UserError) as error:
        ToolEnv(tools)
    assert [word for word in words if word not in str(error.value)] == []


def test_tools_of_a_file_are_found_and_loaded_once(tmp_path, monkeypatch):
    (tmp_path / "neighbour_of_tools.py").write_text("FACTOR = 3\n")
    (tmp_path / "some_tools.py").write_text(
        "from neighbour_of_tools import FACTOR\ndef triple(x: int) -> int:\n    return FACTOR * x\n"
        "def again(x: int) -> int:\n    return x\nprint('loaded', file=open('log', 'a'))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    env = ToolEnv(["some_tools.py:triple", "some_tools.py:again"], show_tools=False)
    ToolEnv("some_tools.py:triple", show_tools=False)
    assert told(env, call("triple", x=2)) == ["6"]
    assert (tmp_path / "log").read_text() == "loaded\n"


# ---------------------------------------------------------------- the calculator

BROKEN = ("", "1+", "(1", "1)", "2(3)", "1 2", "1.2.3", "*3", "2 * * 3", "()", "(" * 200, "1)*(2")
REFUSED = {
    **dict.fromkeys(BROKEN, "it is no expression of numbers, operators and parentheses"),
    "1e5": "unexpected 'e'",
    "__import__('os')": "unexpected '_'",
    "1/0": "division by zero",
    "0**-1": "division by zero",
    "1%0": "division by zero",
    "2**0.5": "a power needs a whole exponent",
    "9**9**9**9": "the number is too large",
    "9" * 201: "longer than 200 characters",
}


def test_what_the_calculator_refuses_it_says():
    for expression, words in REFUSED.items():
        with pytest.raises(ValueError) as error:
            calculate(expression)
        assert str(error.value) == words


def test_a_number_has_at_most_so_many_bits():
    assert calculate(f"2**{MAX_BITS - 1}") == str(2 ** (MAX_BITS - 1))
    with pytest.raises(ValueError, match="too large"):
        calculate(f"2**{MAX_BITS}")
