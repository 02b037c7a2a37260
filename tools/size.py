"""`make size`: lines of the package by room, the figures of the house and how far they are from their bars.

Exit code 1 if a file has over 600 lines (step.py: 140), a function over 60 (a Triton kernel, which takes
its many pointers and strides one by one: 100), the config over 164 leaves, or a figure is above its bar
*and* above what it was at the last stage (HELD). A held figure may only fall, and goes with its bar.
"""

import ast
import sys
from collections import Counter
from pathlib import Path

import closure
import ladders
from one_caller import one_callers

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tandem"
FILE_LIMIT, STEP_LIMIT, FUNCTION_LIMIT, KERNEL_LIMIT, LEAF_LIMIT = 600, 140, 60, 100, 164
MANY_PARAMETERS = 8
PLAIN_RUN = ("tandem.cli.main", "tandem.cli.train", "tandem.jobs.rl")
BARS = {
    "lines of the core, without tandem/plugins": 31_000,
    "lines with plugins": 41_500,
    "lines that tandem.step imports": 10_000,
    "lines that a plain `tandem train` imports": 20_000,
    "conditions on a backend's name": 12,
    "of them on the step page": 0,
    "files that name rollout.engine": 4,
    "circles of files": 0,
    "imports of a plugin from outside": 0,
    "private functions with one use": 420,
    "functions with 8 or more parameters": 15,
    "yields in tandem/config": 45,
    "lines of tests": 34_000,
}
HELD = {
    "lines of the core, without tandem/plugins": 31_862,
    "lines with plugins": 57_048,
    "lines that tandem.step imports": 9_735,
    "lines that a plain `tandem train` imports": 19_362,
    "conditions on a backend's name": 11,
    "of them on the step page": 0,
    "files that name rollout.engine": 3,
    "circles of files": 0,
    "imports of a plugin from outside": 0,
    "private functions with one use": 406,
    "functions with 8 or more parameters": 11,
    "yields in tandem/config": 27,
    "lines of tests": 39_776,
}


def main() -> int:
    texts = {
        str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8")
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    lines = {name: text.count("\n") for name, text in texts.items()}
    functions = [(*measured, name) for name, text in texts.items() for measured in measure(text)]
    figures, leaves = measure_house(texts, lines), count_leaves()
    show(lines, [length for length, *_ in functions], leaves, figures)
    limits = [
        *(
            (name, count, STEP_LIMIT if name == "step.py" else FILE_LIMIT)
            for name, count in lines.items()
        ),
        *((f"{path}: {name}", length, limit) for length, name, limit, path in functions),
        ("config leaves", leaves, LEAF_LIMIT),
        *((name, count, max(BARS[name], HELD[name])) for name, count in figures.items()),
    ]
    over = [
        f"over: {what}: {size:,}, limit {limit:,}" for what, size, limit in limits if size > limit
    ]
    print("\n".join(over) or "within what is held")
    return bool(over)


def measure_house(texts: dict[str, str], lines: dict[str, int]) -> dict[str, int]:
    """Measure the figures of BARS."""
    conditions = list(ladders.conditions())
    return {
        "lines of the core, without tandem/plugins": sum(
            count for name, count in lines.items() if not name.startswith("plugins/")
        ),
        "lines with plugins": sum(lines.values()),
        "lines that tandem.step imports": closure.lines(closure.closure(["tandem.step"])),
        "lines that a plain `tandem train` imports": closure.lines(closure.closure(PLAIN_RUN)),
        "conditions on a backend's name": ladders.outside(conditions),
        "of them on the step page": sum(module == "tandem.step" for module, _ in conditions),
        "files that name rollout.engine": sum("rollout.engine" in text for text in texts.values()),
        "circles of files": len(closure.circles()),
        "imports of a plugin from outside": sum(map(count_foreign, closure.FILES)),
        "private functions with one use": len(one_callers()),
        "functions with 8 or more parameters": sum(map(count_wide, texts.values())),
        "yields in tandem/config": sum(
            text.count("yield") for name, text in texts.items() if name.startswith("config/")
        ),
        "lines of tests": sum(
            path.read_text(encoding="utf-8").count("\n") for path in (ROOT / "tests").rglob("*.py")
        ),
    }


def count_foreign(module: str) -> int:
    """Count the modules of plugins that a module imports, but for those of its own."""
    plugins = {
        name
        for name in closure.imported(ast.walk(closure.tree_of(module)))
        if name.startswith("tandem.plugins.")
    }
    return sum(name.split(".")[2] != (module + "...").split(".")[2] for name in plugins)


def show(lines: dict[str, int], lengths: list[int], leaves: int, figures: dict[str, int]) -> None:
    rooms: Counter[str] = Counter()
    for name, count in lines.items():
        room, slash, _ = name.partition("/")
        rooms[room + slash if slash else "at the door"] += count
    for room, count in sorted(rooms.items()):
        print(f"{room:<12} {count:6,}")
    lengths = sorted(lengths)
    median, ninetieth = lengths[len(lengths) // 2], lengths[len(lengths) * 9 // 10]
    print(f"longest file {max(lines.values())}; config: {leaves} leaves of at most {LEAF_LIMIT}")
    print(f"{len(lengths)} functions: median {median} lines, 90th percentile {ninetieth}")
    for name, count in figures.items():
        far = f"{count - BARS[name]:,} above" if count > BARS[name] else "met"
        print(f"{name:<42} {count:7,}  bar {BARS[name]:6,}  {far}")


def measure(text: str) -> list[tuple[int, str, int]]:
    """List (lines, name, limit) of each function in the source text."""
    return [
        (
            node.end_lineno - node.lineno + 1,
            node.name,
            KERNEL_LIMIT if is_kernel(node) else FUNCTION_LIMIT,
        )
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    ]


def count_wide(text: str) -> int:
    """Count the functions with many parameters, kernels apart."""
    return sum(
        len((*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)) >= MANY_PARAMETERS
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_kernel(node)
    )


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(d).startswith("triton.jit") for d in node.decorator_list)


def count_leaves() -> int:
    sys.path.insert(0, str(ROOT))
    from tandem.config.recipe import describe

    return len(describe())


if __name__ == "__main__":
    sys.exit(main())
