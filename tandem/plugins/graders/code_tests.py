"""A reader of a problem's tests for the reward `code`, and of a completion's program.

Forms of `tests` in a problem's metadata (or, as JSON, in its answer):

    [{"input": "1 2\\n", "output": "3\\n"}]                    a program's stdin and stdout
    [{"function": "add", "args": [1, 2], "expected": 3}]      a function; also `kwargs`, and e.g.
                                                              "Solution().add"
    {"inputs": [...], "outputs": [...], "fn_name": "add"}     both in APPS' columns; without fn_name
                                                              a program
    [{"input": "1\\n2", "output": "3", "testtype": "functional"}]     LiveCodeBench's: calls the
                                                              function `func_name`; or with the
                                                              key `fn_name` in its row
    ["assert add(1, 2) == 3"]                                 scripts, as MBPP's `test_list` and
                                                              HumanEval's `test`

MBPP's `test_imports` and `test_setup_code` come before each script. Asserts of `call == constant`
are taken apart: the call goes to the solution and the constant does not. A script is taken apart as
a whole or not at all, and only if its calls are of constants; any other is prepared for a process
without the solution. Runs nothing, and knows no sandbox.

    python -c "from tandem.plugins.graders.code_tests import extract_code; \
        print(extract_code('So:\\n```python\\nprint(1)\\n```'))"
"""

import ast
import builtins
import json
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from symtable import symtable
from typing import Any, Literal

from tandem.plugins.graders.code_inside import FLUSH, SAME
from tandem.runtime.errors import UserError
from tandem.types import Problem

TEXT_CHARS = 200_000  # of a completion; the program is near its end
_FENCE = re.compile(r"^([ \t]*)(`{3,}|~{3,})([^`\n]*)$", re.MULTILINE)
_PYTHON = re.compile(r"[{.\s]*(python|py)3?(?![\w+-])", re.IGNORECASE)  # a label of a program
_CLOSING = re.compile(r"\s*|\s+(?![{.\s]*py)\S.*")  # behind a closing fence: no label of a program
CLOSINGS = 16  # fences tried as the end of a program, as some may stand in its docstrings


@dataclass(frozen=True, slots=True, kw_only=True)
class IoTest:
    """A program's stdin, and the stdout expected of it. Example: IoTest(input="1 2\\n",
    output="3\\n")"""

    input: str
    output: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTest:
    """A call of the solution, and its expected value.

    Example: `assert f([1]) == 2` is CallTest(expression="f([1])", expected=(2,))
    """

    expression: str
    expected: tuple[Any, ...]  # any of them will do
    # json: tuples are lists, keys are strings
    compare: Literal["equal", "json"] = "equal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A test that is itself a program. Example: Script(text="assert abs(f(1) - 2) < 0.1")"""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The columns of a problem for reading and running its tests."""

    entry_point: str
    function: str  # called by LiveCodeBench's functional tests
    imports: str  # MBPP's test_imports
    setup: str  # these and MBPP's test_setup_code: the beginning of every script
    helpers: tuple[str, ...]  # imports and finished functions of the problem's text


Test = IoTest | CallTest | Script


def extract_code(completion: str) -> str:
    """Return the last fenced block labelled as Python, else the last one unlabelled, else all text.

    A truncated block counts. Text before a closing </think> is a draft, and does not. A fence in a
    docstring does not end a program.
    """
    text = completion[-TEXT_CHARS:].replace("\r\n", "\n").rpartition("</think>")[2]
    blocks, position = list[tuple[str, str]](), 0
    while opening := _FENCE.search(text, position):
        program, position = _block(text, opening)
        blocks.append((opening[3].strip(), program))
    programs = [program for label, program in blocks if _PYTHON.match(label)] or [
        program for label, program in blocks if not label
    ]
    return programs[-1].removesuffix("\n") + "\n" if programs else text


def _block(text: str, opening: re.Match[str]) -> tuple[str, int]:
    """Return the program behind a fence, without the fence's indentation, and the position of its
    end: the first fence that leaves a program, else the first one, else the text's end."""
    indentation = re.compile(rf"^[ \t]{{0,{len(opening[1])}}}", re.MULTILINE)
    closings = (
        closing
        for closing in _FENCE.finditer(text, opening.end())
        if closing[2].startswith(opening[2]) and _CLOSING.fullmatch(closing[3])
    )
    found = [
        (indentation.sub("", text[opening.end() + 1 : closing.start()]), closing.end())
        for closing in islice(closings, CLOSINGS)
    ] or [(indentation.sub("", text[opening.end() + 1 :]), len(text))]
    return next((block for block in found if _is_program(block[0])), found[0])


