"""Memory that a run takes of this machine, for `tandem plan`: the arithmetic of footprint.py
for as many tokens as a step has, and what comes besides: Python, passing tensors, other processes.

results/plan_accuracy.md compares it with runs. Completions count as long as they may become. It
does not know what a user's reward function or environment holds.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tandem.config.schema import Config
from tandem.engine.page_cache import page_bytes
from tandem.jobs.inputs import Count
from tandem.model.config_file import has_experts, head_size, inner_size, kv_heads_of
from tandem.model.logprobs import CHUNK_BYTES
from tandem.model.paged_attention import PAGE
from tandem.plugins.plan.activations import FLOAT32
from tandem.plugins.plan.footprint import Footprint, Need, Sizes
from tandem.run_folder.metrics import peak_rss_mb

MIB = 1 << 20
# Measured on runs (benchmarks/plan_accuracy.py), not computed: libraries and kernels that a run
# loads and compiles besides what a plan has, for all commands, for gradients, an engine, and a row
# of decode.
KERNELS, GRADIENTS, ENGINE, DECODE_ROW = 80 * MIB, 100 * MIB, 45 * MIB, 3 * MIB // 8
UNMAPPED = 100 * MIB  # of libraries, in a forked worker
WATCHDOG, FORK_SERVER, REWARD_WORKER = 34 * MIB, 39 * MIB, 27 * MIB  # chat templates with the first


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sizes of a step. Example: Batch(update=2048, sequences=64, pages=64)"""

    update: int  # tokens of an optimizer update
    sequences: int  # decoded at once
    pages: int  # of the cache


def batch_of(config: Config, command: str, counts: Mapping[str, Count]) -> Batch:
    """Return the sizes of a step, of completions that are all as long as they may become."""
    rl, rollout = config.rl, config.rollout
    if command not in ("train", "distill"):
        offline = config.sft if command == "sft" else config.preference
        of_data = counts["sft.train" if command == "sft" else "preference.train"]
        update = offline.batch_size * (1 if command == "sft" else 2) * of_data.mean
        return Batch(update=round(update), sequences=0, pages=0)
    prompt, episodes = counts["data.train"].mean, rl.prompts_per_step * rl.group_size
    update = (rl.prompts_per_step * prompt + episodes * rollout.max_new_tokens) / rl.minibatches
    longest = -(-(round(prompt) + rollout.max_new_tokens) // PAGE)
    return Batch(
        update=round(update), sequences=min(rollout.max_batch, episodes), pages=episodes * longest
    )


def rows_here(run: Footprint, batch: Batch) -> list[Need]:
    """Return the memory of a run of one process on the CPU, of as many tokens and pages as a step
    has."""
    config, workers, sizes = run.config, run.config.rollout.workers, run.sizes
    named = {name: (size, text) for name, size, text in run.needs()}
    width = sizes.place.dtype.itemsize
    tokens = min(config.train.tokens_per_microbatch, batch.update)
    kept = run.activations(tokens_per_microbatch=tokens)
    named["activations"] = (
        kept,
        f"{tokens:,} tokens{named['activations'][1].partition('tokens')[2]}",
    )
    used = min(config.rollout.cache_mb * MIB, batch.pages * page_bytes(sizes.policy.shape, width))
    named["key/value cache"] = 0 if workers else used, "the pages of a step's episodes"
    if workers and run.samples:
        # they divide the episodes and their pages; one more process forks them
        each = python_bytes() - UNMAPPED + KERNELS + ENGINE
        each += (width + sizes.packed) * sizes.policy.count
        named["rollout workers"] = (
            python_bytes() + workers * each + DECODE_ROW * batch.sequences + used,
            f"{workers + 1} x Python, {workers} x weights, packs and pages",
        )
    named["passing tensors"] = passing_bytes(sizes, tokens, batch), "of a layer, and of logits"
    engine = ENGINE + DECODE_ROW * batch.sequences if batch.sequences and not workers else 0
    kernels = KERNELS + GRADIENTS * bool(batch.update) + engine
    named["Python"] = python_bytes() + kernels, "libraries, data, kernels"
    rewards = FORK_SERVER + REWARD_WORKER * config.reward.workers
    helpers = WATCHDOG + (rewards if run.command != "rm" else 0)
    named["other processes"] = helpers, "watchdog, templates, rewards"
    return [(name, size, text) for name, (size, text) in named.items() if size]


def python_bytes() -> int:
    """Return what this process holds, which has imported what a run does and has read its data."""
    return round(peak_rss_mb() * MIB)


def passing_bytes(sizes: Sizes, tokens: int, batch: Batch) -> int:
    """Return the bytes that are held for a moment: gradients of a layer's activations, a chunk of
    logits with its probabilities and slope, and a block of keys and values in decode."""
    shape, width = sizes.policy.shape, sizes.place.dtype.itemsize
    inner = inner_size(shape)
    if has_experts(shape):
        inner = shape.moe_intermediate_size * shape.num_experts_per_tok
    layer = FLOAT32 * tokens * (3 * inner + 2 * shape.hidden_size)
    logits = 3 * min(CHUNK_BYTES, FLOAT32 * tokens * shape.vocab_size)
    block = 2 * width * PAGE * kv_heads_of(shape) * head_size(shape)
    return max(layer, logits) + 2 * block * batch.sequences
