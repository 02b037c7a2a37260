"""Section "stream" of results/cluster.md: what TransferQueue carries a second, and what the driver
holds and sends of it for each sample.

    python benchmarks/cluster_stream.py     prints the rows

Episodes are made up: a prompt of 32 tokens, completions of 224. A sample is an episode.
"""

import gc
import sys
import time
import tracemalloc
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np

from tandem.plugins.cluster.ray_cluster import open_ray
from tandem.plugins.cluster.rows import ARRAYS, tag_of
from tandem.plugins.cluster.transfer_queue import TransferQueueStream, metadata_of, start_servers
from tandem.types import Episode, Group, Problem

SAMPLES = (1_000, 10_000, 100_000)
PROMPT, LENGTH, SIZE = 32, 256, 8  # tokens, tokens, episodes of a group
TIMEOUT_S = 600.0
MEGABYTE = 1e6


def run(samples: tuple[int, ...] = SAMPLES) -> list[tuple[str, str, str]]:
    """Return rows (what, result, how) of a stream on a Ray cluster of this machine."""
    with open_ray():
        servers, handles = start_servers(2, TIMEOUT_S)
        stream = TransferQueueStream(servers, name="driver", capacity=1, timeout_s=TIMEOUT_S)
        carry(stream, 0, SIZE)
        rows = [row for n, count in enumerate(samples) for row in carry(stream, n + 1, count)]
        stream.close()
        del handles
    return rows


def carry(stream: TransferQueueStream, step: int, count: int) -> list[tuple[str, str, str]]:
    """Put, take and clear a step of so many samples; return its rows."""
    groups = [group(number) for number in range(-(-count // SIZE))]
    count = len(groups) * SIZE
    megabytes = sum(array_bytes(e) for g in groups for e in g.episodes) / MEGABYTE
    tags = metadata_of(tag_of(g, e) for g in groups for e in g.episodes)
    sent = metadata_bytes(tags) / count
    everything = [(row, n) for row in range(len(groups)) for n in range(SIZE)]
    del tags
    gc.collect()
    tracemalloc.start()
    stream.put(step, groups)
    gc.collect()
    held = tracemalloc.get_traced_memory()[0] / count
    tracemalloc.stop()
    stream.clear(step)

    start = time.perf_counter()
    stream.put(step, groups)
    put_s = time.perf_counter() - start
    del groups
    start = time.perf_counter()
    taken = stream.take(step, [], lambda _: everything)
    take_s = time.perf_counter() - start
    assert len(taken) * SIZE == count and taken[-1].episodes[-1].tokens[-1] == LENGTH - 1
    stream.clear(step)
    return [
        (
            f"metadata of a step of {count:,} samples",
            f"{held:.0f} bytes a sample held by the driver, {sent:.0f} sent",
            "tracemalloc after `put`; the encoded tags, as TransferQueue sends them",
        ),
        (
            f"arrays of {count:,} samples, {megabytes:,.1f} MB",
            f"put {megabytes / put_s:.0f} MB/s, take {megabytes / take_s:.0f} MB/s",
            f"one process, two storage units; {put_s:.2f} s and {take_s:.2f} s, metadata included",
        ),
    ]


def group(number: int) -> Group:
    """Return a group whose prompt is its own."""
    uid = f"made up/{number:06d}"
    episodes = tuple(episode(uid, n, number) for n in range(SIZE))
    return Group(problem=Problem(uid=uid, messages=(), answer=""), episodes=episodes)


def episode(uid: str, number: int, first: int) -> Episode:
    """Return an episode of LENGTH tokens, the first of them `first`."""
    mask = np.arange(LENGTH) >= PROMPT
    tokens = np.arange(LENGTH)
    tokens[0] = first
    return Episode(
        uid=uid,
        sample_index=number,
        tokens=tokens,
        loss_mask=mask,
        engine_logprobs=np.where(mask, np.float32(-0.5), np.float32(0)),
        weight_versions=np.where(mask, 3, -1).astype(np.int32),
        penalties=np.zeros(LENGTH, np.float32),
        num_prompt_tokens=PROMPT,
        messages=(),
        stop_reason="stop",
        reward=number / SIZE,
        reward_parts={"answer": number / SIZE},
    )


def array_bytes(episode: Episode) -> int:
    """Count the bytes of an episode's arrays."""
    return sum(getattr(episode, name).nbytes for name in ARRAYS)


def metadata_bytes(tags: list[dict[str, str]]) -> int:
    """Count the bytes of tags in a message of TransferQueue."""
    from transfer_queue.utils.zmq_utils import ZMQMessage, ZMQRequestType, frame_nbytes

    message = ZMQMessage.create(
        request_type=ZMQRequestType.SET_CUSTOM_META,
        sender_id="driver",
        body={"partition_custom_meta": {"train_000001": dict(enumerate(tags))}},
    )
    return sum(frame_nbytes(frame) or 0 for frame in message.serialize())


if __name__ == "__main__":
    for what, result, how in run(tuple(int(n) for n in sys.argv[1:]) or SAMPLES):
        print(f"{what}: {result} ({how})")
