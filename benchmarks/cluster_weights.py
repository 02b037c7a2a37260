"""GB/s of each transport of weights against memcpy, and what a delta saves.

    python benchmarks/cluster_weights.py             135M parameters in float32, 1.2B in bfloat16
    python benchmarks/cluster_weights.py --tiny      tries it with small tensors

A trainer's process publishes, one worker's process receives, loads into the tensors of an engine and
hashes them, as rollout_workers/worker.py does; both with one thread, as is the memcpy. Memory of
earlier versions is used again, as in a run from its third version on. Medians of REPEATS.
benchmarks/cluster.py has these rows on its page, and in a section of their own those of `run_trained`:
what deltas save in real training, SmolLM2-135M in bfloat16 (`make smollm2-model` first).
"""

import importlib.util
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import machine
import smollm2
import torch

from tandem.registry import find
from tandem.weights.hashing import combine, tensor_digests
from tandem.weights.shared import Layout, SharedWeights
from tandem.weights.transports import receive_offers
from tandem.workers.channel import Channel, take_channel
from tandem.workers.host import LocalProcess

Rows = list[tuple[str, str, str]]

ROOT = Path(__file__).parent.parent
REPEATS = 5
BAR = 0.6  # of memcpy, for shm
DEADLINE_S = 600.0
# name -> (vocabulary, width, key/value width, inner width, layers), type
MODELS = {
    "135M, float32": ((49152, 576, 192, 1536, 30), torch.float32),
    "1.2B, bfloat16": ((128256, 2048, 512, 8192, 16), torch.bfloat16),
}
# learning rate -> deltas: below bfloat16's rounding of most weights, the recipe's, a tiny model's
TRAINED = {"1e-6": ["elements"], "1e-5": ["elements"], "3e-4": ["elements"]}
STEPS = 3  # the first one's weights are sent whole
TINY = {"tiny, float32": ((512, 64, 32, 192, 2), torch.float32)}


def run(tiny: bool = False) -> Rows:
    """Measure all of it: (what, result, how)."""
    found: Rows = []
    torch.set_num_threads(1)
    for name, (shape, dtype) in (TINY if tiny else MODELS).items():
        found += measure(name, dict(weights(shape, dtype)))
    return found


def measure(name: str, tensors: dict[str, torch.Tensor]) -> Rows:
    """Measure one model."""
    size = Layout.of(tensors).tensor_bytes
    memcpy = size / copy_seconds(tensors) / 1e9
    found = [(f"memcpy, {name}", f"{memcpy:.2f} GB/s", f"{size / 1e9:.2f} GB, one thread")]
    transports = ["shm", "collective", *["rdma"] * bool(importlib.util.find_spec("nixl"))]
    with reader(Layout.of(tensors)) as ask:
        for transport in transports:
            moved, synced = zip(*sync_times(transport, tensors, ask), strict=True)
            rate = size / statistics.median(moved) / 1e9
            share = f"{rate / memcpy:.0%} of memcpy"
            bar = f"; goal {BAR:.0%}" * (transport == "shm")
            how = "publish (copy and digest) until a worker can read every tensor"
            found.append((f"{transport}, {name}", f"{rate:.2f} GB/s ({share}{bar})", how))
            seconds = statistics.median(synced)
            how = "publish, receive, load into an engine's tensors, digest of these"
            found.append((f"{transport}, {name}, whole sync", f"{seconds:.2f} s", how))
        found += delta_rows(name, tensors, ask)
    return found


def run_trained() -> Rows:
    """Measure the bytes of a step's weights in GRPO of SmolLM2, with each learning rate and delta."""
    smollm2.make_data(smollm2.FOLDER / "data")
    with tempfile.TemporaryDirectory() as folder:
        return [
            trained(rate, delta, Path(folder) / f"{delta} {rate}")
            for rate, deltas in TRAINED.items()
            for delta in deltas
        ]


