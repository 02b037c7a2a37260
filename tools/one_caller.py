"""Private functions and methods whose name is used once outside of their definition:
`python tools/one_caller.py` lists the shortest. One is written where it is called, unless its name explains
something."""

import ast
from collections import Counter

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
    return {key: size for key, size in defined.items() if used[key] == 1}


if __name__ == "__main__":
    found = one_callers()
    for (module, name), size in sorted(found.items(), key=lambda item: item[1])[:40]:
        print(f"{size:4} {module}: {name}")
    print(len(found), "private functions with one use,", sum(found.values()), "lines")
