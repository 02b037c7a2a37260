"""Hashes of weights: equal if and only if every bit is. Engine, trainer and checkpoints compare
them.

Checkpoints and ledgers have SHA-256 (`weight_hash`). What is on its way from the trainer to a
worker has a digest of 128 bits for each tensor: several times faster, and as sure against
accidents, though not against forgers. An offer names which of DIGESTS:

    xxh3      tensor_digest   XXH3, of bytes in memory of the CPU
    device    device_digest   sums that a GPU computes where the tensor lies
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import xxhash
from torch import Tensor

SMALL = 1 << 20  # bytes; a thread that waits for a core takes longer than to hash so many
WORDS = 1 << 21  # of 8 bytes that a device mixes at once, in seven times their memory
# odd constants of SplitMix64 (Steele, Lea, Flood 2014), as int64
STEP, FIRST, SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15

Digest = Callable[[Tensor], str]


def weight_hash(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Hash names, dtypes, shapes and bytes, in name order, to hex: equal if and only if every bit
    is. As many large tensors at once as torch has threads; those that are made one after another,
    as merged weights, are not all held."""
    hashes, waiting = dict[str, str](), deque[tuple[str, Future[str]]]()
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads) as pool:
        for name, tensor in tensors:
            if tensor.nbytes < SMALL:
                hashes[name] = tensor_hash(tensor)
                continue
            waiting.append((name, pool.submit(tensor_hash, tensor)))
            if len(waiting) > threads:
                oldest, future = waiting.popleft()
                hashes[oldest] = future.result()
        hashes |= {name: future.result() for name, future in waiting}
    return combine(hashes)


def tensor_hash(tensor: Tensor) -> str:
    """Hash a tensor's dtype, shape and bytes to hex, without strides and device."""
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} ".encode())
    digest.update(raw_bytes(tensor))
    return digest.hexdigest()


def tensor_digest(tensor: Tensor) -> str:
    """Return XXH3-128 of a tensor's dtype, shape and bytes, in hex."""
    digest = begin_digest(tensor)
    digest.update(raw_bytes(tensor))
    return digest.hexdigest()


def device_digest(tensor: Tensor) -> str:
    """Return a digest of a tensor's dtype, shape and bytes, in hex, of which 16 bytes leave the
    device: the sum of its words, each mixed with its place, and the sum of these times their
    places. Integers, so the order of summation is free."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    sums = torch.zeros(2, dtype=torch.int64, device=flat.device)
    for start in range(0, len(flat), 8 * WORDS):
        part = flat[start : start + 8 * WORDS]
        words = torch.nn.functional.pad(part, (0, -len(part) % 8)).view(torch.int64)
        places = torch.arange(start // 8, start // 8 + len(words), device=flat.device)
        mixed = mix(words ^ mix((places + 1) * STEP))
        sums += torch.stack([mixed.sum(), (mixed * (2 * places + 1)).sum()])
    digest = begin_digest(tensor)
    digest.update(raw_bytes(sums))
    return digest.hexdigest()


def mix(words: Tensor) -> Tensor:
    """Give each int64 word another, no two the same: the finish of SplitMix64."""
    for shift, factor in ((30, FIRST), (27, SECOND)):
        words = (words ^ ((words >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return words ^ ((words >> 31) & ((1 << 33) - 1))


DIGESTS: dict[str, Digest] = {"xxh3": tensor_digest, "device": device_digest}


def tensor_digests(tensors: Mapping[str, Tensor], digest: Digest = tensor_digest) -> dict[str, str]:
    """Return the digest of each tensor, in hex."""
    return {name: digest(tensor) for name, tensor in tensors.items()}


def begin_digest(tensor: Tensor) -> xxhash.xxh3_128:
    """Return the state of a tensor_digest before its bytes."""
    return xxhash.xxh3_128(f"{tensor.dtype} {list(tensor.shape)} ".encode())


def combine(hashes: Mapping[str, str]) -> str:
    """Hash the hashes of tensors and their names, in name order, to hex."""
    lines = [f"{name} {hashes[name]}\n" for name in sorted(hashes)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes in row order: its own memory if it has them so, else a copy."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
