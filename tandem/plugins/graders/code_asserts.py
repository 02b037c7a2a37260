"""A reader of test scripts: finds scripts of only asserts of `call == constant`, and needed names.

Such an assert is taken apart here, so that the call goes to the solution and the constant does not.
A script is taken apart as a whole or not at all, and only if its calls are of constants.

Runs nothing, and knows neither sandboxes nor scores.

    python -c "from tandem.plugins.graders.code_asserts import calls; print(calls('f(1) == 2'))"
"""

import ast
import builtins
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tandem.plugins.graders.code_inside import COPY, SAME


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
    names, tests = needed(script, entry_point, before), list[CallTest]()
    for statement in _statements(ast.parse(script).body, entry_point):
        match statement:
            case ast.Assert(ast.Compare(left, [ast.Eq()], [right])):
                found = _test(left, right, names) or _test(right, left, names)
                if not found:
                    return []
                tests.append(found)
            case ast.Import(names_of) if any(alias.name == "solution" for alias in names_of):
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


def _test(call: ast.expr, constant: ast.expr, names: set[str]) -> CallTest | None:
    """Read the test of a call of the solution, such as `Solution().f(1)`, and a constant."""
    node, given = call, [constant]
    while isinstance(node, ast.Call | ast.Attribute):
        if isinstance(node, ast.Call):
            given += [*node.args, *(keyword.value for keyword in node.keywords)]
        node = node.func if isinstance(node, ast.Call) else node.value
    if not isinstance(call, ast.Call) or not isinstance(node, ast.Name) or node.id not in names:
        return None
    try:
        expected, *_ = [ast.literal_eval(value) for value in given]
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return CallTest(expression=ast.unparse(call), expected=(expected,))


def _paths(tree: ast.AST) -> dict[str, str]:
    """Map the names that a script imports to where they come from: {"patch":
    "unittest.mock.patch"}."""
    paths: dict[str, str] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Import(aliases):
                for alias in aliases:
                    top = alias.name.partition(".")[0]
                    paths[alias.asname or top] = alias.name if alias.asname else top
            case ast.ImportFrom(module, aliases):
                for alias in aliases:
                    paths[alias.asname or alias.name] = f"{module}.{alias.name}"
    return paths


def _path(node: ast.AST, paths: dict[str, str]) -> str:
    """Return the path behind an import that a name or an attribute reads, else ""."""
    match node:
        case ast.Name(name):
            return paths.get(name, "")
        case ast.Attribute(value, name):
            start = _path(value, paths)
            return start and f"{start}.{name}"
    return ""


def bound(tree: ast.AST) -> set[str]:
    """List every name that a script assigns, defines or imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(name, ast.Store() | ast.Del()) | ast.arg(name):
                names.add(name)
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                names.add(name)
            case ast.Import(aliases) | ast.ImportFrom(_, aliases):
                names |= {(alias.asname or alias.name).split(".")[0] for alias in aliases}
            case (
                ast.ExceptHandler(_, str(name))
                | ast.MatchAs(_, str(name))
                | ast.MatchStar(str(name))
                | ast.MatchMapping(_, _, str(name))
            ):
                names.add(name)
    return names


def needed(script: str, entry_point: str = "", before: Sequence[str] = ()) -> set[str]:
    """List a script's names for the solution to make: its imports from it, else the entry point,
    else the names that it reads and nothing else makes.

    A solution cannot stand in for constants, Python's own names and modules, names of the problem's
    text, and functions that an assert calls around a call, `same(f(1), 2)`.
    """
    tree = ast.parse(script)
    paths = _paths(tree)  # names that it imports from the module `solution`, or reads from it
    reading = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute | ast.Name))
    found = {_path(node, paths) for node in reading} | set(paths.values())
    if imported := {p.split(".")[1] for p in found if p.startswith("solution.")} - {"*"}:
        return imported
    if entry_point:
        return _names(ast.parse(entry_point))
    read = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    foreign = (
        bound(tree)
        | bound(ast.parse("\n".join(before)))
        | vars(builtins).keys()
        | set(modules(script))
    )
    constants = {name for name in read - _called(tree) if name.isupper()}
    free = {name for name in read - foreign - constants if not name.startswith("__")}
    around, other = set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Call):
            inner = _names(*node.test.args) & free
            (around if inner else other).update(_names(node.test.func))
            other |= inner
    return free - (around - other)


# What works only in the process of the solution, or with all of pytest.
ELSEWHERE = re.compile(
    r"(asyncio|concurrent|contextlib\.redirect_std(err|out)|doctest|gc|importlib|inspect|pickle"
    r"|multiprocessing|os\.(chdir|environ|getenv|makedirs|mkdir|putenv|remove|unlink)|runpy|shutil"
    r"|subprocess|tempfile|threading|types|unittest\.(mock|IsolatedAsyncioTestCase)|weakref"
    r"|warnings\.catch_warnings|pytest\.(?!(raises|approx|fail|main|mark)\b)\w+"
    r"|pytest\.mark\.(skip|skipif|usefixtures|xfail))(\.|$)"
)


def unsupported(script: str) -> Iterator[str]:
    """List what a script uses that no solution can give it: packages that the sandbox lacks, and
    the solution's process."""
    tree = ast.parse(script)
    paths = _paths(tree)
    for path in paths.values():
        if path.partition(".")[0] not in sys.stdlib_module_names | {"solution", "pytest"}:
            yield f"imports {path}"
    for node in ast.walk(tree):
        if ELSEWHERE.match(path := _path(node, paths)):
            yield f"uses {path}"
        if isinstance(node, ast.AsyncFunctionDef | ast.Await):
            yield "uses async"


