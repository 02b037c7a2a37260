"""A reader of test scripts: finds scripts of only asserts of `call == constant`, and needed names.

Such an assert is taken apart here, so that the call goes to the solution and the constant does not.
A script is taken apart as a whole or not at all, and only if its calls certainly hold nothing of
the expected value: no comparison, no name of the script's own.

Runs nothing, and knows neither sandboxes nor scores.

    python -c "from tandem.rewards.code_asserts import calls; print(calls('assert f([1]) == 2'))"
"""

import ast
import builtins
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tandem.rewards.code_inside import COPY

WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "": lambda value: value,
    "set": set,
    "frozenset": frozenset,
    "sorted": sorted,
    "list": list,
    "tuple": tuple,
    "len": len,
    "str": str,
}
# Applied on the solution's side before the wrapper: makes plain data of an iterator or an object.
INNER = {**dict.fromkeys(("set", "frozenset", "sorted", "list", "tuple"), "list"), "str": "str"}
# Built-ins that a call's arguments may use.
MAKERS = {"set", "frozenset", "list", "tuple", "dict", "float", "int", "str", "bytes"}
MAKERS |= {"complex", "range"}
PLAIN: tuple[type[ast.AST], ...] = (ast.Call, ast.Name, ast.Attribute, ast.Constant, ast.List)
PLAIN += (ast.Tuple, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp, ast.operator, ast.unaryop)
PLAIN += (ast.keyword, ast.Starred, ast.expr_context)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTest:
    """A call of the solution, and its expected value.

    Example: `assert set(f([1])) == {2}` is CallTest(expression="f([1])", expected=({2},),
    wrapper="set")
    """

    expression: str
    expected: tuple[Any, ...]  # any of them will do
    wrapper: str = ""  # applied to the value before the comparison
    # json: tuples are lists, keys are strings
    compare: Literal["equal", "is", "truth", "json"] = "equal"


def calls(script: str, entry_point: str = "", before: Sequence[str] = ()) -> list[CallTest]:
    """Read the asserts of a script; none if there is anything else in it.

    entry_point: the function under HumanEval's `check(candidate)`; with one, no other call is the
    solution's. before: statements that make names for the script.
    """
    tree = ast.parse(script)
    of_solution = _imported(tree)
    made = (bound(tree) | bound(ast.parse("\n".join(before))) | set(modules(script))) - of_solution
    if entry_point or of_solution:
        made |= _names(tree) - {_root(entry_point)} - of_solution - MAKERS
    tests = []
    for statement in _statements(tree.body, entry_point):
        match statement:
            case ast.Assert():
                test = _condition(statement.test, made)
                if test is None:
                    return []
                tests.append(test)
            case ast.Import(names) if any(alias.name == "solution" for alias in names):
                return []
            case ast.Import() | ast.ImportFrom() | ast.Pass() | ast.Expr(ast.Constant()):
                pass
            case _ if not _is_metadata(statement):
                return []
    return tests


def _is_metadata(statement: ast.stmt) -> bool:
    """Recognize HumanEval's `METADATA = {...}`."""
    match statement:
        case ast.Assign([ast.Name(name)]):
            return name.isupper()
    return False


def _statements(body: list[ast.stmt], entry_point: str) -> Iterator[ast.stmt]:
    """List the statements of a script, with the body of `check` in its place, and without its
    call."""
    for statement in body:
        match statement:
            case ast.FunctionDef("check", ast.arguments([], [ast.arg(name)], None)) if entry_point:
                yield from (_Renamed(name, entry_point).visit(inner) for inner in statement.body)
            case ast.Expr(ast.Call(ast.Name("check"), [ast.Name(name)], [])) if (
                entry_point and name == entry_point
            ):
                pass
            case _:
                yield statement


class _Renamed(ast.NodeTransformer):
    def __init__(self, old: str, new: str):
        self.old, self.new = old, new

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.parse(self.new, mode="eval").body if node.id == self.old else node


def _condition(node: ast.expr, made: set[str]) -> CallTest | None:
    """Read the test in an assert's condition; None unless it is of a call and a constant."""
    match node:
        case ast.Compare(left, [ast.Eq()], [right]):
            return _comparison(left, right, made) or _comparison(right, left, made)
        case ast.Compare(left, [ast.Is()], [ast.Constant(None | True | False as value)]):
            source = _call(left, made)
            return CallTest(expression=source, expected=(value,), compare="is") if source else None
        case ast.UnaryOp(ast.Not(), inner):
            return _truth(inner, made, False)
    return _truth(node, made, True)


def _truth(node: ast.expr, made: set[str], expected: bool) -> CallTest | None:
    """Read the test of a call's own truth. A call around another, `same(f(1), 2)`, could hold the
    expected value, and is refused."""
    if any(_root_name(call) not in MAKERS for call in _calls_in_arguments(node)):
        return None
    source = _call(node, made)
    if not source:
        return None
    return CallTest(expression=f"bool({source})", expected=(expected,), compare="truth")


