"""Ceilings of the machine, measured in the same run as the results they are compared with, and
whether it is quiet enough to measure."""

import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tandem.model.kernels import CPU
from tandem.runtime import numerics


def median_seconds(function: Callable[[], object], repeats: int) -> float:
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def ceilings() -> dict[str, float]:
    """Peak float32 matmul (GFLOP/s, 2 n^3 for n = 2048) and read bandwidth (GB/s of 1 GiB), on
    torch's threads.

    The product is the faster of torch's own and oneDNN's on a prepacked matrix: on AMD's processors
    with AVX-512 they differ by a factor of two. The bandwidth is the best of a sum, the largest element, a dot product of the halves and a
    matrix times a vector: none of them reads as fast as the machine can on every processor.
    """
    n = 2048
    a, b, big = torch.randn(n, n), torch.randn(n, n), torch.ones(1 << 28)
    packed = CPU.pack(b)
    products = (lambda: a @ b, lambda: CPU.matmul(a, packed))
    halves, matrix, vector = big.split(1 << 27), big.view(-1, 1 << 12), torch.ones(1 << 12)
    reads = (big.sum, big.max, lambda: torch.dot(*halves), lambda: torch.mv(matrix, vector))
    return {
        "gemm_gflops": 2 * n**3 / min(median_seconds(product, 5) for product in products) / 1e9,
        "read_gb_s": big.numel() * 4 / min(median_seconds(read, 5) for read in reads) / 1e9,
    }


def others_cpu_share(seconds: float = 2.0) -> float:
    """Share of all cores that other processes use while this one sleeps."""

    def busy() -> float:
        fields = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
        return sum(fields) - fields[3] - fields[4]

    before = busy()
    time.sleep(seconds)
    return (busy() - before) / os.sysconf("SC_CLK_TCK") / seconds / (os.cpu_count() or 1)


def describe() -> str:
    return f"{numerics.processor()}; {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}"