def modules(script: str) -> list[str]:
    """List modules of Python's library that a script uses, `math.pi`, and does not import."""
    tree = ast.parse(script)
    used = {
        node.value.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    return sorted((used - _called(tree) - bound(tree)) & sys.stdlib_module_names)


def across_the_line(script: str) -> str:
    """Return the script for a process without the solution.

    It copies the arguments of each call whose argument is read again by a comparison of its result,
    or by the call around it: else `f(a) == sorted(a)` would hold for a solution that empties a. In
    `f(a) == a` the name means what the call left. Line.same takes the place of `is`.
    """
    tree, to_copy, assigned = ast.parse(script), dict[int, ast.Call](), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value:
            assigned.append((bound(node), node.value))
        if isinstance(node, ast.For | ast.comprehension):
            assigned.append((bound(node.target), node.iter))
    for node in ast.walk(tree):
        parts: list[ast.AST] = []
        compares = isinstance(node, ast.Compare)
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.Call):
            parts = [*node.args, *node.keywords]
            compares = isinstance(node.func, ast.Attribute) and node.func.attr.startswith("assert")
        for part in parts:
            rest = [other for other in parts if other is not part]
            others = _names(*rest)
            again = _names(*(o for o in rest if not (compares and isinstance(o, ast.Name))))
            for call in _results(part, assigned):
                # what was made of an argument before the call is no problem
                later = [v for made, v in assigned if v.lineno > call.lineno and made & others]
                if _names(*call.args, *call.keywords) & (again | _names(*later)):
                    to_copy[id(call)] = call
    for call in to_copy.values():
        call.func = ast.Call(ast.Name(COPY, ast.Load()), [call.func], [])
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left, [ast.Is()], [right]) if not isinstance(right, ast.Constant):
                node.left, node.comparators = _same(left, right), [ast.Constant(True)]
            case ast.Call(ast.Attribute(_, "assertIs"), [left, right, *more]):
                node.args = [_same(left, right), ast.Constant(True), *more]
    return ast.unparse(tree)


def _same(*sides: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(SAME, ast.Load()), [*sides], [])


def _results(part: ast.AST, assigned: Sequence[tuple[set[str], ast.expr]]) -> Iterator[ast.Call]:
    """List the calls whose results a part of a comparison has, itself or by its names. A name that
    is an index, `a[:n]`, is not its value."""
    pending, seen = [part], set[str]()
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Call):
            yield node
        if isinstance(node, ast.Name) and node.id not in seen:
            seen.add(node.id)
            pending += [value for made, value in assigned if node.id in made]
        pending += [node.value] if isinstance(node, ast.Subscript) else ast.iter_child_nodes(node)


def _called(tree: ast.AST) -> set[str]:
    return {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }


def _names(*nodes: ast.AST) -> set[str]:
    return {node.id for each in nodes for node in ast.walk(each) if isinstance(node, ast.Name)}
