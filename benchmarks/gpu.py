"""`make gpu`: all that only a GPU can show, section by section; results in results/gpu.json, and
results/gpu.md from it.

    make gpu                             every section
    make gpu only="kernels decode"       these; the results of the others stay as they are
    make gpu only="decode --again"       anew what this code has measured on this GPU already
    make gpu only="parity --rows bfloat16 --limit 60 --out FOLDER"   rows of that name, for so many seconds a section; results there
    make gpu-wheels; make gpu PY=python3 a machine without a package index: the first here, the second there
    python benchmarks/gpu.py --tiny      every section at a tiny shape, on a CPU too; prints the page and keeps nothing

Each row is kept once it is measured, and a section ends after its limit, so that a call that is cut off goes on with the next.
A row that fails says so in its cells, and counts as measured. A section's results name the GPU that they were found on; another
GPU, other code or other versions begin it anew. Sections and rows stand in the order of what they tell, so that a short loan of a GPU
measures the most. Exit code 2 without a GPU. What has not been measured says so.
"""

import argparse
import hashlib
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import gpu_proofs as proofs  # noqa: E402
import gpu_speed as speed  # noqa: E402
from gpu_bench import SHAPES, Bench, forget_models  # noqa: E402
from gpu_proofs import Figures  # noqa: E402

from tandem.model.placement import place_models  # noqa: E402
from tandem.runtime import numerics  # noqa: E402
from tests.support.parity import CONFIGS  # noqa: E402

JSON, PAGE = ROOT / "results" / "gpu.json", ROOT / "results" / "gpu.md"
NOT_MEASURED = "not measured"
CODE = ("tandem/**/*.py", "benchmarks/gpu*.py")  # a section's results are of
BATCHES = (1, 64, 256, 2, 4, 8, 16, 32, 128, 512)  # the first three tell the most
STAGGERED = 192  # tokens of the longest prompt beside one of speed.PROMPT
COUNTED = "test_a_layer_of_a_decode_step_is_eight_launches"  # of tests/gpu
HOST = ROOT / "results" / "host_cost.json"  # of benchmarks/host_cost.py --keep
KINDS = ("train", "ppo, lora", "dapo")  # of runs that are killed
NO_GPU = (
    "error: there is no GPU to measure; found: none that torch {torch} can use; expected: a CUDA GPU, its driver and a CUDA "
    "build of PyTorch; next: `tandem doctor` says what is missing, `python benchmarks/gpu.py --tiny` tries every section here"
)


@dataclass(frozen=True, kw_only=True)
class Section:
    """A table of the page. `rows`: by name, what `measure` takes after the bench; `columns`: the format of each figure."""

    title: str
    about: str
    measure: Callable[..., Figures]
    columns: dict[str, str]
    rows: dict[str, tuple[Any, ...]] = field(default_factory=lambda: {"all": ()})
    limit_s: float = 500.0  # of a call; rows that are left come in the next


class OutOfTime(Exception):
    """A section's limit has passed."""


