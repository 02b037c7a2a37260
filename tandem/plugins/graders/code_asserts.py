"""A reader of test scripts: takes asserts of `call == constant` apart, and prepares other scripts
for a process without the solution.

Of such an assert the call goes to the solution and the constant does not. A script is taken apart
as a whole or not at all, and only if its calls are of constants.

Runs nothing, and knows neither sandboxes nor scores.

    python -c "from tandem.plugins.graders.code_asserts import calls; print(calls('f(1) == 2'))"
"""

import ast
import builtins
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from symtable import symtable
from typing import Any, Literal

from tandem.plugins.graders.code_inside import FLUSH, SAME


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTest:
    """A call of the solution, and its expected value.

    Example: `assert f([1]) == 2` is CallTest(expression="f([1])", expected=(2,))
    """

    expression: str
    expected: tuple[Any, ...]  # any of them will do
    # json: tuples are lists, keys are strings
    compare: Literal["equal", "json"] = "equal"


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
                found = _test(left, right) or _test(right, left)
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


def _test(call: ast.expr, constant: ast.expr) -> CallTest | None:
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
                node.left, node.comparators = _call(SAME, left, right), [ast.Constant(True)]
            case ast.Call(ast.Attribute(_, "assertIs"), [left, right, *more]):
                node.args = [_call(SAME, left, right), ast.Constant(True), *more]
    for node in [*ast.walk(tree)]:
        for field in ("body", "orelse", "finalbody"):
            if isinstance(block := getattr(node, field, None), list):
                setattr(node, field, [part for statement in block for part in _flushed(statement)])
    return ast.unparse(ast.fix_missing_locations(tree))


def _flushed(statement: ast.stmt) -> list[ast.stmt]:
    is_import = isinstance(statement, ast.Import | ast.ImportFrom)  # __future__ comes first
    return [statement] if is_import else [ast.Expr(_call(FLUSH)), statement]


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), [*arguments], [])
