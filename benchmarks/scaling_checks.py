"""Formulas of `tandem plan --gpus` against published numbers: rows for results/scaling.md."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from scaling_models import OTHERS, PUBLISHED, QWEN3, model_of

from tandem.config.parallel import Parallel
from tandem.plugins.plan.scaling import GPUS, flops_per_token, update_time
from tandem.plugins.plan.shards import Work, memory, parameters

BF16, GIB = torch.bfloat16, 2**30
MODELS = QWEN3 | OTHERS


@dataclass(frozen=True)
class Check:
    """A published number beside the formulas' own."""

    what: str
    published: float
    predicted: float
    unit: str
    text: str

    @property
    def ratio(self) -> float:
        return self.predicted / self.published


def checks() -> Iterator[Check]:
    for name, published in PUBLISHED.items():
        found = parameters(QWEN3[name]) / 1e9
        yield Check(f"{name}, parameters", published, found, "billion", "rounded on its page")
    yield from _training()
    yield from _torchtitan()


def _training() -> Iterator[Check]:
    layer, head = flops_per_token(MODELS["Qwen3-0.6B"], 16384)
    mfu = 11900 * (28 * layer + head) / GPUS["h100"].flops
    text = "11.9k tok/s at 16k context: the count of FLOPs is tested. Attention to half of the keys gives their number, to all of them 0.18"
    yield Check("prime-rl, Qwen3-0.6B, one H100, MFU", 0.11, mfu, "", text)
    gemm = 2 * 134_515_008 * 665  # of the floor at batch >= 12: 665 tok/s
    for count, published in ((134_515_008, 112), (7_000_000, 2108)):
        found = 0.51 * gemm / (6 * count)
        text = "fp32 on two cores, 51% of the products' peak as published; attention is left out"
        yield Check(
            f"forward and backward, {count / 1e6:.0f}M parameters", published, found, "tok/s", text
        )
    sync = 1e3 * 2 * parameters(MODELS["Qwen3-4B"]) / GPUS["h100"].nvlink
    text = "a floor: one rank sends all weights over NVLink once; reshard is many small messages and names"
    yield Check("NeMo-RL, Qwen3-4B, weights to the engine", 210, sync, "ms", text)


def _torchtitan() -> Iterator[Check]:
    """benchmarks/llama3_h100_202412_torchtitan.md of pytorch/torchtitan: sequences of 8,192, H100."""
    rate = {n: _llama8b(n)[0] for n in (8, 128)}
    text = "bf16, compiled; ours counts 40% of 989 TFLOP/s and no checkpointing; theirs is selective, on GPUs with 500 of 700 W"
    yield Check("torchtitan, Llama 3.1 8B, FSDP, 8 GPUs, a GPU", 6667, rate[8], "tok/s", text)
    text = "ours has no latencies and no stragglers"
    yield Check("the same, 128 GPUs against 8, a GPU", 6514 / 6667, rate[128] / rate[8], "", text)
    state = _llama8b(8)[1] - _llama8b(128)[1]
    text = "what 120 more shards take from a rank: state memory as 1 / shards"
    yield Check("the same, memory of 8 less that of 128 GPUs", 15.0, state, "GiB", text)
    text = "theirs has float8 products, ours bf16 and sums of tensor ranks that nothing hides; what each is worth is not published"
    large, huge = MODELS["Llama-3.1-70B"], MODELS["Llama-3.1-405B"]
    found = _rate(large, Parallel(data=32, tensor=8), 16, 16)
    yield Check("torchtitan, Llama 3.1 70B, FSDP 32 x TP 8, a GPU", 829, found, "tok/s", text)
    found = _rate(huge, Parallel(data=8, tensor=8, pipeline=9), 32, 1)
    text += "; 126 layers are not 8 equal stages, so ours has 9 and 576 GPUs; 32 microbatches"
    yield Check(
        "torchtitan, Llama 3.1 405B, FSDP 8 x TP 8 x PP 8, a GPU", 100, found, "tok/s", text
    )


def _llama8b(size: int) -> tuple[float, float]:
    """Return tokens/s of a GPU, and GiB of its state."""
    mesh = Parallel(data=size)
    work = _work(MODELS["Llama-3.1-8B"], mesh, 2, 2, checkpointing=False)
    rows = memory(work, mesh)
    state = sum(rows[name] for name in ("weights", "Adam moments", "gradients"))
    times = update_time(work, mesh, GPUS["h100"])
    return work.tokens(mesh) / times.total, state / GIB


def _rate(shape: Any, mesh: Parallel, local: int, microbatch: int) -> float:
    work = _work(shape, mesh, local, microbatch, checkpointing=True)
    times = update_time(work, mesh, GPUS["h100"])
    return work.tokens(mesh) / mesh.tensor / mesh.pipeline / times.total


def _work(shape: Any, mesh: Parallel, local: int, microbatch: int, *, checkpointing: bool) -> Work:
    """Return an update of `local` sequences of 8,192 tokens a data rank."""
    return Work(
        model=model_of(shape),
        dtype=BF16,
        clusters=local * mesh.data,
        cluster=8192,
        length=8192,
        microbatch=microbatch * 8192,
        checkpointing=checkpointing,
    )
