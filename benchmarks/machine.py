"""What the machine can do, measured in the same run as what is judged by it; and whether it is quiet enough to judge."""

import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch


def median_seconds(function: Callable[[], object], repeats: int) -> float:
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def ceilings() -> dict[str, float]:
    """Peak float32 matmul (GFLOP/s, 2 n^3 for n = 2048) and read bandwidth (GB/s, the sum of 1 GiB), on torch's threads."""
    n = 2048
    a, b, big = torch.randn(n, n), torch.randn(n, n), torch.ones(1 << 28)
    return {
        "gemm_gflops": 2 * n**3 / median_seconds(lambda: a @ b, 5) / 1e9,
        "read_gb_s": big.numel() * 4 / median_seconds(big.sum, 5) / 1e9,
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
    names = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{names[0]} ({capability}), {os.cpu_count()} cores, {platform.python_version()}, torch {torch.__version__}"
