"""`make scaling`: results/scaling.md, with tokens/s and memory of 1, 2 and 4 trainer processes.

    python benchmarks/scaling.py            measures (a quiet machine, minutes), then writes the page
    python benchmarks/scaling.py --page     writes the page from results/scaling.json
    python benchmarks/scaling.py --tiny     tries it: a tiny model, nothing is written

Processes train over data, with one thread each, pinned to a core where there are as many. The
formulas are those of `tandem plan --gpus`; scaling_page.py renders them.
"""

import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from datetime import date, timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import machine
import numpy as np
import torch
import torch.distributed as dist
from scaling_models import model_of
from scaling_page import JSON, write_page
from transformers import AutoModelForCausalLM, Qwen3Config

from tandem.config.parallel import Parallel
from tandem.model.forward import batch_logprobs
from tandem.model.load import make_exact
from tandem.plugins.plan.scaling import communication
from tandem.plugins.plan.shards import Work, memory, parameters
from tandem.runtime import numerics
from tandem.trainer.learner import Learner
from tandem.trainer.optimizer import Optimizer, Settings
from tandem.trainer.pack import pack
from tandem.trainer.parallel.mesh import make_mesh
from tandem.trainer.parallel.ranks import ParallelRanks
from tandem.trainer.ranks import ALONE, Ranks
from tandem.types import Microbatch, Sample, SamplingDistribution
from tests.support.meshes import sent_bytes

SIZES = (1, 2, 4)
SHAPE = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1536,
    "vocab_size": 8192,
    "tie_word_embeddings": True,
}
TINY = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 192, "vocab_size": 512}
SEQUENCES, LENGTH, TINY_LENGTH = 16, 256, 32  # of an update
STEPS, TIMEOUT = 5, timedelta(minutes=30)


def main(*arguments: str) -> int:
    if "--page" in arguments:
        write_page()
        return 0
    tiny = "--tiny" in arguments
    if not tiny and machine.others_cpu_share() > 0.10:
        print("error: other processes use the CPU\n  next:     stop them, then make scaling")
        return 2
    rows = {str(size): measure(size, tiny) for size in SIZES}
    result = {"machine": machine.describe(), "date": str(date.today()), "rows": rows}
    print(json.dumps(result))
    if not tiny:
        JSON.write_text(json.dumps(result, indent=1) + "\n")
        write_page()
    return 0


def measure(size: int, tiny: bool) -> dict[str, Any]:
    """Run so many processes; the slowest, the largest, and the formulas beside them."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=train, args=(rank, size, store.port, folder, tiny))
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.join(TIMEOUT.total_seconds())
        finally:
            for process in processes:
                process.kill()
        ranks = [json.loads(file.read_text()) for file in sorted(Path(folder).iterdir())]
    assert len(ranks) == size, "a process has failed"
    work, mesh = work_of(tiny), Parallel(data=size)
    planned, tokens = memory(work, mesh), SEQUENCES * (TINY_LENGTH if tiny else LENGTH)
    seconds = max(rank["seconds"] for rank in ranks)
    return {
        "parameters": parameters(work.shape),
        "pinned": ranks[0]["pinned"],
        "tokens/s": tokens / seconds,
        "seconds": seconds,
        "state bytes": max(rank["state"] for rank in ranks),
        "state bytes by formula": planned["weights"]
        + planned["Adam moments"]
        + 4 * parameters(work.shape) // size,
        "peak RSS bytes": max(rank["peak"] for rank in ranks),
        "planned bytes": sum(planned.values()),
        "RSS bytes before the model": max(rank["before"] for rank in ranks),
        "sent bytes": max(rank["sent"] for rank in ranks),
        "sent bytes by formula": sum(communication(work, mesh).values()),
    }


def work_of(tiny: bool) -> Work:
    """Return an update of two microbatches in one process of four."""
    length = TINY_LENGTH if tiny else LENGTH
    return Work(
        model=model_of(Qwen3Config(**_shape(tiny))),
        dtype=torch.float32,
        clusters=SEQUENCES,
        cluster=length,
        length=length,
        microbatch=2 * length,
    )


def _shape(tiny: bool) -> dict[str, Any]:
    return SHAPE | (TINY if tiny else {})


def train(rank: int, size: int, port: int, folder: str, tiny: bool) -> None:
    """Be a process: train, and write what was measured."""
    cores = sorted(os.sched_getaffinity(0))
    pinned = len(cores) >= size
    if pinned:
        os.sched_setaffinity(0, {cores[rank]})
    numerics.prepare(1)
    before, ranks = resident("VmRSS"), ALONE
    if size > 1:
        store = dist.TCPStore("127.0.0.1", port, timeout=TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        cpu = torch.device("cpu")
        ranks = ParallelRanks(make_mesh(Parallel(data=size), cpu, lambda what, to: nullcontext()))
    learner, batches = learner_of(ranks, tiny), microbatches(tiny)
    update = lambda: learner.update(batches, lambda batch: loss(learner, batch))  # noqa: E731
    update()  # the moments are there from now on
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    times = [seconds(update) for _ in range(1 if tiny else STEPS)]
    found = {
        "seconds": statistics.median(times),
        "peak": resident("VmHWM"),
        "before": before,
        "pinned": pinned,
        "sent": sent_bytes(update, size),
        "state": state_bytes(learner, batches),
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    if size > 1:
        dist.destroy_process_group()


def learner_of(ranks: Ranks, tiny: bool) -> Learner:
    torch.manual_seed(0)
    config = Qwen3Config(**_shape(tiny))
    model = make_exact(AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval())
    ranks.divide(model, torch.float32)
    optimizer = Optimizer(
        ranks.trainable(model),
        Settings(learning_rate=1e-4, total_steps=100),
        whole=ranks.pieces(model),
    )
    return Learner(model, optimizer, ranks)


def microbatches(tiny: bool) -> list[Microbatch]:
    """Make the same microbatches for any number of processes: two sequences each."""
    rng, length = np.random.default_rng(0), TINY_LENGTH if tiny else LENGTH
    samples = [
        Sample(
            tokens=rng.integers(0, 500, length + 1), loss_mask=np.arange(length + 1) > 0, group=n
        )
        for n in range(SEQUENCES)
    ]
    return pack(samples, 2 * length, shares=max(SIZES))


def loss(learner: Learner, batch: Microbatch) -> tuple[torch.Tensor, dict[str, float]]:
    logprobs, _ = batch_logprobs(learner.model, batch, SamplingDistribution())
    return -logprobs.sum() / (SEQUENCES * len(batch.targets)), {}


def seconds(function: Any) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def state_bytes(learner: Learner, batches: list[Microbatch]) -> int:
    """Count the bytes of weights, gradients and moments that this process holds."""
    learner.ranks.backward(learner.model, batches, lambda batch: loss(learner, batch))
    held = []
    for parameter in learner.ranks.trainable(learner.model).values():
        moments = learner.optimizer.adam.state[parameter]
        assert parameter.grad is not None
        held += [parameter, parameter.grad, moments["exp_avg"], moments["exp_avg_sq"]]
    return sum(math.prod(tensor.shape) * tensor.element_size() for tensor in held)


def resident(name: str) -> int:
    """Return a line of /proc/self/status, in bytes."""
    [line] = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name)]
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
