"""The reward function `code`: runs a completion's program against the problem's tests; the share of tests it passes.

The program runs in a sandbox that no expected value ever enters. What comes out is text or plain data, and is compared
here, so a program can print "passed", exit with 0, replace builtins or return an object that equals everything, and
gains nothing. Forms of `tests` in a problem's metadata (or, as JSON, in its answer):

    [{"input": "1 2\\n", "output": "3\\n"}]                    a program: what it prints for this stdin
    [{"function": "add", "args": [1, 2], "expected": 3}]      a function; also `kwargs`, and e.g. "Solution().add"
    {"inputs": [...], "outputs": [...], "fn_name": "add"}     both in APPS' columns; without fn_name a program
    ["assert add(1, 2) == 3"]                                 scripts, as MBPP's `test_list`, HumanEval's `test`

An assert of `call == constant` is a function call with an expected value. Any other script runs in a sandbox of its
own beside the solution's, and reaches the solution by messages only (code_inside.py); that needs a sandbox on this
machine. It knows neither models nor training, and of isolation only the sandbox's Protocol.

    python -c "from tandem.rewards.code import extract_code; print(extract_code('So:\\n```python\\nprint(1)\\n```'))"
"""

import ast
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.errors import UserError
from tandem.rewards import code_asserts
from tandem.rewards.code_asserts import CallTest
from tandem.rewards.code_inside import decode
from tandem.sandbox import Bubblewrap, Limits, Sandbox, Unisolated, opened, run_python
from tandem.types import Problem

if TYPE_CHECKING:
    from tandem import config

