"""Reads test scripts: which of them are nothing but asserts of `call == constant`, and which names they need.

Such an assert is taken apart here, so that the call goes to the solution and the constant does not. A script is taken
apart as a whole or not at all, and only where it is certain that a call holds nothing of what is expected: no
comparison, no name that the script itself has made.

It runs nothing, and knows neither sandboxes nor scores.

    python -c "from tandem.rewards.code_asserts import calls; print(calls('assert f([1]) == 2'))"
"""

import ast
import builtins
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "": lambda value: value, "set": set, "frozenset": frozenset, "sorted": sorted, "list": list, "tuple": tuple,
    "len": len, "str": str,
}  # fmt: skip
MAKERS = {"set", "frozenset", "list", "tuple", "dict", "float", "int", "str", "bytes", "complex", "range"}
PLAIN = (ast.Call, ast.Name, ast.Attribute, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp,
         ast.operator, ast.unaryop, ast.keyword, ast.Starred, ast.expr_context)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTest:
    """A call of the solution, and the value it should give.

    Example: `assert set(f([1])) == {2}` is CallTest(expression="f([1])", expected=({2},), wrapper="set")
    """

    expression: str
    expected: tuple[Any, ...]  # any of them will do
    wrapper: str = ""  # applied to the value before it is compared
    how: Literal["equal", "is", "truth", "json"] = "equal"  # json: tuples are lists, keys are strings


def calls(script: str, entry_point: str = "") -> list[CallTest]:
    """The asserts of a script; none if it is anything more. entry_point: whom HumanEval's `check(candidate)` is about."""
    tree = ast.parse(script)
    made = bound(tree)
    found = []
    for statement in _statements(tree.body, entry_point):
        match statement:
            case ast.Assert():
                test = _condition(statement.test, made)
                if test is None:
                    return []
                found.append(test)
            case ast.Import() | ast.ImportFrom() | ast.Pass() | ast.Expr(ast.Constant()):
                pass
            case _ if not _is_metadata(statement):
                return []
    return found


def _is_metadata(statement: ast.stmt) -> bool:
    """HumanEval's `METADATA = {...}`."""
    match statement:
        case ast.Assign([ast.Name(name)]):
            return name.isupper()
    return False


def _statements(body: list[ast.stmt], entry_point: str) -> Iterator[ast.stmt]:
    """The statements of a script, with those of `check` about the entry point in its place, and without a call of it."""
    for statement in body:
        match statement:
            case ast.FunctionDef("check", ast.arguments([], [ast.arg(name)], None)) if entry_point:
                yield from (_Renamed(name, entry_point).visit(inner) for inner in statement.body)
            case ast.Expr(ast.Call(ast.Name("check"), [ast.Name(name)], [])) if entry_point and name == entry_point:
                pass
            case _:
                yield statement


class _Renamed(ast.NodeTransformer):
    def __init__(self, old: str, new: str):
        self.old, self.new = old, new

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.parse(self.new, mode="eval").body if node.id == self.old else node


def _condition(node: ast.expr, made: set[str]) -> CallTest | None:
    """The test that an assert's condition is, if it is one of a call and a constant."""
    match node:
        case ast.Compare(left, [ast.Eq()], [right]):
            return _comparison(left, right, made) or _comparison(right, left, made)
        case ast.Compare(left, [ast.Is()], [ast.Constant(None | True | False as value)]):
            source = _call(left, made)
            return CallTest(expression=source, expected=(value,), how="is") if source else None
        case ast.UnaryOp(ast.Not(), inner):
            source = _call(inner, made)
            return CallTest(expression=source, expected=(False,), how="truth") if source else None
    source = _call(node, made)
    return CallTest(expression=source, expected=(True,), how="truth") if source else None


def _comparison(call: ast.expr, constant: ast.expr, made: set[str]) -> CallTest | None:
    wrapper, inner = _unwrapped(call, made)
    source = _call(inner, made)
    if not source:
        return None
    try:
        expected = _constant(constant, made)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
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
    """The source of a call of something that only the solution can have made; empty for any other expression."""
    root: ast.expr = node
    while isinstance(root, ast.Call | ast.Attribute):
        root = root.func if isinstance(root, ast.Call) else root.value
    if not isinstance(node, ast.Call) or not isinstance(root, ast.Name) or root.id in vars(builtins):
        return ""
    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    foreign = names & (made | (vars(builtins).keys() - MAKERS))
    plain = all(isinstance(part, PLAIN) for part in ast.walk(node))
    return ast.unparse(node) if plain and not foreign else ""


def bound(tree: ast.AST) -> set[str]:
    """Every name that a script gives a meaning to, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(name, ast.Store() | ast.Del()) | ast.arg(name):
                names.add(name)
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                names.add(name)
            case ast.Import(aliases) | ast.ImportFrom(_, aliases):
                names |= {(alias.asname or alias.name).split(".")[0] for alias in aliases}
            case ast.ExceptHandler(_, str(name)) | ast.MatchAs(_, str(name)) | ast.MatchStar(str(name)):
                names.add(name)
    return names


def needed(script: str) -> set[str]:
    """The names that a script reads and neither it nor Python makes: those that the solution must have.

    A solution's own `len` or `all` is not among them, so it cannot stand in for the real one in a test.
    """
    tree = ast.parse(script)
    read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return {name for name in read - bound(tree) - vars(builtins).keys() if not name.startswith("__")}
