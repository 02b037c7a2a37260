"""Hashes of weights: equal if and only if every bit is. Engine, trainer and checkpoints compare
them.

Checkpoints and ledgers have SHA-256 (`weight_hash`). What is on its way from the trainer to a
worker has XXH3 of 128 bits for each tensor (`tensor_digest`): several times faster, and as sure
against accidents, though not against forgers.
"""

import hashlib
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import xxhash
from torch import Tensor

SMALL = 1 << 20  # bytes; a thread that waits for a core takes longer than to hash so many


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


def tensor_digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the digest of each tensor, in hex."""
    return {name: tensor_digest(tensor) for name, tensor in tensors.items()}


def tensor_digest(tensor: Tensor) -> str:
    """Return XXH3-128 of a tensor's dtype, shape and bytes, in hex."""
    digest = begin_digest(tensor)
    digest.update(raw_bytes(tensor))
    return digest.hexdigest()


def begin_digest(tensor: Tensor) -> xxhash.xxh3_128:
    """Return the state of a tensor_digest before its bytes."""
    return xxhash.xxh3_128(f"{tensor.dtype} {list(tensor.shape)} ".encode())


def combine(hashes: Mapping[str, str]) -> str:
    """Hash the hashes of tensors and their names, in name order, to hex."""
    lines = [f"{name} {hashes[name]}\n" for name in sorted(hashes)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes in row order: its own memory if it has them so, else a copy."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data
