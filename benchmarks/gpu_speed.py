"""Sections of `make gpu` that measure speed and memory, with random weights at the shapes of Qwen3.

Floors and shares are of ceilings measured in the same run: the bandwidth of a copy within the
device's memory, and torch's own product of two matrices of 8,192 x 8,192.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from gpu_bench import (
    Bench,
    copy_bandwidth,
    forget_models,
    matmul_flops,
    optimizer_of,
    parameters,
    stock_model,
)
from gpu_proofs import Figures, forks, placed

from tandem.config.schema import Config
from tandem.engine.engine import Engine
from tandem.engine.page_cache import page_bytes
from tandem.model.forward import batch_logprobs
from tandem.model.kernels import in_use
from tandem.model.load import ExactModel
from tandem.model.paged_attention import PAGE
from tandem.model.probe import fastest_exact, try_matmuls
from tandem.plugins.plan.footprint import Footprint, model_sizes
from tandem.plugins.triton.plans import TRITON
from tandem.run_folder.metrics import read_metrics
from tandem.trainer.optimizer import Optimizer
from tandem.trainer.pack import pack
from tandem.types import Microbatch, Request, Sample, SamplingDistribution, SamplingParams
from tests.support.runs import output, prepare

PROMPT, NEW = 64, 128  # of decode
MATMULS = ("plain", "persistent", "tma", "cublas")
GIB = 2**30


def decode(bench: Bench, name: str, batch: int, longest: int = PROMPT) -> Figures:
    """Tokens a second after the first ones, and the share of the floor: weights and cached keys and
    values read once a step, at the bandwidth of a copy. longest: of the prompts, whose lengths are
    spread evenly; then pages change in nearly every step."""
    model = bench.model(name)
    batch, new = bench.size(batch, min(batch, 4)), bench.size(NEW, 4)
    lengths, rng = np.linspace(PROMPT, longest, batch).astype(int), np.random.default_rng(0)
    step_s = decode_step_s(bench, model, [rng.integers(0, 100, n) for n in lengths], new)
    tokens = lengths.sum() + batch * new / 2
    read = tokens * page_bytes(model.config, model.dtype.itemsize) / PAGE
    floor_s = (parameters(model) * model.dtype.itemsize + read) / copy_bandwidth(bench)
    return {"tokens/s": batch / step_s, "share of the floor": floor_s / step_s}


def decode_step_s(
    bench: Bench, model: ExactModel, prompts: np.ndarray | list[np.ndarray], new: int
) -> float:
    """Seconds of a decode step, from sampling `new` tokens of each prompt and one."""
    batch = len(prompts)
    engine = engine_of(model, [len(prompt) + new for prompt in prompts])
    first, whole = (
        bench.seconds(lambda count=count: generate(engine, prompts, [count] * batch))
        for count in (1, new)
    )
    return (whole - first) / (new - 1)


def shared(bench: Bench, name: str) -> Figures:
    """Decode of 32 prompts x 8 samples, whose pages are read once a group, beside 256 prompts."""
    groups, samples = bench.size(32, 2), bench.size(8, 2)
    new, length = bench.size(NEW, 4), bench.size(512, 130)
    apart = np.random.default_rng(0).integers(0, 100, (groups * samples, length))
    model, together = bench.model(name), apart[:groups].repeat(samples, 0)
    speeds = [len(p) / decode_step_s(bench, model, p, new) for p in (together, apart)]
    return dict(
        zip(("shared, tokens/s", "apart, tokens/s"), speeds, strict=True),
        **{"shared / apart": speeds[0] / speeds[1]},
    )


def matmul(bench: Bench, name: str) -> Figures:
    """Every matmul kernel on a model's linears: its time, or why it is not exact or does not run."""
    if find_spec("triton") is None:
        return dict.fromkeys((*(f"{kernel}, ms" for kernel in MATMULS), "taken"), "no Triton")
    on_gpu, model = bench.place.device.type == "cuda", bench.model(name)
    clock = None if on_gpu else lambda work: 1e3 * bench.seconds(work)
    if not on_gpu:
        in_use["cpu"] = TRITON
    trials = try_matmuls(model, time_ms=clock)
    if not on_gpu:
        del in_use["cpu"]  # those of a CPU are found again
    found = {f"{t.kernel}, ms": t.findings[0] if t.findings else t.ms for t in trials}
    return found | {"taken": fastest_exact(trials)}