def _is_program(text: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


@contextmanager
def unlimited_digits() -> Iterator[None]:
    """Read integers of any length: Python refuses those of more than 4,300 digits."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(before)


def read_tests(problem: Problem) -> tuple[list[Test], Columns]:
    """Read the tests of a problem, at least one, and its other columns; raises UserError."""
    columns_with_tests = [problem.metadata.get(k) for k in ("tests", "test_list", "test")]
    column = next(filter(None, columns_with_tests), problem.answer)
    found = str(column)[:200]
    try:
        with unlimited_digits():
            columns = _columns(problem)
            tests = _tests(_unquoted(column), columns)
    except (KeyError, TypeError, ValueError, SyntaxError) as error:
        tests, found = [], f"{type(error).__name__}: {error} in {str(column)[:200]}"
    if not tests:
        raise UserError(
            "a problem for the reward `code` has no tests that can be read",
            where=f"problem {problem.uid}, metadata tests, test_list or test, or its answer",
            found=found or "nothing",
            expected='[{"input": ..., "output": ...}], '
            '[{"function": ..., "args": [...], "expected": ...}] or asserts',
            next="see docs/guide/sandbox.md",
        )
    return tests, columns


def _columns(problem: Problem) -> Columns:
    metadata, entry_point = problem.metadata, str(problem.metadata.get("entry_point") or "")
    lines = metadata.get("test_imports") or []
    imports = "".join(f"{line}\n" for line in ([lines] if isinstance(lines, str) else lines))
    nested = metadata.get("metadata")  # LiveCodeBench's column, JSON
    more = (
        json.loads(nested)
        if isinstance(nested, str) and nested.lstrip().startswith("{")
        else metadata
    )
    return Columns(
        entry_point=entry_point,
        function=str(more.get("func_name") or entry_point),
        imports=imports,
        setup=f"{imports}{metadata.get('test_setup_code') or ''}\n".lstrip("\n"),
        helpers=_helpers(problem, entry_point) if entry_point else (),
    )


def _helpers(problem: Problem, entry_point: str) -> tuple[str, ...]:
    """List statements of code in a problem's text for its tests, as in HumanEval's prompts. A
    solution may call the functions; a test that does calls these, not the solution's."""
    prompts = [str(m.get("content") or "") for m in problem.messages if m.get("role") == "user"]
    try:
        body = ast.parse(extract_code("".join(prompts[-1:]))).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    helpers = []
    for statement in body:
        match statement:
            case ast.Import() | ast.ImportFrom():
                helpers.append(ast.unparse(statement))
            case ast.FunctionDef(name, _, lines) | ast.ClassDef(name, _, _, lines):
                stub = all(isinstance(line, ast.Pass | ast.Expr) for line in lines)
                if not stub and name != entry_point:
                    helpers.append(ast.unparse(statement))
    return tuple(helpers)


def _unquoted(value: Any) -> Any:
    """Parse a string that is JSON of a list or an object; a script stays as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        return json.loads(value)
    return value


def _tests(column: Any, columns: Columns) -> list[Test]:
    match column:
        case str() if column.strip():
            script = columns.setup + column
            found = calls(script, columns.entry_point, columns.helpers)
            return [*found] if found else [Script(text=script)]
        case {"inputs": list(inputs), "outputs": list(outputs)} if len(inputs) == len(outputs):
            name = column.get("fn_name")
            return [_column(name, one, other) for one, other in zip(inputs, outputs, strict=True)]
        case {"input": _, "output": _} | {"expected": _}:
            return [_test(column, columns)]
        case list() | tuple():
            return [test for item in column for test in _tests(_unquoted(item), columns)]
    raise ValueError("no form of tests")


def _test(row: dict[str, Any], columns: Columns) -> Test:
    function = row.get("fn_name") or columns.function
    if row.get("testtype") == "functional" or row.get("fn_name"):
        one, other = row["input"], row["output"]
        if isinstance(one, list):
            return _column(function, one, other)
        args = [json.loads(line) for line in str(one).split("\n") if line.strip()]
        expected = json.loads(other) if isinstance(other, str) else other
        return _call(function, args, {}, [expected])
    if "input" in row:
        return IoTest(input=_text(row["input"]), output=_text(row["output"]))
    name = row.get("function") or row.get("entry_point") or columns.entry_point
    if not name:
        raise KeyError("function")
    args, kwargs = list(row.get("args") or []), dict(row.get("kwargs") or {})
    return _call(str(name), args, kwargs, [row["expected"]])


def _column(name: str | None, one: Any, other: Any) -> Test:
    """Read a test in APPS' columns, in which a returned value may stand in a list of its own."""
    if not name:
        return IoTest(input=_text(one), output=_text(other))
    expected = [other, other[0]] if isinstance(other, list) and len(other) == 1 else [other]
    return _call(name, list(one), {}, expected)


def _text(value: Any) -> str:
    return "".join(f"{line}\n" for line in value) if isinstance(value, list) else str(value)


def _call(name: str, args: list[Any], kwargs: dict[str, Any], expected: list[Any]) -> CallTest:
    ast.parse(name, mode="eval")
    arguments = ", ".join([repr(arg) for arg in args] + [f"**{kwargs!r}"] * bool(kwargs))
    return CallTest(expression=f"{name}({arguments})", expected=tuple(expected), compare="json")


# ---------------------------------------------------------------- scripts


def calls(script: str, entry_point: str = "", before: Sequence[str] = ()) -> list[CallTest]:
    """Read the asserts of a script; none if there is anything else in it.

    entry_point: the function under HumanEval's `check(candidate)`; with one, no other call is the
    solution's. before: statements that make names for the script.
    """
    tests, tree = list[CallTest](), ast.parse(script)
    others = made("\n".join((script, *before))) | vars(builtins).keys() | sys.stdlib_module_names
    for statement in _statements(tree.body, entry_point):
        match statement:
            case ast.Assert(ast.Compare(left, [ast.Eq()], [right])):
                found = _assert_test(left, right) or _assert_test(right, left)
                name = re.match(r"\w+", found.expression)[0] if found else ""  # type: ignore[index]
                if not found or name in others or (entry_point and name not in entry_point):
                    return []
                tests.append(found)
            case ast.Import() | ast.ImportFrom() if imports_solution(script):
                return []
            case ast.Import() | ast.ImportFrom() | ast.Pass() | ast.Expr(ast.Constant()):
                pass
            case ast.Assign([ast.Name(name)]) if name.isupper():
                pass  # HumanEval's METADATA
            case _:
                return []
    return tests


def _statements(body: list[ast.stmt], entry_point: str) -> Iterator[ast.stmt]:
    """List the statements of a script, with the body of `check` in its place, and without its
    call."""
    for statement in body:
        match statement:
            case ast.FunctionDef("check", ast.arguments([], [ast.arg(name)], None)) if entry_point:
                for node in ast.walk(statement):
                    if isinstance(node, ast.Name) and node.id == name:
                        node.id = entry_point
                yield from statement.body
            case ast.Expr(ast.Call(ast.Name("check"), [ast.Name(name)], [])) if (
                entry_point and name == entry_point
            ):
                pass
            case _:
                yield statement


def _assert_test(call: ast.expr, constant: ast.expr) -> CallTest | None:
    """Read the test of a call such as `Solution().f(1)`, and a constant."""
    node, given = call, [constant]
    while isinstance(node, ast.Call | ast.Attribute):
        if isinstance(node, ast.Call):
            given += [*node.args, *(keyword.value for keyword in node.keywords)]
        node = node.func if isinstance(node, ast.Call) else node.value
    if not isinstance(call, ast.Call) or not isinstance(node, ast.Name):
        return None
    try:
        expected, *_ = [ast.literal_eval(value) for value in given]
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return CallTest(expression=ast.unparse(call), expected=(expected,))


def made(script: str) -> set[str]:
    """List the names that a script assigns, defines or imports for all of it."""
    found, tables = set[str](), [symtable(script, "test", "exec")]
    for table in tables:
        symbols = [one for one in table.get_symbols() if one.is_assigned() or one.is_imported()]
        found |= {one.get_name() for one in symbols if one.is_global()}
        tables += table.get_children()
    return found


def imports_solution(script: str) -> bool:
    """Tell whether a script imports its names from the module `solution`."""
    return bool(re.search(r"^\s*(import solution\b|from solution import\b(?! \*))", script, re.M))


def judges(script: str, before: Sequence[str] = ()) -> set[str]:
    """List functions that an assert calls around a call of the solution, `same(f(1), 2)`, and that
    the script lacks: a solution cannot stand in for them."""
    own = made("\n".join((script, *before))) | vars(builtins).keys()
    around, other = set[str](), set[str]()
    for node in ast.walk(ast.parse(script)):
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Call):
            inside = [part for arg in node.test.args for part in ast.walk(arg)]
            inner = {part.id for part in inside if isinstance(part, ast.Name)} - own
            name = node.test.func.id if isinstance(node.test.func, ast.Name) else ""
            (around if inner else other).add(name)
            other |= inner
    return around - other - {""}