def trained(rate: str, delta: str, folder: Path) -> tuple[str, str, str]:
    """Train some steps with a rollout worker, and read what they sent."""
    settings = f"model.dtype=bfloat16 train.learning_rate={rate} weights.delta={delta}"
    settings += f" rl.correction=tis rl.prompts_per_step=4 rollout.workers=1 run.steps={STEPS}"
    command = ["-m", "tandem", "train", "recipes/smollm2.toml", *settings.split(), "eval.every=0"]
    subprocess.run(
        [sys.executable, *command, f"run.folder={folder}"],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return row_of(rate, delta, settings, folder)


def row_of(rate: str, delta: str, settings: str, folder: Path) -> tuple[str, str, str]:
    lines = (folder / "timings.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "sync_bytes" in row]
    whole, sent = rows[0]["sync_bytes"], statistics.median(r["sync_bytes"] for r in rows[1:])
    seconds = {key: statistics.median(row[key] for row in rows[1:]) for key in ("sync_s", "load_s")}
    how = (
        f"`tandem train recipes/smollm2.toml {settings}`; {whole / 1e6:.0f} MB whole, of steps 2 on"
    )
    return (
        f"{delta}, SmolLM2-135M, bfloat16, learning rate {rate}",
        f"{sent / 1e6:.2f} MB a step, 1/{whole / sent:.1f}; sync {seconds['sync_s']:.2f} s, "
        f"load {seconds['load_s']:.2f} s",
        how,
    )


def sync_times(
    transport: str, tensors: dict[str, torch.Tensor], ask: Callable[..., dict[str, Any]]
) -> Iterator[tuple[float, float]]:
    """Yield (seconds until a worker can read, seconds until its engine runs the weights)."""
    store = find("transports", transport, key="")().open(tensors, delta=False)
    for version in range(REPEATS + 1):  # the first one opens connections
        start = time.perf_counter()
        digest = store.publish(version, tensors)
        answer = ask(store, version, -1)
        ended = time.perf_counter()
        assert answer["hash"] == digest
        store.release(below=version + 1)
        if version:
            yield ended - start - answer["load_s"], ended - start
    store.close()


def delta_rows(
    name: str, tensors: dict[str, torch.Tensor], ask: Callable[..., dict[str, Any]]
) -> Rows:
    """Measure a delta where two projections of each layer change, as a merged adapter has it."""
    store = find("transports", "collective", key="")().open(tensors, delta=True)
    seconds, sent = [], []
    for version in range(REPEATS + 1):
        for part in (part for n, part in tensors.items() if "q_proj" in n or "v_proj" in n):
            part.add_(1)
        start, before = time.perf_counter(), store.sent_bytes
        digest = store.publish(version, tensors)
        answer = ask(store, version, version - 1)
        assert answer["hash"] == digest
        store.release(below=version)
        seconds.append(time.perf_counter() - start)
        sent.append(store.sent_bytes - before)
    store.close()
    ratio, saved = sent[0] / sent[-1], statistics.median(seconds[1:])
    return [
        (
            f"delta, {name}",
            f"1/{ratio:.1f} of the bytes, whole sync {saved:.2f} s",
            "collective; only q_proj and v_proj change, as with an adapter on these",
        )
    ]


def weights(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a Llama of that shape, random."""
    vocabulary, width, kv, inner, layers = shape
    parts = {
        "q_proj": (width, width),
        "k_proj": (kv, width),
        "v_proj": (kv, width),
        "o_proj": (width, width),
        "gate_proj": (inner, width),
        "up_proj": (inner, width),
        "down_proj": (width, inner),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
    }
    generator = torch.Generator().manual_seed(0)
    yield "embed_tokens", torch.empty(vocabulary, width, dtype=dtype).uniform_(generator=generator)
    for layer, (part, size) in itertools.product(range(layers), parts.items()):
        yield f"{layer}.{part}", torch.empty(size, dtype=dtype).uniform_(generator=generator)


def copy_seconds(tensors: dict[str, torch.Tensor]) -> float:
    """Return the seconds of copying the tensors to memory that is there already."""
    copies = {name: torch.empty_like(tensor).copy_(tensor) for name, tensor in tensors.items()}
    return machine.median_seconds(
        lambda: [copy.copy_(tensors[name]) for name, copy in copies.items()], REPEATS
    )


@contextmanager
def reader(layout: Layout) -> Iterator[Callable[[SharedWeights, int, int], dict[str, Any]]]:
    """Start a worker's process; yields a function that has it take a version and answer."""
    host = LocalProcess((sys.executable, __file__, "--reader"), log=False)
    process, channel = host.process, host.connect()

    def answer() -> dict[str, Any]:
        ends = time.monotonic() + DEADLINE_S
        while time.monotonic() < ends:
            channel.flush()
            channel.wait(0.01)
            for message in channel.receive():
                return message
        raise TimeoutError("the worker has not answered")

    def ask(store: SharedWeights, version: int, base: int) -> dict[str, Any]:
        [(source, descriptor)] = store.offer(version, [SimpleNamespace(version=base)])
        channel.send({"from": source}, *([descriptor] if descriptor >= 0 else []))
        return answer()

    try:
        channel.send({"layout": layout.parts})
        answer()
        yield ask
    finally:
        process.kill()
        process.wait()
        channel.close()


def read(channel: Channel) -> None:
    """Be the worker."""
    torch.set_num_threads(1)
    for message in messages(channel):
        if "layout" in message:
            layout = Layout.from_json(message["layout"])
            receive, engine = receive_offers(layout), layout.staging()[1]
            for tensor in engine.values():
                tensor.zero_()
            channel.send({"ready": True})
            continue
        tensors = receive(message["from"], channel.descriptors)
        start = time.perf_counter()
        for name, tensor in tensors.items():
            engine[name].copy_(tensor)
        digest = combine(tensor_digests(engine))
        channel.send({"hash": digest, "load_s": time.perf_counter() - start})
        del tensors  # as a worker ends its mapping after its answer


def messages(channel: Channel) -> Iterator[dict[str, Any]]:
    while True:
        channel.wait(DEADLINE_S)
        yield from channel.receive()


def main(*arguments: str) -> int:
    if "--reader" in arguments:
        try:
            read(take_channel())
        except EOFError:
            return 0
    busy = machine.others_cpu_share()
    print(machine.describe(), f"; others use {busy:.0%} of the cores", sep="")
    for row in run("--tiny" in arguments):
        print(" | ".join(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