TEXT_CHARS = 200_000  # of a completion; the program is near its end
ANSWER_BYTES = 2**20  # of what a program prints in one test, or returns in all of them
PYTHON = ("python", "python3", "py")  # labels of a fenced block that holds a program
INSIDE = Path(__file__).with_name("code_inside.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class IoTest:
    """A program's stdin and the stdout it should print. Example: IoTest(input="1 2\\n", output="3\\n")"""

    input: str
    output: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A test that is a program itself. Example: Script(text="assert abs(f(1) - 2) < 0.1")"""

    text: str


Test = IoTest | CallTest | Script


def code_reward(
    problem: Problem,
    completion: str,
    *,
    sandbox: "Sandbox | config.Sandbox",
    timeout_s: float = 4.0,
    test_timeout_s: float = 2.0,
    memory_mb: int = 512,
    all_or_nothing: bool = False,
    tolerance: float = 0.0,
) -> dict[str, float]:
    """reward: the share of tests passed, or 1 only if all are; parts: `passed`, that share, and `tests`, their number.

    timeout_s: wall clock of all tests together, test_timeout_s of one process; tests that it does not reach have
    failed, so keep it below reward.timeout_s. tolerance: relative, between numbers. Raises UserError for a problem
    without tests that can be read, SandboxFailed where the sandbox did not work.
    """
    tests, entry_point = read_tests(problem), str(problem.metadata.get("entry_point") or "")
    where = sandbox if isinstance(sandbox, Sandbox) else opened(sandbox)
    limits = Limits(wall_s=test_timeout_s, cpu_s=math.ceil(timeout_s), memory_mb=memory_mb, output_bytes=ANSWER_BYTES)
    attempt = _Attempt(extract_code(completion), where, limits, time.monotonic() + timeout_s, tolerance, entry_point)
    share = sum(attempt.passed(tests, all_or_nothing)) / len(tests)
    return {"reward": float(share == 1) if all_or_nothing else share, "passed": share, "tests": float(len(tests))}


def extract_code(completion: str) -> str:
    """The last fenced block labelled as Python, else the last without a label, else the whole text.

    One that is cut off is included. What comes before a closing </think> is a draft, and not looked at.
    """
    said = completion.rpartition("</think>")[2][-TEXT_CHARS:]
    blocks: list[tuple[str, list[str]]] = []
    inside = False
    for line in said.splitlines():
        if line.lstrip().startswith("```"):
            inside = not inside
            if inside:
                blocks.append((line.strip().strip("`").strip().lower(), []))
        elif inside:
            blocks[-1][1].append(line)
    programs = [lines for label, lines in blocks if label in PYTHON] or [lines for label, lines in blocks if not label]
    return "\n".join(programs[-1]) + "\n" if programs else said


# ---------------------------------------------------------------- the tests of a problem


def read_tests(problem: Problem) -> list[Test]:
    """The tests of a problem, at least one; raises UserError."""
    given = next((problem.metadata[k] for k in ("tests", "test_list", "test") if problem.metadata.get(k)), "")
    given = given or problem.answer
    entry_point = str(problem.metadata.get("entry_point") or "")
    try:
        tests = _tests(_unquoted(given), entry_point)
    except (KeyError, TypeError, ValueError, SyntaxError) as error:
        raise _unreadable(problem, f"{type(error).__name__}: {error} in {str(given)[:200]}") from error
    if not tests:
        raise _unreadable(problem, str(given)[:200] or "nothing")
    return tests


def _unreadable(problem: Problem, found: str) -> UserError:
    return UserError(
        "a problem for the reward `code` has no tests that can be read",
        where=f"problem {problem.uid}, metadata tests, test_list or test, or its answer",
        found=found,
        expected='[{"input": ..., "output": ...}], [{"function": ..., "args": [...], "expected": ...}] or asserts',
        next="see docs/sandbox.md",
    )


def _unquoted(given: Any) -> Any:
    """What a string holds, if it is JSON of a list or an object; a script is none."""
    if isinstance(given, str) and given.lstrip()[:1] in ("[", "{"):
        return json.loads(given)
    return given


def _tests(given: Any, entry_point: str) -> list[Test]:
    match given:
        case str() if given.strip():
            return _script(given, entry_point)
        case {"inputs": list(inputs), "outputs": list(outputs)} if len(inputs) == len(outputs):
            name = given.get("fn_name")
            return [_column(name, one, other) for one, other in zip(inputs, outputs, strict=True)]
        case {"input": _, "output": _} | {"expected": _}:
            return [_test(given, entry_point)]
        case list() | tuple():
            return [test for item in given for test in _tests(_unquoted(item), entry_point)]
    raise ValueError("no form of tests")


def _script(text: str, entry_point: str) -> list[Test]:
    calls = code_asserts.calls(text, entry_point)
    return [*calls] if calls else [Script(text=text)]


def _test(given: dict[str, Any], entry_point: str) -> Test:
    if "input" in given:
        return IoTest(input=_text(given["input"]), output=_text(given["output"]))
    name = given.get("function") or given.get("entry_point") or entry_point
    if not name:
        raise KeyError("function")
    return _call(str(name), list(given.get("args") or []), dict(given.get("kwargs") or {}), [given["expected"]])


def _column(name: str | None, one: Any, other: Any) -> Test:
    """A test in APPS' columns, where the value that a function returns may stand in a list of its own."""
    if not name:
        return IoTest(input=_text(one), output=_text(other))
    expected = [other, other[0]] if isinstance(other, list) and len(other) == 1 else [other]
    return _call(name, list(one), {}, expected)


def _text(given: Any) -> str:
    return "".join(f"{line}\n" for line in given) if isinstance(given, list) else str(given)


def _call(name: str, args: list[Any], kwargs: dict[str, Any], expected: list[Any]) -> CallTest:
    ast.parse(name, mode="eval")
    words = [repr(arg) for arg in args] + [f"**{kwargs!r}"] * bool(kwargs)
    return CallTest(expression=f"{name}({', '.join(words)})", expected=tuple(expected), how="json")


# ---------------------------------------------------------------- running them


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A program on its way through its tests."""

    code: str
    sandbox: Sandbox
    limits: Limits
    deadline: float
    tolerance: float
    entry_point: str

    def passed(self, tests: Sequence[Test], all_or_nothing: bool) -> list[bool]:
        """Whether each test passed, in the order of their kinds; ends at the first failure if only all of them count."""
        calls = [test for test in tests if isinstance(test, CallTest)]
        scripts = [test.text for test in tests if isinstance(test, Script)]
        verdicts = self._calls(calls, all_or_nothing)
        if scripts and (all(verdicts) or not all_or_nothing):
            verdicts += self._scripts(scripts)
        for test in tests:
            if isinstance(test, IoTest) and (all(verdicts) or not all_or_nothing):
                verdicts.append(self._prints(test))
        return verdicts

    def _left(self) -> Limits | None:
        """The limits of the next run; None where there is no time for one."""
        left = self.deadline - time.monotonic()
        return replace(self.limits, wall_s=min(left, self.limits.wall_s)) if left > 0 else None

    def _prints(self, test: IoTest) -> bool:
        limits = self._left()
        if limits is None:
            return False
        result = run_python(self.sandbox, self.code, test.input, limits)
        return result.exit_code == 0 and same_output(result.stdout, test.output, self.tolerance)

    def _calls(self, tests: Sequence[CallTest], all_or_nothing: bool) -> list[bool]:
        """All calls in one process; after one that does not end, those behind it in another, while there is time."""
        verdicts: list[bool] = []
        while len(verdicts) < len(tests) and (limits := self._left()):
            some, in_time = self._replies(tests[len(verdicts) :], limits)
            verdicts += some
            if in_time or all_or_nothing:
                break
            verdicts.append(False)  # the one that took the time
        return (verdicts + [False] * len(tests))[: len(tests)]

    def _replies(self, tests: Sequence[CallTest], limits: Limits) -> tuple[list[bool], bool]:
        """Which of the tests that were answered passed, and whether time sufficed for all; a reply is only a value."""
        requests = "".join(repr(test.expression) + "\n" for test in tests)
        files = {"code_inside.py": _inside(), "solution.py": self.code}
        command = ["python", "-S", "code_inside.py", "solve"]
        result = self.sandbox.run(command, files=files, stdin=requests, limits=limits)
        replies = result.stdout.split("\n")[:-1]
        passed = [holds(test, reply, self.tolerance) for test, reply in zip(tests, replies, strict=False)]
        return passed, result.stop_reason != "timeout"

    def _scripts(self, scripts: Sequence[str]) -> list[bool]:
        """Tests and solution in two sandboxes; the verdicts are the testers', on a stream that the solution has not."""
        if not isinstance(self.sandbox, Bubblewrap | Unisolated):
            raise UserError(
                "a test script that is more than asserts of `call == constant` needs a sandbox on this machine",
                where="sandbox.url",
                found=scripts[0][:200],
                expected="bubblewrap, or tests of another form",
                next="leave sandbox.url empty",
            )
        limits = self._left()
        if limits is None:
            return [False] * len(scripts)
        names = {name for script in scripts for name in code_asserts.needed(script)} | {self.entry_point} - {""}
        tests = json.dumps({"scripts": scripts, "names": sorted(names), "entry_point": self.entry_point})
        tester = (["python", "-S", "code_inside.py", "test"], {"code_inside.py": _inside(), "tests.json": tests})
        solver = (["python", "-S", "code_inside.py", "solve"], {"code_inside.py": _inside(), "solution.py": self.code})
        result, _ = self.sandbox.converse(tester, solver, limits=limits)
        reports = json.loads(result.stderr) if result.exit_code == 0 else None
        return [report == "" for report in reports] if reports is not None else [False] * len(scripts)


@cache
def _inside() -> str:
    return INSIDE.read_text(encoding="utf-8")


# ---------------------------------------------------------------- comparing, outside


def same_output(found: str, expected: str, tolerance: float = 0.0) -> bool:
    """Equal lines, without spaces at their ends and empty lines at the end; with a tolerance, equal words."""
    one, other = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (found, expected))
    if one == other or not tolerance:
        return one == other
    words, wanted = found.split(), expected.split()
    return len(words) == len(wanted) and all(map(lambda a, b: _same_word(a, b, tolerance), words, wanted))