# What works only in the process of the solution, or with pytest itself.
ELSEWHERE = re.compile(
    r"\b(import|from) (asyncio|concurrent|doctest|gc|importlib|inspect|multiprocessing|pickle|runpy"
    r"|shutil|subprocess|tempfile|threading|types|weakref)\b|\basync def\b|\bunittest\.(mock|Isolat"
    r"edAsyncioTestCase)\b|\bfrom unittest import .*\bmock\b|\bredirect_std(err|out)\b"
    r"|\bwarnings\.catch_warnings\b"
    r"|\bos\.(chdir|environ|getenv|makedirs|mkdir|putenv|remove|unlink)\b"
    r"|\bpytest\.(?!(raises|main)\b)[\w.]+|\bfrom pytest import (?!raises\b)\w+"
)


def elsewhere(script: str) -> str:
    """Return what a script uses of the solution's process, or of pytest, else ""."""
    found = ELSEWHERE.search(ast.unparse(ast.parse(script)))
    return f"uses {found[0]}" if found else ""


def across_the_line(script: str) -> str:
    """Return the script for a process without the solution: Line.same takes the place of `is`, and
    Line.flush comes before each statement."""
    tree = ast.parse(script)
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left, [ast.Is()], [right]) if not isinstance(right, ast.Constant):
                node.left, node.comparators = _call_of(SAME, left, right), [ast.Constant(True)]
            case ast.Call(ast.Attribute(_, "assertIs"), [left, right, *more]):
                node.args = [_call_of(SAME, left, right), ast.Constant(True), *more]
    for node in [*ast.walk(tree)]:
        for field in ("body", "orelse", "finalbody"):
            if isinstance(block := getattr(node, field, None), list):
                setattr(node, field, [part for statement in block for part in _flushed(statement)])
    return ast.unparse(ast.fix_missing_locations(tree))


def _flushed(statement: ast.stmt) -> list[ast.stmt]:
    is_import = isinstance(statement, ast.Import | ast.ImportFrom)  # __future__ comes first
    return [statement] if is_import else [ast.Expr(_call_of(FLUSH)), statement]


def _call_of(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), [*arguments], [])
