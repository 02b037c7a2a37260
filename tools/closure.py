"""Lines that must be read to run a module: what it imports at module level, and what that imports.

    python tools/closure.py tandem.step    modules and lines, by folder
    python tools/closure.py --circles      circles of files, imports inside functions counted

Imports under TYPE_CHECKING and inside functions are in no closure.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "tandem").rglob("*.py"))
}


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text(encoding="utf-8"))


def at_module_level(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run when a module is imported, but for those of type checkers."""
    for node in body:
        match node:
            case ast.If() if "TYPE_CHECKING" not in ast.unparse(node.test):
                yield from at_module_level(node.body + node.orelse)
            case ast.Try() | ast.With():
                yield from at_module_level(node.body)
            case _:
                yield node


def imported(nodes: Iterable[ast.AST]) -> set[str]:
    """Collect the package's modules that these nodes import."""
    found = set[str]()
    for node in nodes:
        match node:
            case ast.ImportFrom(module=str(name)):
                found |= {
                    whole if (whole := f"{name}.{alias.name}") in FILES else name
                    for alias in node.names
                }
            case ast.Import():
                found |= {alias.name for alias in node.names}
    return found & FILES.keys()


def reached(graph: dict[str, set[str]], roots: Iterable[str]) -> set[str]:
    """Collect all that can be reached from the roots, themselves only by a circle."""
    seen, todo = set[str](), [other for root in roots for other in graph[root]]
    while todo:
        if (module := todo.pop()) not in seen:
            seen.add(module)
            todo += graph[module]
    return seen


def closure(roots: Iterable[str]) -> set[str]:
    """Collect the modules that importing the roots reads, with the packages around them."""
    roots = list(roots)
    graph = {m: imported(at_module_level(tree_of(m).body)) | parents(m) for m in FILES}
    return reached(graph, roots) | set(roots)


def parents(module: str) -> set[str]:
    parts = module.split(".")
    return {".".join(parts[:end]) for end in range(1, len(parts))}


def circles() -> list[list[str]]:
    """List the circles of files, each sorted."""
    graph = {module: imported(ast.walk(tree_of(module))) for module in FILES}
    ahead = {module: reached(graph, [module]) for module in FILES}
    found = {
        tuple(sorted(other for other in ahead[module] if module in ahead[other]))
        for module in FILES
        if module in ahead[module]
    }
    return sorted(map(list, found))


def lines(modules: Iterable[str]) -> int:
    return sum(FILES[module].read_text(encoding="utf-8").count("\n") for module in modules)


if __name__ == "__main__":
    if sys.argv[1:] == ["--circles"]:
        for circle in circles():
            print(*circle)
        print(len(circles()), "circles")
    else:
        modules, folders = closure(sys.argv[1:]), Counter[str]()
        for module in modules:
            folders[str(FILES[module].parent.relative_to(ROOT))] += lines([module])
        for folder, count in folders.most_common():
            print(f"{count:6} {folder}")
        print(len(modules), "modules", lines(modules), "lines")
