"""Addressed randomness (contract D1): a draw is a hash of its place of use, never the next of a
stream.

No generator has state, so no draw depends on other draws, their order, or a restart.
"""

import hashlib

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def address(*parts: int | str) -> int:
    """Hash a place to 64 bits, e.g. address(seed, "sample", problem.uid, sample_index, turn)."""
    # the separator is doubled in a part, and a letter follows it between parts: all texts differ
    text = "\x1f".join(
        f"str:{p}".replace("\x1f", "\x1f\x1f") if isinstance(p, str) else f"int:{int(p)}"
        for p in parts
    )
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Draw float32 [B] in [0, 1) of 24 bits from keys, uint64 [B], and positions, int64 [B].

    By splitmix64.
    """
    with np.errstate(over="ignore"):
        z = keys.astype(np.uint64) + _GOLDEN * (positions.astype(np.uint64) + np.uint64(1))
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return ((z >> np.uint64(40)).astype(np.float64) * 2.0**-24).astype(np.float32)


def permutation(size: int, *parts: int | str) -> np.ndarray:
    """Shuffle range(size), int64 [size], by the address of parts."""
    return np.random.Generator(np.random.Philox(key=address(*parts))).permutation(size)
