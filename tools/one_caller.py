"""Private functions and methods whose name is used once outside of their definition:
`python tools/one_caller.py` lists the shortest. One is written where it is called, unless its name explains
something. A method that a subclass overrides is none of them: it is a place to differ."""

import ast
from collections import Counter
from collections.abc import Iterator

from closure import FILES, tree_of


def one_callers() -> dict[tuple[str, str], int]:
    """Map (module, function) to its lines."""
    defined, used = dict[tuple[str, str], int](), Counter[tuple[str, str]]()
    for module in FILES:
        for node in ast.walk(tree_of(module)):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    if name.startswith("_") and not name.startswith("__"):
                        defined[module, name] = node.end_lineno - node.lineno + 1
                case ast.Name(id=name) | ast.Attribute(attr=name):
                    used[module, name] += 1
    places = set(overridden())
    return {key: n for key, n in defined.items() if used[key] == 1 and key not in places}


def overridden() -> Iterator[tuple[str, str]]:
    """Yield (module, method) of methods that a subclass overrides, and of those that override."""
    own, bases = dict[str, tuple[str, set[str]]](), dict[str, list[str]]()
    for module in FILES:
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.ClassDef):
                functions = ast.FunctionDef | ast.AsyncFunctionDef
                own[node.name] = module, {f.name for f in node.body if isinstance(f, functions)}
                bases[node.name] = [
                    ast.unparse(b).partition("[")[0].rpartition(".")[2] for b in node.bases
                ]
    for name, (module, methods) in own.items():
        above, seen = list(bases[name]), {name}
        while above:
            if (base := above.pop()) in own and base not in seen:
                seen.add(base)
                above += bases[base]
                place, others = own[base]
                yield from ((where, m) for m in methods & others for where in (module, place))


if __name__ == "__main__":
    found = one_callers()
    for (module, name), size in sorted(found.items(), key=lambda item: item[1])[:40]:
        print(f"{size:4} {module}: {name}")
    print(len(found), "private functions with one use,", sum(found.values()), "lines")
