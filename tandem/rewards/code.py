"""The reward function `code`: runs a completion's program against the problem's tests; the share of
tests it passes.

The program runs in a sandbox that no expected value ever enters. What comes out is text or plain
data, and is compared here, so a program can print "passed", exit with 0, replace builtins or return
an object that equals everything, and gains nothing. Forms of `tests` in a problem's metadata (or,
as JSON, in its answer):

    [{"input": "1 2\\n", "output": "3\\n"}]                    a program: what it prints for this stdin
    [{"function": "add", "args": [1, 2], "expected": 3}]      a function; also `kwargs`, and e.g. "Solution().add"
    {"inputs": [...], "outputs": [...], "fn_name": "add"}     both in APPS' columns; without fn_name a program
    [{"input": "1\n2", "output": "3", "testtype": "functional"}]      LiveCodeBench's, of the function `func_name`
    ["assert add(1, 2) == 3"]                                 scripts, as MBPP's `test_list`, HumanEval's `test`

An assert of `call == constant` is a function call with an expected value. Any other script runs in
a sandbox of its own beside the solution's, and reaches the solution by messages only
(code_inside.py); that needs a sandbox on this machine. MBPP's `test_imports` and `test_setup_code`
come before each script. It knows neither models nor training, and of isolation only the sandbox's
Protocol.

    python -c "from tandem.rewards.code import extract_code; print(extract_code('So:\\n```python\\nprint(1)\\n```'))"
"""

import ast
import json
import math
import time
import typing
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from tandem.rewards import code_asserts
from tandem.rewards.code_asserts import CallTest
from tandem.rewards.code_compare import holds, same_output
from tandem.runtime.errors import UserError
from tandem.runtime.sandbox import (
    Bubblewrap,
    Limits,
    Sandbox,
    SandboxConfig,
    Unisolated,
    opened,
    run_python,
)
from tandem.types import Problem

TEXT_CHARS = 200_000  # of a completion; the program is near its end
ANSWER_BYTES = 2**20  # of what a program prints in one test, or returns in all of them
PYTHON = ("python", "python3", "py")  # labels of a fenced block that holds a program
INSIDE, PYTEST = (Path(__file__).with_name(name) for name in ("code_inside.py", "code_pytest.py"))


@dataclass(frozen=True, slots=True, kw_only=True)
class IoTest:
    """A program's stdin and the stdout it should print. Example: IoTest(input="1 2\\n",
    output="3\\n")"""

    input: str
    output: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A test that is a program itself. Example: Script(text="assert abs(f(1) - 2) < 0.1")"""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Columns of a problem that its tests are read and run with."""

    entry_point: str
    function: str  # which LiveCodeBench's functional tests call
    imports: str  # MBPP's test_imports
    setup: str  # these and MBPP's test_setup_code: the beginning of every script
    helpers: tuple[str, ...]  # imports and finished functions of the problem's text


Test = IoTest | CallTest | Script


def code_reward(
    problem: Problem,
    completion: str,
    *,
    sandbox: Sandbox | SandboxConfig,
    timeout_s: float = 4.0,
    test_timeout_s: float = 2.0,
    memory_mb: int = 512,
    all_or_nothing: bool = False,
    tolerance: float = 0.0,
) -> dict[str, float]:
    """reward: the share of tests passed, or 1 only if all are; parts: `passed`, that share, and
    `tests`, their number.

    timeout_s: wall clock of all tests together, test_timeout_s of one process; tests that it does
    not reach have failed, so keep it below reward.timeout_s. tolerance: relative, between numbers.
    Raises UserError for a problem without tests that can be read, SandboxFailed where the sandbox
    did not work.
    """
    tests, columns = read_tests(problem)
    where = sandbox if isinstance(sandbox, Sandbox) else opened(sandbox)
    limits = Limits(
        wall_s=test_timeout_s,
        cpu_s=math.ceil(timeout_s),
        memory_mb=memory_mb,
        output_bytes=ANSWER_BYTES,
    )
    attempt = _Attempt(
        uid=problem.uid,
        code=extract_code(completion),
        columns=columns,
        sandbox=where,
        limits=limits,
        deadline=time.monotonic() + timeout_s,
        tolerance=tolerance,
    )
    share = sum(attempt.passed(tests, all_or_nothing)) / len(tests)
    return {
        "reward": float(share == 1) if all_or_nothing else share,
        "passed": share,
        "tests": float(len(tests)),
    }


