"""Two sections of `make invariants`, P1 and P3 under the libraries' own switches: the probe's word
against what is so.

Each set of switches runs in a process of its own (tools/cells.py). Knows no model.
"""

import time
from typing import Any

import cells

CELLS = 12  # of each set of switches; of two sets all shapes
COLUMNS = (
    "threads | cells | gap 0.0 | probe: exact | 1 = 2 threads | probe: any threads | false yes |"
)
LINE = "|---|---|---|---|---|---|---|---|---|"

Found = dict[str, Any]
Rows = list[dict[str, Any]]


def try_cells() -> Found:
    rows = tried(cells.plan(CELLS))
    return {
        "rows": rows,
        "false_yes": sum(map(cells.is_false_yes, rows)),
        "met": len(rows) >= 500 and is_right(rows),
    }


def try_variants() -> Found:
    plan = cells.plan_of_variants()
    rows = tried(plan)
    return {
        "rows": rows,
        "false_yes": sum(map(cells.is_false_yes, rows)),
        "met": len(rows) == sum(map(len, plan.values())) and is_right(rows),
    }


def tried(plan: dict[int, list[int]]) -> Rows:
    """Run the cells of a plan (cells.plan); return a row for each."""
    rows: Rows = []
    for number, chosen in plan.items():
        start = time.monotonic()
        rows += cells.run(number, chosen)
        took, wrong = time.monotonic() - start, sum(map(cells.is_false_yes, rows))
        print(
            f"{cells.switches()[number]}: {len(chosen)} cells, {took:.0f} s; {wrong} false yes in all",
            flush=True,
        )
    return rows


def is_right(rows: Rows) -> bool:
    """Tell whether the probe never says yes of what is not exact, nor no of what is: a probe that
    says no to everything is of no use either."""
    wrong = any(cells.is_false_yes(row) or cells.is_false_yes(row, measured=True) for row in rows)
    refused = any(row["strict"] and row["gap"] == 0.0 and not row["says_parity"] for row in rows)
    return not (wrong or refused)


def cells_table(found: Found) -> list[str]:
    rows, wrong = found["rows"], found["false_yes"]
    measured = sum(cells.is_false_yes(row, measured=True) for row in rows)
    loose = [row for row in rows if not row["strict"]]
    inexact, dependent = (
        sum(row["gap"] != 0.0 for row in loose),
        sum(not row["threads_agree"] for row in loose),
    )
    lines = [
        "## Other processors, as far as this one can be another",
        "",
        f"{len(rows)} cells: {len({row['shape'] for row in rows})} shapes of models (head sizes 16 to 256, groups of 1, 2, 3, 7",
        "and 8, widths that are no multiple of 16, vocabularies of 997, 50,257 and 151,936, 24 layers, contexts to 6,000, rope",
        "linear / llama3 / yarn, windows, biases, tied and untied, experts) under the libraries' own switches, each set of them",
        "in a process of its own. In a cell the probe gives its word; then an engine serves random requests, a trainer passes",
        "over what was sampled, and gradients are made with one thread and with two.",
        "",
        f"**The probe said yes where a bit differed: {wrong} times.** By what it measures alone, without what it knows of",
        f"MKL's mode: {measured} times. Without that mode {inexact} of {len(loose)} cells were not exact, and in {dependent}",
        "bits depended on the thread count.",
        "",
        f"| switches | MKL strict | {COLUMNS}",
        LINE,
    ]
    groups = dict.fromkeys((row["switches"], row["strict"], row["threads"]) for row in rows)
    for name, strict, threads in groups:
        mine = [
            row
            for row in rows
            if (row["switches"], row["strict"], row["threads"]) == (name, strict, threads)
        ]
        lines.append(f"| {name} | {'yes' if strict else 'no'} | {threads} | {counted(mine)} |")
    return lines


def variants_table(found: Found) -> list[str]:
    rows = found["rows"]
    shapes = ", ".join(dict.fromkeys(row["shape"] for row in rows))
    lines = [
        "## The same in bfloat16, and on the general path",
        "",
        f"{len(rows)} cells as above, of other models ({shapes}), all weights of which are random: what",
        "the probe says, and what is so. Default is all that the processor below has.",
        "",
        f"**The probe said yes where a bit differed: {found['false_yes']} times.**",
        "",
        f"| model | switches | {COLUMNS}",
        LINE,
    ]
    for variant in dict.fromkeys(row["variant"] for row in rows):
        for name, threads in dict.fromkeys((row["switches"], row["threads"]) for row in rows):
            mine = [
                row
                for row in rows
                if (row["variant"], row["switches"], row["threads"]) == (variant, name, threads)
            ]
            lines.append(f"| {variant} | {name} | {threads} | {counted(mine)} |")
    if "AMX" not in found["machine"]:
        lines.append("| all of these | AMX | 1, 2 | not measured |" + " |" * 5)
    return lines


def counted(rows: Rows) -> str:
    """Format the cells of a line: how many there are, and of how many each column is so."""
    names = ("says_parity", "threads_agree", "says_threads")
    counts = [
        len(rows),
        sum(row["gap"] == 0.0 for row in rows),
        *(sum(row[name] for row in rows) for name in names),
        sum(map(cells.is_false_yes, rows)),
    ]
    return " | ".join(map(str, counts))