def _comparison(call: ast.expr, constant: ast.expr, made: set[str]) -> CallTest | None:
    wrapper, inner = _unwrapped(call, made)
    source = _call(inner, made)
    if not source:
        return None
    try:
        expected = _constant(constant, made)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    if wrapper in INNER:
        source = f"{INNER[wrapper]}({source})"
    return CallTest(expression=source, expected=(expected,), wrapper=wrapper)


def _unwrapped(node: ast.expr, made: set[str]) -> tuple[str, ast.expr]:
    match node:
        case ast.Call(ast.Name(name), [inner], []) if name in WRAPPERS and name not in made:
            return name, inner
    return "", node


def _constant(node: ast.expr, made: set[str]) -> Any:
    wrapper, inner = _unwrapped(node, made)
    if wrapper:
        return WRAPPERS[wrapper](_constant(inner, made))
    return ast.literal_eval(node)


def _call(node: ast.expr, made: set[str]) -> str:
    """Return the source of a call of something that only the solution can have made, or ""."""
    root = _root_name(node)
    if not isinstance(node, ast.Call) or not root or root in vars(builtins):
        return ""
    foreign = _names(node) & (made | (vars(builtins).keys() - MAKERS))
    plain = all(isinstance(part, PLAIN) for part in ast.walk(node))
    return ast.unparse(node) if plain and not foreign else ""


def _calls_in_arguments(node: ast.expr) -> Iterator[ast.Call]:
    while isinstance(node, ast.Call | ast.Attribute):
        if isinstance(node, ast.Call):
            for argument in (*node.args, *node.keywords):
                yield from (part for part in ast.walk(argument) if isinstance(part, ast.Call))
        node = node.func if isinstance(node, ast.Call) else node.value


def _root_name(node: ast.expr) -> str:
    """Return the root of a chain of calls and attributes, "Solution" of `Solution().f(1)`, or
    ""."""
    while isinstance(node, ast.Call | ast.Attribute):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _root(entry_point: str) -> str:
    return _root_name(ast.parse(entry_point, mode="eval").body) if entry_point else ""


def _imported(tree: ast.AST) -> set[str]:
    """List the names that a script imports from the module `solution`, or reads from it."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom("solution", aliases):
                names |= {alias.name for alias in aliases} - {"*"}
            case ast.Attribute(ast.Name("solution"), name):
                names.add(name)
    return names


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
    if imported := _imported(tree):
        return imported
    if entry_point:
        return {_root(entry_point)}
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
            (around if inner else other).add(_root_name(node.test))
            other |= inner
    return free - (around - other)


def is_missing(script: str, name: str) -> bool:
    """Tell whether a missing name is the script's mistake: it never makes the name, and needs it
    for every answer of the solution.

    A name made in the script, in a loop over an empty answer for instance, is missing because of
    the solution, and so is one that only a branch reads, `if f(1) != 2: fail()`.
    """
    tree = ast.parse(script)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    sources = {node.module or "" for node in imports if isinstance(node, ast.ImportFrom)}
    sources |= {alias.name for node in imports for alias in node.names}
    modules = {part for source in sources for part in (source, source.partition(".")[0])}
    made = bound(tree).difference(*map(bound, imports))
    return bool(name) and name not in made and name in modules | set(_always_read(tree))


def _always_read(node: ast.AST) -> Iterator[str]:
    """List the names read outside of branches, error handlers and the messages of asserts."""
    if isinstance(node, ast.Name):
        yield node.id
    skipped = {ast.If: ("body", "orelse"), ast.IfExp: ("body", "orelse"), ast.Assert: ("msg",)}
    for field, value in ast.iter_fields(node):
        if field in skipped.get(type(node), ()):
            continue
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.AST) and not isinstance(part, ast.ExceptHandler):
                yield from _always_read(part)


def free(program: str) -> set[str]:
    """List the names that a program reads and does not make; none if it cannot be parsed."""
    try:
        tree = ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    return _names(tree) - bound(tree)


def modules(script: str) -> list[str]:
    """List modules of Python's library that a script uses, `math.pi`, and does not import."""
    tree = ast.parse(script)
    used = {
        node.value.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    return sorted((used - _called(tree) - bound(tree)) & sys.stdlib_module_names)


def with_copies(script: str) -> str:
    """Return the script, with copied arguments for each call whose argument the same comparison, or
    the call around it, reads again: else `f(a) == sorted(a)` would hold for a solution that empties
    a."""
    tree, to_copy = ast.parse(script), dict[int, ast.Call]()
    for node in ast.walk(tree):
        parts: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.Call):
            parts = [*node.args, *node.keywords]
        for part in parts:
            read = _names(*(other for other in parts if other is not part))
            calls = (inner for inner in ast.walk(part) if isinstance(inner, ast.Call))
            to_copy |= {
                id(call): call for call in calls if _names(*call.args, *call.keywords) & read
            }
    for call in to_copy.values():
        call.func = ast.Call(ast.Name(COPY, ast.Load()), [call.func], [])
    return ast.unparse(tree) if to_copy else script


def _called(tree: ast.AST) -> set[str]:
    return {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }


def _names(*nodes: ast.AST) -> set[str]:
    return {node.id for each in nodes for node in ast.walk(each) if isinstance(node, ast.Name)}