def extract_code(completion: str) -> str:
    """The last fenced block labelled as Python, else the last without a label, else the whole text.

    One that is cut off is included. What comes before a closing </think> is a draft, and not looked
    at.
    """
    said = completion.rpartition("</think>")[2][-TEXT_CHARS:]
    blocks: list[tuple[str, list[str]]] = []
    inside = False
    # not splitlines, which cuts at form feeds in strings too
    for line in said.replace("\r\n", "\n").split("\n"):
        if line.lstrip().startswith("```"):
            inside = not inside
            if inside:
                blocks.append((line.strip().strip("`").strip().lower(), []))
        elif inside:
            blocks[-1][1].append(line)
    programs = [lines for label, lines in blocks if label in PYTHON] or [
        lines for label, lines in blocks if not label
    ]
    return "\n".join(programs[-1]) + "\n" if programs else said


# ---------------------------------------------------------------- the tests of a problem


def read_tests(problem: Problem) -> tuple[list[Test], Columns]:
    """The tests of a problem, at least one, and what they are run with; raises UserError."""
    given = next(
        (problem.metadata[k] for k in ("tests", "test_list", "test") if problem.metadata.get(k)), ""
    )
    given = given or problem.answer
    try:
        columns = _columns(problem)
        tests = _tests(_unquoted(given), columns)
    except (KeyError, TypeError, ValueError, SyntaxError) as error:
        raise _unreadable(
            problem, f"{type(error).__name__}: {error} in {str(given)[:200]}"
        ) from error
    if not tests:
        raise _unreadable(problem, str(given)[:200] or "nothing")
    return tests, columns


def _unreadable(problem: Problem, found: str) -> UserError:
    return UserError(
        "a problem for the reward `code` has no tests that can be read",
        where=f"problem {problem.uid}, metadata tests, test_list or test, or its answer",
        found=found,
        expected='[{"input": ..., "output": ...}], [{"function": ..., "args": [...], "expected": ...}] or asserts',
        next="see docs/sandbox.md",
    )


def _columns(problem: Problem) -> Columns:
    given, entry_point = problem.metadata, str(problem.metadata.get("entry_point") or "")
    lines = given.get("test_imports") or []
    imports = "".join(f"{line}\n" for line in ([lines] if isinstance(lines, str) else lines))
    held = given.get("metadata")  # LiveCodeBench's column, JSON
    more = json.loads(held) if isinstance(held, str) and held.lstrip().startswith("{") else given
    return Columns(
        entry_point=entry_point,
        function=str(more.get("func_name") or entry_point),
        imports=imports,
        setup=f"{imports}{given.get('test_setup_code') or ''}\n".lstrip("\n"),
        helpers=_helpers(problem, entry_point) if entry_point else (),
    )


def _helpers(problem: Problem, entry_point: str) -> tuple[str, ...]:
    """Statements of the code in a problem's text that its tests may rely on, as in HumanEval's
    prompts. A solution may call the functions, and a test that does calls these, not the
    solution's."""
    asked = [
        str(message.get("content") or "")
        for message in problem.messages
        if message.get("role") == "user"
    ]
    try:
        tree = ast.parse(extract_code("".join(asked[-1:])))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    return tuple(
        ast.unparse(statement) for statement in tree.body if _is_helper(statement, entry_point)
    )


def _is_helper(statement: ast.stmt, entry_point: str) -> bool:
    match statement:
        case ast.Import() | ast.ImportFrom():
            return True
        case ast.FunctionDef(name, _, body) | ast.ClassDef(name, _, _, body):
            stub = all(isinstance(line, ast.Pass | ast.Expr) for line in body)
            return not stub and name != entry_point
    return False


def _unquoted(given: Any) -> Any:
    """What a string holds, if it is JSON of a list or an object; a script is none."""
    if isinstance(given, str) and given.lstrip()[:1] in ("[", "{"):
        return json.loads(given)
    return given


def _tests(given: Any, columns: Columns) -> list[Test]:
    match given:
        case str() if given.strip():
            script = columns.setup + given
            calls = code_asserts.calls(script, columns.entry_point, columns.helpers)
            return [*calls] if calls else [Script(text=script)]
        case {"inputs": list(inputs), "outputs": list(outputs)} if len(inputs) == len(outputs):
            name = given.get("fn_name")
            return [_column(name, one, other) for one, other in zip(inputs, outputs, strict=True)]
        case {"input": _, "output": _} | {"expected": _}:
            return [_test(given, columns)]
        case list() | tuple():
            return [test for item in given for test in _tests(_unquoted(item), columns)]
    raise ValueError("no form of tests")


