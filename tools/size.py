"""`make size`: lines of the package by room, and the limits of the house.

Exit code 1 if a file has over 600 lines (step.py: 140), a function over 60, the config over 163
leaves, or the package or its core over their sums. A Triton kernel may have 100 lines, as it takes
its many pointers and strides one by one. The core is the package without built-in tasks, adapters
to other libraries, servers and commands.
"""

import ast
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tandem"
FILE_LIMIT, STEP_LIMIT, FUNCTION_LIMIT, KERNEL_LIMIT, LEAF_LIMIT = 600, 140, 60, 100, 163
PACKAGE_LIMIT, CORE_LIMIT = 58_045, 42_200
NOT_CORE = (
    "tasks",
    "serve",
    "view",
    "cli",
    "cluster",
    "engine/http",
    "engine/worker_pool/vllm_",
    "envs/verifiers",
    "envs/agent",
    "envs/gym.py",
    "jobs/http_engines.py",
    "run_folder/hub.py",
    "run_folder/trackers",
    "stream/transfer_queue.py",
    "train/megatron",
    "weights/rdma.py",
)


def main() -> int:
    texts = {
        str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8")
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    lines = {name: text.count("\n") for name, text in texts.items()}
    functions = [(*measured, name) for name, text in texts.items() for measured in measure(text)]
    package = sum(lines.values())
    core = sum(count for name, count in lines.items() if not name.startswith(NOT_CORE))
    leaves = count_leaves()
    show(lines, functions, package, core, leaves)
    limits = [
        *(
            (name, count, STEP_LIMIT if name == "step.py" else FILE_LIMIT)
            for name, count in lines.items()
        ),
        *((f"{path}: {name}", length, limit) for length, name, limit, path in functions),
        ("config leaves", leaves, LEAF_LIMIT),
        ("package", package, PACKAGE_LIMIT),
        ("core", core, CORE_LIMIT),
    ]
    over = [f"over: {what}: {size}, limit {limit}" for what, size, limit in limits if size > limit]
    print("\n".join(over) or "within every limit")
    return bool(over)


def show(
    lines: dict[str, int],
    functions: list[tuple[int, str, int, str]],
    package: int,
    core: int,
    leaves: int,
) -> None:
    rooms: Counter[str] = Counter()
    for name, count in lines.items():
        room, slash, _ = name.partition("/")
        rooms[room + slash if slash else "at the door"] += count
    for room, count in sorted(rooms.items()):
        print(f"{room:<12} {count:6,}")
    print(f"{'package':<12} {package:6,} lines, at most {PACKAGE_LIMIT:,}")
    print(
        f"{'core':<12} {core:6,} lines, at most {CORE_LIMIT:,}; longest file {max(lines.values())}"
    )
    lengths = sorted(length for length, *_ in functions)
    median, ninetieth = lengths[len(lengths) // 2], lengths[len(lengths) * 9 // 10]
    print(f"{len(lengths)} functions: median {median} lines, 90th percentile {ninetieth}")
    print(f"config: {leaves} leaves of at most {LEAF_LIMIT}")


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


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(d).startswith("triton.jit") for d in node.decorator_list)


def count_leaves() -> int:
    sys.path.insert(0, str(ROOT))
    from tandem.config.recipe import describe

    return len(describe())


if __name__ == "__main__":
    sys.exit(main())
