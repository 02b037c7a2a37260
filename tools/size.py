"""`make size`: lines of the package by folder, the longest files and functions, and the limits of
the house.

Exit code 1 when a file is over 400 lines, a function over 60, or the config over 150 leaves. The
step may have 100 lines, and so may a Triton kernel, which takes its many pointers and strides one
by one.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILE_LIMIT, FUNCTION_LIMIT, LONG_LIMIT, LEAF_LIMIT = 400, 60, 100, 150
THE_STEP = "train_step"


def main() -> int:
    files = {
        path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "tandem").rglob("*.py"))
    }
    lines = {path: text.count("\n") for path, text in files.items()}
    functions = [(*measured, path) for path, text in files.items() for measured in measure(text)]
    show_folders(lines)
    lengths = sorted(length for length, *_ in functions)
    median, ninetieth = lengths[len(lengths) // 2], lengths[len(lengths) * 9 // 10]
    print(f"{len(lengths)} functions: median {median} lines, 90th percentile {ninetieth}")
    faults = [
        f"{path.relative_to(ROOT)}: {count} lines, limit {FILE_LIMIT}"
        for path, count in lines.items()
        if count > FILE_LIMIT
    ]
    faults += [
        f"{path.relative_to(ROOT)}: {name} has {length} lines, limit {limit}"
        for length, name, limit, path in functions
        if length > limit
    ]
    leaves = count_leaves()
    print(f"config: {leaves} leaves of at most {LEAF_LIMIT}")
    faults += [f"config.py: {leaves} leaves, limit {LEAF_LIMIT}"] if leaves > LEAF_LIMIT else []
    print("\n".join(f"over: {fault}" for fault in faults) or "within every limit")
    return bool(faults)


def show_folders(lines: dict[Path, int]) -> None:
    folders: dict[str, int] = {}
    for path, count in lines.items():
        parts = path.relative_to(ROOT / "tandem").parts
        folder = parts[0] + "/" if len(parts) > 1 else "."
        folders[folder] = folders.get(folder, 0) + count
    for folder, count in folders.items():
        print(f"{folder:<12} {count:6,}")
    print(f"{'tandem/':<12} {sum(lines.values()):6,} lines; longest file {max(lines.values())}")


def measure(text: str) -> list[tuple[int, str, int]]:
    """List (lines, name, limit) of each function in the source text."""
    return [
        (
            node.end_lineno - node.lineno + 1,
            node.name,
            LONG_LIMIT if node.name == THE_STEP or is_kernel(node) else FUNCTION_LIMIT,
        )
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    ]


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(d).startswith("triton.jit") for d in node.decorator_list)


def count_leaves() -> int:
    sys.path.insert(0, str(ROOT))
    from tandem.config.recipe import describe

    return len(describe())


if __name__ == "__main__":
    sys.exit(main())