def _test(given: dict[str, Any], columns: Columns) -> Test:
    if given.get("testtype") == "functional":
        args = [json.loads(line) for line in str(given["input"]).split("\n") if line.strip()]
        return _call(columns.function, args, {}, [json.loads(given["output"])])
    if "input" in given:
        return IoTest(input=_text(given["input"]), output=_text(given["output"]))
    name = given.get("function") or given.get("entry_point") or columns.entry_point
    if not name:
        raise KeyError("function")
    return _call(
        str(name),
        list(given.get("args") or []),
        dict(given.get("kwargs") or {}),
        [given["expected"]],
    )


def _column(name: str | None, one: Any, other: Any) -> Test:
    """A test in APPS' columns, where the value that a function returns may stand in a list of its
    own."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """A program on its way through its tests."""

    uid: str
    code: str
    columns: Columns
    sandbox: Sandbox
    limits: Limits
    deadline: float
    tolerance: float

    def passed(self, tests: Sequence[Test], all_or_nothing: bool) -> list[bool]:
        """Whether each test passed, in the order of their kinds; ends at the first failure if only
        all of them count."""
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
        """All calls in one process; after one that does not end, those behind it in another, while
        there is time."""
        verdicts: list[bool] = []
        while len(verdicts) < len(tests) and (limits := self._left()):
            some, in_time = self._replies(tests[len(verdicts) :], limits)
            verdicts += some
            if in_time or all_or_nothing:
                break
            verdicts.append(False)  # the one that took the time
        return (verdicts + [False] * len(tests))[: len(tests)]

    def _replies(self, tests: Sequence[CallTest], limits: Limits) -> tuple[list[bool], bool]:
        """Which of the tests that were answered passed, and whether time sufficed for all; a reply
        is only a value."""
        requests = "".join(repr(test.expression) + "\n" for test in tests)
        files = self._files()
        command = ["python", "-S", "code_inside.py", "solve"]
        result = self.sandbox.run(command, files=files, stdin=requests, limits=limits)
        replies = result.stdout.split("\n")[:-1]
        passed = [
            holds(test, reply, self.tolerance) for test, reply in zip(tests, replies, strict=False)
        ]
        return passed, result.stop_reason != "timeout"

    def _scripts(self, scripts: Sequence[str]) -> list[bool]:
        """Tests and solution in two sandboxes; the verdicts are the testers', on a stream that the
        solution has not."""
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
        entry_point, helpers = self.columns.entry_point, self.columns.helpers
        names = {
            name for script in scripts for name in code_asserts.needed(script, entry_point, helpers)
        }
        imports = [f"import {name}" for script in scripts for name in code_asserts.modules(script)]
        given = {
            "scripts": [code_asserts.with_copies(script) for script in scripts],
            "before": [*imports, *helpers],
            "names": sorted(names | {entry_point} - {""}),
            "entry_point": entry_point,
        }
        files = {
            "code_inside.py": _text_of(INSIDE),
            "pytest.py": _text_of(PYTEST),
            "tests.json": json.dumps(given),
        }
        tester = (["python", "-S", "code_inside.py", "test"], files)
        solver = (["python", "-S", "code_inside.py", "solve"], self._files())
        result, _ = self.sandbox.converse(tester, solver, limits=limits)
        reports = (
            json.loads(result.stderr)
            if result.exit_code == 0
            else [["no verdict", ""]] * len(scripts)
        )
        for script, report in zip(scripts, reports, strict=True):
            if report and code_asserts.is_missing(script, report[1]):
                raise UserError(
                    "a test script cannot run, whatever the solution",
                    where=f"problem {self.uid}: {script.strip()[:200]}",
                    found=report[0],
                    expected="a script of Python's own library, pytest's basics and the solution's names",
                    next="mend the row, or leave it out",
                )
        return [not report for report in reports]

    def _files(self) -> dict[str, str]:
        types = sorted(code_asserts.free(self.code) & set(typing.__all__))
        imports = [
            *self.columns.imports.splitlines(),
            *(f"from typing import {name}" for name in types),
        ]
        before = "".join(f"{statement!r}\n" for statement in (*imports, *self.columns.helpers))
        return {"code_inside.py": _text_of(INSIDE), "before.txt": before, "solution.py": self.code}


@cache
def _text_of(program: Path) -> str:
    return program.read_text(encoding="utf-8")
