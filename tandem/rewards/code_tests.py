"""Reads the tests of a problem for the reward `code`, and the program of a completion.

Forms of `tests` in a problem's metadata (or, as JSON, in its answer):

    [{"input": "1 2\\n", "output": "3\\n"}]                    a program's stdin and stdout
    [{"function": "add", "args": [1, 2], "expected": 3}]      a function; also `kwargs`, and e.g.
                                                              "Solution().add"
    {"inputs": [...], "outputs": [...], "fn_name": "add"}     both in APPS' columns; without fn_name
                                                              a program
    [{"input": "1\\n2", "output": "3", "testtype": "functional"}]     LiveCodeBench's: calls the
                                                              function `func_name`
    ["assert add(1, 2) == 3"]                                 scripts, as MBPP's `test_list` and
                                                              HumanEval's `test`

MBPP's `test_imports` and `test_setup_code` come before each script. Runs nothing, and knows no
sandbox.

    python -c "from tandem.rewards.code_tests import extract_code; \
        print(extract_code('So:\\n```python\\nprint(1)\\n```'))"
"""

import ast
import json
from dataclasses import dataclass
from typing import Any

from tandem.rewards import code_asserts
from tandem.rewards.code_asserts import CallTest
from tandem.runtime.errors import UserError
from tandem.types import Problem

TEXT_CHARS = 200_000  # of a completion; the program is near its end
PYTHON = ("python", "python3", "py")  # labels of a fenced block that holds a program


@dataclass(frozen=True, slots=True, kw_only=True)
class IoTest:
    """A program's stdin, and the stdout expected of it. Example: IoTest(input="1 2\\n",
    output="3\\n")"""

    input: str
    output: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A test that is itself a program. Example: Script(text="assert abs(f(1) - 2) < 0.1")"""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The columns of a problem, beside its tests, that they are read and run with."""

    entry_point: str
    function: str  # called by LiveCodeBench's functional tests
    imports: str  # MBPP's test_imports
    setup: str  # these and MBPP's test_setup_code: the beginning of every script
    helpers: tuple[str, ...]  # imports and finished functions of the problem's text


Test = IoTest | CallTest | Script


def extract_code(completion: str) -> str:
    """The last fenced block labelled as Python, else the last without a label, else the whole text.

    A truncated block counts. Text before a closing </think> is a draft, and does not.
    """
    text = completion.rpartition("</think>")[2][-TEXT_CHARS:]
    blocks: list[tuple[str, list[str]]] = []
    inside = False
    # not splitlines, which cuts at form feeds in strings too
    for line in text.replace("\r\n", "\n").split("\n"):
        if line.lstrip().startswith("```"):
            inside = not inside
            if inside:
                blocks.append((line.strip().strip("`").strip().lower(), []))
        elif inside:
            blocks[-1][1].append(line)
    programs = [lines for label, lines in blocks if label in PYTHON] or [
        lines for label, lines in blocks if not label
    ]
    return "\n".join(programs[-1]) + "\n" if programs else text


def read_tests(problem: Problem) -> tuple[list[Test], Columns]:
    """The tests of a problem, at least one, and its other columns; raises UserError."""
    columns_with_tests = [problem.metadata.get(k) for k in ("tests", "test_list", "test")]
    given = next(filter(None, columns_with_tests), problem.answer)
    try:
        columns = _columns(problem)
        tests = _tests(_unquoted(given), columns)
    except (KeyError, TypeError, ValueError, SyntaxError) as error:
        found = f"{type(error).__name__}: {error} in {str(given)[:200]}"
        raise _unreadable(problem, found) from error
    if not tests:
        raise _unreadable(problem, str(given)[:200] or "nothing")
    return tests, columns


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
    prompts. A solution may call the functions; a test that does calls these, not the solution's."""
    prompts = [str(m.get("content") or "") for m in problem.messages if m.get("role") == "user"]
    try:
        body = ast.parse(extract_code("".join(prompts[-1:]))).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    return tuple(ast.unparse(statement) for statement in body if _is_helper(statement, entry_point))


def _is_helper(statement: ast.stmt, entry_point: str) -> bool:
    match statement:
        case ast.Import() | ast.ImportFrom():
            return True
        case ast.FunctionDef(name, _, body) | ast.ClassDef(name, _, _, body):
            stub = all(isinstance(line, ast.Pass | ast.Expr) for line in body)
            return not stub and name != entry_point
    return False


def _unquoted(given: Any) -> Any:
    """Parse a string that is JSON of a list or an object; a script stays as it is."""
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
    args, kwargs = list(given.get("args") or []), dict(given.get("kwargs") or {})
    return _call(str(name), args, kwargs, [given["expected"]])


def _column(name: str | None, one: Any, other: Any) -> Test:
    """A test in APPS' columns, where a returned value may stand in a list of its own."""
    if not name:
        return IoTest(input=_text(one), output=_text(other))
    expected = [other, other[0]] if isinstance(other, list) and len(other) == 1 else [other]
    return _call(name, list(one), {}, expected)


def _text(given: Any) -> str:
    return "".join(f"{line}\n" for line in given) if isinstance(given, list) else str(given)


def _call(name: str, args: list[Any], kwargs: dict[str, Any], expected: list[Any]) -> CallTest:
    ast.parse(name, mode="eval")
    arguments = ", ".join([repr(arg) for arg in args] + [f"**{kwargs!r}"] * bool(kwargs))
    return CallTest(expression=f"{name}({arguments})", expected=tuple(expected), compare="json")


def _unreadable(problem: Problem, found: str) -> UserError:
    return UserError(
        "a problem for the reward `code` has no tests that can be read",
        where=f"problem {problem.uid}, metadata tests, test_list or test, or its answer",
        found=found,
        expected='[{"input": ..., "output": ...}], '
        '[{"function": ..., "args": [...], "expected": ...}] or asserts',
        next="see docs/sandbox.md",
    )