def engine_of(model: ExactModel, lengths: list[int]) -> Engine:
    """An engine with room for sequences of these lengths at once."""
    pages = sum(-(-length // PAGE) for length in lengths)
    size = page_bytes(model.config, model.dtype.itemsize)
    return Engine(model, lambda tokens: "", cache_bytes=pages * size, max_batch=len(lengths))


def generate(engine: Engine, prompts: np.ndarray | list[np.ndarray], counts: list[int]) -> None:
    """Sample that many tokens of each prompt; the next call finds nothing cached."""
    requests = [
        Request(
            key=key, prompt=prompt.astype(np.int64), params=SamplingParams(max_new_tokens=count)
        )
        for key, (prompt, count) in enumerate(zip(prompts, counts, strict=True))
    ]
    done = engine.generate(requests)
    assert [len(completion.tokens) for completion in done] == counts
    engine.cache.flush()


def workload(bench: Bench, who: str) -> Figures:
    """nano-vllm's benchmark: 256 sequences, 100 to 1,024 tokens in and as many out."""
    rng, longest = np.random.default_rng(0), bench.size(1024, 8)
    shortest, count = bench.size(100, 4), bench.size(256, 4)
    prompts = [rng.integers(0, 100, rng.integers(shortest, longest + 1)) for _ in range(count)]
    counts = rng.integers(shortest, longest + 1, count).tolist()
    if who == "Tandem":
        model = bench.model("Qwen3-0.6B")
        engine = engine_of(model, [len(p) + n for p, n in zip(prompts, counts, strict=True)])
        seconds = bench.seconds(lambda: generate(engine, prompts, counts))
    elif find_spec(who) is None:
        return {"output tokens/s": f"{who} is not installed"}
    else:
        forget_models()  # a peer takes the whole device
        seconds = peer_seconds(bench, who, prompts, counts)
    return {"output tokens/s": sum(counts) / seconds}


def peer_seconds(bench: Bench, who: str, prompts: list[np.ndarray], counts: list[int]) -> float:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        bench.save_model("Qwen3-0.6B", folder)
        requests = {"prompts": [prompt.tolist() for prompt in prompts], "counts": counts}
        (folder / "requests.json").write_text(json.dumps(requests))
        script = Path(__file__).with_name("gpu_peer.py")
        done = subprocess.run(
            [sys.executable, script, who, folder], stdout=subprocess.PIPE, text=True, check=True
        )
        return float(done.stdout.splitlines()[-1])


def prefill(bench: Bench, name: str) -> Figures:
    """16 prompts of 1,024 tokens, to their first token."""
    model, count, length = bench.model(name), bench.size(16, 2), bench.size(1024, 32)
    prompts = np.random.default_rng(0).integers(0, 100, (count, length))
    engine = engine_of(model, [length + 1] * count)
    seconds = bench.seconds(lambda: generate(engine, prompts, [1] * count))
    flops = 2 * (parameters(model) - model.head.weight.numel()) * prompts.size
    return {
        "tokens/s": prompts.size / seconds,
        "share of the matmul ceiling": flops / seconds / matmul_flops(bench),
    }


def training(bench: Bench, name: str) -> Figures:
    """Forward, backward and AdamW of 8,192 tokens in sequences of 1,024."""
    model, batch = bench.model(name), sequences(bench.size(8, 2), bench.size(1024, 16))
    optimizer, length = optimizer_of(model), bench.size(1024, 16)
    seconds = bench.seconds(lambda: train(model, optimizer, batch))
    return {
        "tokens/s": len(batch.tokens) / seconds,
        "MFU": training_flops(model, len(batch.tokens), length) / seconds / matmul_flops(bench),
    }


def training_flops(model: ExactModel, tokens: int, length: int) -> float:
    """6 x parameters x tokens, and of causal attention 6 x layers x tokens x length x heads x head
    size: forward once, backward twice, half of the keys hidden."""
    (heads, _, size), layers = model.heads, model.config.num_hidden_layers
    return 6.0 * tokens * (parameters(model) + layers * length * heads * size)


def sequences(count: int, length: int) -> Microbatch:
    rng = np.random.default_rng(0)
    samples = [
        Sample(
            tokens=rng.integers(0, 100, length + 1), loss_mask=np.arange(length + 1) > 0, group=n
        )
        for n in range(count)
    ]
    [batch] = pack(samples, count * (length + 1))
    return batch


def train(model: ExactModel, optimizer: Optimizer, batch: Microbatch) -> None:
    known = torch.full((len(batch.targets),), -1 / len(batch.targets), device=model.device)
    logprobs, _ = batch_logprobs(model, batch, SamplingDistribution(), known, entropy=False)
    (-logprobs.sum() / len(batch.targets)).backward()
    optimizer.update()


def rl_step(bench: Bench, name: str, plain: bool = False) -> Figures:
    """`tandem train` of 64 problems x 8 samples, prompts of 256 tokens, 512 sampled; rewards,
    journal and ledger included. Medians of all steps but the first. plain: `plain_step` instead."""
    if plain:
        return plain_step(bench, name)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        command = [*prepare(folder, 2 + bench.repeats), *placed(bench)]
        parameters = bench.save_model(name, folder / "policy")
        forget_models()
        prompts, length = bench.size(64, 2), bench.size(256, 24)
        problems = [{"prompt": f"{n:0{length - 8}d}", "answer": "0"} for n in range(4 * prompts)]
        (folder / "problems.jsonl").write_text("\n".join(map(json.dumps, problems)))
        settings = {
            "model.path": folder / "policy",
            "data.train": folder / "problems.jsonl",
            "eval.data": "",
            "rl.prompts_per_step": prompts,
            "rl.group_size": bench.size(8, 2),
            "rollout.max_new_tokens": bench.size(512, 8),
            "rollout.max_batch": 512,
            "rollout.cache_mb": bench.cache_mb(parameters),
            "rl.minibatches": 1,
            "run.save_every": 1 << 30,
        }
        overrides = [f"{key}={value}" for key, value in settings.items()]
        run_without_a_save([*command, *overrides], folder / "run", 2 + bench.repeats)
        rows = read_metrics(folder / "run", "timings.jsonl")[2 : 2 + bench.repeats]
    medians = {
        name: statistics.median(row[key] for row in rows)
        for name, key in (
            ("step, s", "step_s"),
            ("rollout, s", "rollout_s"),
            ("learning, s", "learn_s"),
        )
    }
    return {
        **medians,
        "sampled tokens/s": statistics.median(row["generated_tokens_per_s"] for row in rows),
    }


def plain_step(bench: Bench, name: str) -> Figures:
    """The same step without Tandem, in one process: transformers' generate with SDPA and a cache,
    one reward of random numbers, GRPO's loss over microbatches of 8 sequences, torch's AdamW on the
    weights as they are. No journal, no ledger, no master weights."""
    forget_models()
    prompts, samples = bench.size(64, 2), bench.size(8, 2)
    length, new = bench.size(256, 24), bench.size(512, 8)
    device, model = bench.place.device, stock_model(bench, name, "sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    rows = torch.randint(0, 100, (prompts, length), device=device).repeat_interleave(samples, 0)
    wanted = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}

    def roll_out() -> torch.Tensor:
        every = torch.ones_like(rows)
        with torch.no_grad():
            return model.generate(
                rows, attention_mask=every, max_new_tokens=new, eos_token_id=None, **wanted
            )

    def learn(sequences: torch.Tensor) -> None:
        rewards = torch.rand(prompts, samples, device=device)
        spread = rewards.std(1, keepdim=True) + 1e-4
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / spread).view(-1, 1)
        for part, advantage in zip(sequences.split(8), advantages.split(8), strict=True):
            logits = model(part, logits_to_keep=new + 1, use_cache=False).logits[:, :-1].float()
            logprobs = logits.log_softmax(-1).gather(2, part[:, -new:, None])[..., 0]
            ratio = (logprobs - logprobs.detach()).exp()
            (-(ratio * advantage).sum() / (len(sequences) * new)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    times = []
    for _ in range(1 + bench.repeats):
        found: list[torch.Tensor] = []
        rollout_s = bench.once(lambda found=found: found.append(roll_out()))
        times.append((rollout_s, bench.once(lambda found=found: learn(found[0]))))
    rollout_s, learn_s = (statistics.median(column) for column in zip(*times[1:], strict=True))
    return {
        "step, s": statistics.median(map(sum, times[1:])),
        "rollout, s": rollout_s,
        "learning, s": learn_s,
        "sampled tokens/s": len(rows) * new / rollout_s,
    }


def run_without_a_save(command: list[str], folder: Path, rows: int) -> None:
    """Run a command until its timings have that many rows, and kill it before its last step, after
    which it would save and export: for Qwen3-4B 150 GB. Raises RuntimeError if it ends before."""
    process, timings = forks().start(command, folder), folder / "timings.jsonl"

    def count() -> int:
        return timings.read_bytes().count(b"\n") if timings.exists() else 0

    try:
        while process.is_alive() and count() < rows:
            time.sleep(0.02)
    finally:
        process.kill()
        process.join()
    if count() < rows:
        raise RuntimeError((output(folder).strip() or "no output").splitlines()[-1])


def inexact(bench: Bench, name: str, count: int, length: int) -> Figures:
    """Last hidden states by Tandem's kernels, and by torch's own products and SDPA."""
    count, length = bench.size(count, 2), bench.size(length, 16)
    model, batch = bench.model(name), sequences(count, length)
    stock = stock_model(bench, name, "sdpa").model
    ids = torch.from_numpy(batch.tokens.reshape(count, length)).to(bench.place.device)
    tokens, positions = torch.from_numpy(batch.tokens), torch.from_numpy(batch.positions)
    with torch.no_grad():
        exact_s = bench.seconds(
            lambda: model.hidden(tokens, positions, model.packed_plan(batch.segments))
        )
        inexact_s = bench.seconds(lambda: stock(input_ids=ids, use_cache=False))
    return {
        "exact, ms": 1e3 * exact_s,
        "inexact, ms": 1e3 * inexact_s,
        "exact / inexact": exact_s / inexact_s,
    }


def memory(bench: Bench, name: str) -> Figures:
    """Most memory of a process that samples and trains, and `tandem plan`'s number without a save
    under way."""
    tokens = bench.size(8192, 32)
    settings = {
        "rollout": {"cache_mb": bench.size(4096, 1), "release_cache": False},
        "train": {"tokens_per_microbatch": tokens},
    }
    with tempfile.TemporaryDirectory() as folder:
        bench.config(name).save_pretrained(folder)
        place = {"path": folder, "device": str(bench.place.device), "dtype": bench.place.dtype_name}
        config = Config.model_validate({"model": place, **settings})
        sizes = model_sizes(config, "sft")
        planned = Footprint(sizes=sizes, config=config, command="sft", longest=0).needs()
    forget_models()

    def work() -> None:
        model = bench.model(name)
        optimizer = optimizer_of(model)
        engine = Engine(model, lambda t: "", cache_bytes=config.rollout.cache_mb << 20, max_batch=8)
        for _ in range(2):  # the moments are there from the second update on
            train(model, optimizer, sequences(8, tokens // 8))
        assert not engine.has_work

    peak = bench.peak_bytes(work)
    total = sum(size for what, size, _ in planned if what != "a save under way")
    return {
        "measured, GiB": None if peak is None else peak / GIB,
        "tandem plan, GiB": total / GIB,
        "measured / plan": None if peak is None else peak / total,
    }