BY_MODEL: dict[str, tuple[Any, ...]] = {name: (name,) for name in SHAPES}
SECTIONS = {
    "kernels": Section(
        title="The kernels' tests",
        about="`pytest -n8 tests/gpu` on the GPU, without compilations for GPUs that are not there.",
        measure=proofs.kernels,
        columns={"passed": ",", "failed": ",", "skipped": ",", "which failed": ""},
    ),
    "parity": Section(
        title="Engine and trainer agree",
        about="1,000 random schedules before and after optimizer steps, as in [invariants.md](invariants.md).",
        measure=proofs.parity,
        columns={"schedules": ",", "sampled tokens": ",", "largest log-prob gap": ""},
        rows={
            f"{kind}, {dtype}": (kind, dtype)
            for dtype in ("bfloat16", "float32")
            for kind in CONFIGS
        },
    ),
    "decode": Section(
        title="Decode",
        about=f"{speed.NEW} tokens after prompts of {speed.PROMPT}; staggered: of {speed.PROMPT} to {STAGGERED}, so that pages change in nearly every step. The floor of a step is (bytes of all weights + bytes of the cached keys and values that are read) / "
        "the bandwidth of a copy on this GPU; no engine passes it.",
        measure=speed.decode,
        columns={"tokens/s": ",.0f", "share of the floor": ".0%"},
        rows={
            f"{name}, batch {batch}{', staggered' * (longest > speed.PROMPT)}": (
                name,
                batch,
                longest,
            )
            for name in SHAPES
            for batch in BATCHES
            for longest in (speed.PROMPT, *[STAGGERED] * (batch in (64, 256)))
        },
    ),
    "training": Section(
        title="Training",
        about="Forward, backward and AdamW of 8,192 tokens in sequences of 1,024. FLOPs = 6 x parameters x tokens + 6 x layers x tokens x length x heads x "
        "head size (causal attention); MFU = FLOPs / seconds / torch's own product of two matrices of 8,192 x 8,192 in the same run.",
        measure=speed.training,
        columns={"tokens/s": ",.0f", "MFU": ".0%"},
        rows=BY_MODEL,
    ),
    "step": Section(
        title="A whole RL step",
        about="`tandem train`, 64 problems x 8 samples, prompts of 256 tokens, 512 sampled; rewards, journal and ledger included. Beside it "
        "the same step as a plain loop: transformers' `generate` with SDPA, GRPO's loss over 8 sequences at a time, torch's AdamW on bfloat16 weights, nothing recorded.",
        measure=speed.rl_step,
        columns={
            "step, s": ".2f",
            "rollout, s": ".2f",
            "learning, s": ".2f",
            "sampled tokens/s": ",.0f",
        },
        rows={
            f"{name}{', plain loop' * plain}": (name, plain)
            for name in SHAPES
            for plain in (False, True)
        },
    ),
    "matmul": Section(
        title="Matmul kernels",
        about="What the probe finds before a run: all linears of a layer and the output projection with 64 rows, those of the layer also with 640, in a CUDA graph; "
        "or why a kernel is not exact or does not run. The fastest exact one is taken. The other figures are those of the kernel taken here.",
        measure=speed.matmul,
        columns={**{f"{kernel}, ms": ".2f" for kernel in speed.MATMULS}, "taken": ""},
        rows=BY_MODEL,
    ),
    "prefill": Section(
        title="Prefill",
        about="16 prompts of 1,024 tokens, to their first token; 2 FLOPs a weight and token, the output projection left out.",
        measure=speed.prefill,
        columns={"tokens/s": ",.0f", "share of the matmul ceiling": ".0%"},
        rows=BY_MODEL,
    ),
    "memory": Section(
        title="Peak memory",
        about="`torch.cuda.max_memory_allocated` of an engine with a cache of 4 GiB beside two updates over 8,192 tokens, and what `tandem plan` says of it.",
        measure=speed.memory,
        columns={"measured, GiB": ".1f", "tandem plan, GiB": ".1f", "measured / plan": ".2f"},
        rows=BY_MODEL,
    ),
    "resume": Section(
        title="Killed = never stopped",
        about="Runs on the GPU, killed with `kill -9` and started again; equal: weights, optimizer, metrics, ledger, episodes and exported model.",
        measure=proofs.resume,
        columns={"killed": ",", "resumed": ",", "byte-equal": ","},
        rows={f"{kind}, after step {step}": (kind, step) for step in range(1, 6) for kind in KINDS},
    ),
    "learning": Section(
        title="The demo learns",
        about="The demo on the GPU, as in [learning.md](learning.md): held-out reward, sampled, before and after 60 steps of GRPO.",
        measure=proofs.learning,
        columns={
            "held-out reward before": ".3f",
            "after": ".3f",
            "rise": "+.3f",
            "largest log-prob gap": "",
        },
        rows={f"seed {seed}": (seed,) for seed in range(5)},
    ),
    "shared": Section(
        title="Decode from shared pages",
        about=f"32 prompts of 512 tokens x 8 samples, {speed.NEW} tokens each, beside 256 prompts: samples read the pages of their prompt once a group.",
        measure=speed.shared,
        columns={"shared, tokens/s": ",.0f", "apart, tokens/s": ",.0f", "shared / apart": ".2f"},
        rows=BY_MODEL,
    ),
    "inexact": Section(
        title="The price of exactness",
        about="The hidden states of Qwen3-1.7B by Tandem's kernels, and by transformers with torch's own products and SDPA, the fastest set that is not exact.",
        measure=speed.inexact,
        columns={"exact, ms": ",.1f", "inexact, ms": ",.1f", "exact / inexact": ".2f"},
        rows={
            f"{count} x {length:,} tokens": ("Qwen3-1.7B", count, length)
            for count, length in ((64, 128), (8, 1024), (1, 8192))
        },
    ),
    "workload": Section(
        title="nano-vllm's workload",
        about="Qwen3-0.6B, 256 sequences, 100 to 1,024 tokens in and as many out; each engine in its own process and with its own defaults.",
        measure=speed.workload,
        columns={"output tokens/s": ",.0f"},
        rows={"Tandem": ("Tandem",), "nano-vllm": ("nanovllm",), "vLLM": ("vllm",)},
    ),
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("only", nargs="*", help=", ".join(SECTIONS))
    parser.add_argument(
        "--tiny", action="store_true", help="a trial of the benchmark itself, on a CPU too"
    )
    parser.add_argument("--again", action="store_true", help="measure anew what is measured")
    parser.add_argument("--rows", default="", metavar="PART", help="rows with that in their names")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="of a section")
    parser.add_argument(
        "--out",
        type=Path,
        default=JSON.parent,
        metavar="FOLDER",
        help="results there, and from there",
    )
    args = parser.parse_args(arguments)
    if unknown := sorted(set(args.only) - SECTIONS.keys()):
        print(f"unknown section: {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
        return 2
    if not (torch.cuda.is_available() or args.tiny):
        print(NO_GPU.format(torch=torch.__version__))
        return 2
    numerics.prepare()
    results = args.out / JSON.name
    bench = Bench(place_models("auto", "auto"), args.tiny)
    kept = {} if args.tiny else everything(results)

    def keep(name: str, found: dict[str, Any]) -> None:
        kept[name] = found
        if not args.tiny:
            args.out.mkdir(parents=True, exist_ok=True)
            results.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
            (args.out / PAGE.name).write_text(page(kept))

    for name in args.only or SECTIONS:
        before = None if args.again or name not in kept else kept[name]
        found = measured(bench, part_of(SECTIONS[name], args), before, partial(keep, name))
        print("\n".join(section_lines(SECTIONS[name], found)), flush=True)
    return 0


def part_of(section: Section, args: argparse.Namespace) -> Section:
    """The rows that are asked for, and the seconds that they may take."""
    rows = {name: row for name, row in section.rows.items() if args.rows in name}
    return replace(section, rows=rows, limit_s=args.limit or section.limit_s)


def measured(
    bench: Bench,
    section: Section,
    before: dict[str, Any] | None = None,
    keep: Callable[[dict[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """Measure the rows, for a trial the first, that `before` lacks, and keep the section after each; return it.

    A row that fails or does not fit the device says so, and one that the limit cuts off is left for the next call, unless it had
    all of the time. Raises SystemExit once the GPU takes no more work of this process.
    """
    start, found, begun = time.monotonic(), new_section(bench), 0
    if before is not None and all(
        before.get(k) == found[k] for k in ("machine", "code", "versions")
    ):
        found |= {"rows": dict(before["rows"]), "seconds": before["seconds"]}
    earlier = found["seconds"]
    for name in list(section.rows)[: 1 if bench.tiny else None]:
        left = section.limit_s - (time.monotonic() - start)
        if name in found["rows"] or left <= 0:
            continue
        try:
            with limit(left):
                found["rows"][name] = section.measure(bench, *section.rows[name])
        except OutOfTime:
            if begun:
                break
            found["rows"][name] = failed(section, f"more than {section.limit_s:g} s")
        except torch.OutOfMemoryError:
            found["rows"][name] = dict.fromkeys(section.columns, "out of memory")
        except Exception as error:  # of one row: the others are measured all the same
            first = (f"{error}".strip() or type(error).__name__).splitlines()[0]
            found["rows"][name] = failed(section, first.replace("|", "/"))
        begun += 1
        found["seconds"] = earlier + round(time.monotonic() - start)
        keep(found)
        if any(isinstance(value, str) for value in found["rows"][name].values()):
            forget_models()
        if any("CUDA error" in f"{value}" for value in found["rows"][name].values()):
            raise SystemExit("the GPU takes no more work of this process; start it again")
    return found


def new_section(bench: Bench) -> dict[str, Any]:
    return {
        "machine": bench.place.processor(),
        "code": code_hash(),
        "date": str(date.today()),
        "versions": {name: version_of(name) for name in ("torch", "triton", "transformers")},
        "seconds": 0,
        "rows": {},
    }


def failed(section: Section, why: str) -> Figures:
    return dict.fromkeys(section.columns, f"failed: {why[:120]}")


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the block once the seconds have passed; the block ends the processes that it waits for."""

    def end(*_: Any) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@cache
def code_hash() -> str:
    """Hash the code whose speed is measured: a commit would change with the results."""
    paths = sorted(path for pattern in CODE for path in ROOT.glob(pattern))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def everything(path: Path = JSON) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def page(kept: dict[str, Any]) -> str:
    lines = [
        "# On a GPU",
        "",
        "Written by `make gpu`, section by section (benchmarks/gpu.py), from results/gpu.json. Models have random weights at the",
        "shapes of Qwen3, so nothing is downloaded. Times are medians after a warm-up. No GPU has run what is not measured.",
    ]
    for name, section in SECTIONS.items():
        lines += ["", *section_lines(section, kept.get(name))]
    return "\n".join([*lines, "", *host_lines()]) + "\n"


def host_lines() -> list[str]:
    """Write what is known of a decode step without a GPU."""
    lines = ["## Without a GPU: launches and the host", ""]
    lines += [
        f"A layer of a decode step is eight launches of Triton's kernels, and no other (`{COUNTED}`)."
    ]
    lines += [
        'The engine\'s CPU time of a step that runs ahead, with passes that return at once (`benchmarks/host_cost.py`). In the rows "others wait" sequences end and join.',
        "",
    ]
    lines += ["| sequences | lengths of the prompts | median, ms | mean, ms |", "|---|---|---|---|"]
    found = everything(HOST)
    for row in found.get("rows", ()):
        cells = (row["sequences"], row["lengths"], row["median_ms"], row["mean_ms"])
        lines += [f"| {' | '.join(map(str, cells))} |"]
    return [*lines, "", f"{found['machine']}; {found['date']}." if found else NOT_MEASURED]


def section_lines(section: Section, found: dict[str, Any] | None) -> list[str]:
    """The table of a section; without results every row is not measured."""
    rows: dict[str, Figures] = found["rows"] if found else {}
    lines = [f"## {section.title}", "", section.about, ""]
    lines += [f"| | {' | '.join(section.columns)} |", "|---" * (1 + len(section.columns)) + "|"]
    for name in section.rows:
        figures = rows.get(name, {})
        cells = [cell(figures.get(column), spec) for column, spec in section.columns.items()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    if found:
        versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
        lines += ["", f"{found['machine']}; {versions}; {found['date']}."]
    return lines


def cell(figure: float | int | str | None, spec: str) -> str:
    if figure is None:
        return NOT_MEASURED
    return figure if isinstance(figure, str) else format(figure, spec)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
