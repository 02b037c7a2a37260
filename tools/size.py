"""`make size`: lines of the package by folder, the longest files and functions, and the limits of
the house.

Exit code 1 when a file is over 400 lines, a function over 60 (the step: 100), or the config over
150 leaves.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILE_LIMIT, FUNCTION_LIMIT, STEP_LIMIT, LEAF_LIMIT = 400, 60, 100, 150
THE_STEP = "train_step"


def main() -> int:
    files = {
        path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "tandem").rglob("*.py"))
    }
    lines = {path: text.count("\n") for path, text in files.items()}
    functions = [
        (length, name, path) for path, text in files.items() for length, name in measure(text)
    ]
    show_folders(lines)
    lengths = sorted(length for length, _, _ in functions)
    print(
        f"{len(lengths)} functions: median {lengths[len(lengths) // 2]} lines, 90th percentile {lengths[len(lengths) * 9 // 10]}"
    )
    faults = [
        f"{path.relative_to(ROOT)}: {count} lines, limit {FILE_LIMIT}"
        for path, count in lines.items()
        if count > FILE_LIMIT
    ]
    faults += [
        f"{path.relative_to(ROOT)}: {name} has {length} lines, limit {limit}"
        for length, name, path in functions
        if length > (limit := STEP_LIMIT if name == THE_STEP else FUNCTION_LIMIT)
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


def measure(text: str) -> list[tuple[int, str]]:
    return [
        (node.end_lineno - node.lineno + 1, node.name)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    ]


def count_leaves() -> int:
    sys.path.insert(0, str(ROOT))
    from tandem.config.recipe import describe

    return len(describe())


if __name__ == "__main__":
    sys.exit(main())