def _same_word(found: str, expected: str, tolerance: float) -> bool:
    try:
        return found == expected or math.isclose(float(found), float(expected), rel_tol=tolerance, abs_tol=tolerance)
    except ValueError:
        return False


def holds(test: CallTest, reply: str, tolerance: float = 0.0) -> bool:
    """Whether a reply of code_inside.py is a value as the test wants it."""
    try:
        value = code_asserts.WRAPPERS[test.wrapper](decode(json.loads(reply)["value"], _no_object))
        match test.how:
            case "truth":
                return bool(value) is test.expected[0]
            case "is":
                return type(value) is type(test.expected[0]) and value == test.expected[0]
            case "json":
                return any(_same(_as_json(value), _as_json(expected), tolerance) for expected in test.expected)
            case "equal":
                return any(_same(value, expected, tolerance) for expected in test.expected)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return False


def _no_object(number: int) -> Any:
    raise ValueError("an object is no value")


def _same(found: Any, expected: Any, tolerance: float) -> bool:
    """Equality of plain data, as Python has it, but NaN equals NaN; a tolerance is for numbers, however deep."""
    if isinstance(expected, float | int) and isinstance(found, float | int):
        both_nan = expected != expected and found != found
        close = tolerance > 0 and math.isclose(found, expected, rel_tol=tolerance, abs_tol=tolerance)
        return both_nan or found == expected or close
    if type(found) is type(expected) and isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(_same(a, b, tolerance) for a, b in zip(found, expected, strict=True))
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(_same(found[k], expected[k], tolerance) for k in expected)
    return bool(found == expected)


def _as_json(value: Any) -> Any:
    """As JSON would have it: tuples are lists, and a dict's keys strings."""
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, dict):
        return {key if isinstance(key, str) else json.dumps(key): _as_json(item) for key, item in value.items()}
    return value
