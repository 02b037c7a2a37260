"""Conditions on a backend's name: `python tools/ladders.py` lists them by name.

Those of tandem/config are counted apart: there a choice may be compared with its kind.
"""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator

from closure import FILES, tree_of

NAMES = re.compile(
    r"rollout\.engine|is_http\(|\.inexact\b|is_lean\(|reads_images\(|triton_for\(|train\.backend|stream\.kind|weights\.transport"
    r"|cluster\.trainers|cluster\.nodes|train\.optimizer|lora\.base|weights\.delta|rl\.advantage ==|rl\.loss [!=]="
)


def conditions() -> Iterator[tuple[str, str]]:
    """Yield (module, name) of each condition, once a line."""
    for module in FILES:
        seen = set[tuple[int, str]]()
        for node in ast.walk(tree_of(module)):
            match node:
                case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
                    pass
                case ast.BoolOp() | ast.Compare():
                    test = node
                case ast.Match(subject=test):
                    pass
                case _:
                    continue
            for key in {found.strip("( =!") for found in NAMES.findall(ast.unparse(test))}:
                if (test.lineno, key) not in seen:
                    seen.add((test.lineno, key))
                    yield module, key


def outside(found: list[tuple[str, str]]) -> int:
    return sum(not module.startswith("tandem.config") for module, _ in found)


if __name__ == "__main__":
    found, files = list(conditions()), defaultdict[str, set[str]](set)
    for module, key in found:
        files[key].add(module)
    for key, count in Counter(key for _, key in found).most_common():
        own = [pair for pair in found if pair[1] == key]
        print(
            f"{key:18} outside {outside(own):3} config {count - outside(own):2} files {len(files[key])}"
        )
    print("outside", outside(found))
