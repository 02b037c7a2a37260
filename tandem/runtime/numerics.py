"""What the bits of this process depend on besides the numbers: the one place where it is set,
before the first product.

Every process that computes calls `prepare` first: driver, rollout worker, benchmark, notebook; what
runs a user's code is started with `environment`. Importing this module, or `tandem`, changes
nothing.

MKL's strict mode  A batched product takes other kernels for few rows and for transposed keys, a gradient for other thread
                   counts. Seen on Intel Xeons (AVX-512, AMX), and much more with MKL held at AVX2. Fixed by MKL's first
                   product. On AMD it means slow kernels and is not needed, so it stays off there.
a small exp        MKL's first parallel exp of a process can race with its own set-up, and some elements get other bits.
                   Seen on one Intel Xeon in 5 of 16 new processes, on another in 0 of 42.
thread count       Once it is set, MKL no longer takes fewer by itself. On every processor.
denormal numbers   Whether they are flushed is each thread's own setting. A caller may have set it; they are kept.
float32 products   torch can be told to round them to bf16 (AVX512-BF16, AMX). A caller may have; they are not.
"""

import ctypes
import os
import platform
import sys
from functools import cache
from pathlib import Path

STRICT = "AUTO,STRICT"
_STRICT_BIT = 0x10000  # MKL_CBWR_STRICT of mkl_types.h


def prepare(threads: int = 0) -> int:
    """Make this process's arithmetic reproducible; returns the number of threads it computes with.

    threads: 0 takes torch's own choice (the cores at hand, or OMP_NUM_THREADS). An MKL_CBWR that is
    set already is left as it is, and `why_not_reproducible` has its say.
    """
    if vendor() == "GenuineIntel":
        os.environ.setdefault("MKL_CBWR", STRICT)
    import torch

    torch.set_num_threads(threads or torch.get_num_threads())
    torch.set_flush_denormal(False)
    torch.set_float32_matmul_precision("highest")
    torch.zeros(64).exp()  # too small for a second thread
    return torch.get_num_threads()


def environment() -> dict[str, str]:
    """Return the variables to start a process with that computes beside others: one thread, and the
    mode of `prepare`."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return threads | (
        {"MKL_CBWR": os.environ.get("MKL_CBWR", STRICT)} if vendor() == "GenuineIntel" else {}
    )


def why_not_reproducible() -> list[str]:
    """Return the reasons why this process is not reproducible; empty after `prepare`, unless that
    came too late."""
    if vendor() != "GenuineIntel" or _mkl_mode() & _STRICT_BIT:
        return []
    asked = os.environ.get("MKL_CBWR", "unset")
    why = (
        "it computed before the mode was set: restart the process"
        if asked == STRICT
        else f"MKL_CBWR={asked}"
    )
    return [f"MKL is not in its strict mode ({why})"]


def processor() -> str:
    """The processor, and the switches under which libraries see it: "Intel(R) Xeon(R) Processor
    6/167, AVX512"."""
    import torch

    about = _cpuinfo()
    name = about.get("model name", platform.processor() or platform.machine())
    model = "/".join(
        about[key] for key in ("cpu family", "model", "CPU implementer", "CPU part") if key in about
    )
    switches = ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR")
    held = [f"{switch}={os.environ[switch]}" for switch in switches if switch in os.environ]
    return ", ".join([f"{name} {model}".strip(), torch.backends.cpu.get_cpu_capability(), *held])


def vendor() -> str:
    """Return the maker of the processor, e.g. "GenuineIntel" or "AuthenticAMD"; empty where it is
    not known."""
    return _cpuinfo().get(
        "vendor_id",
        "GenuineIntel" if sys.platform == "darwin" and os.uname().machine == "x86_64" else "",
    )


def cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _mkl_mode() -> int:
    """MKL's own word on its mode; without that (a torch that does not export it), what it was asked
    for."""
    import torch

    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if not torch.backends.mkl.is_available():
        return _STRICT_BIT  # no MKL, nothing to set
    mode = (
        getattr(ctypes.CDLL(str(library)), "mkl_serv_cbwr_get", None) if library.exists() else None
    )
    return (
        int(mode(-1)) if mode else _STRICT_BIT * os.environ.get("MKL_CBWR", "").endswith("STRICT")
    )


@cache
def _cpuinfo() -> dict[str, str]:
    """The first processor of /proc/cpuinfo."""
    path = Path("/proc/cpuinfo")
    first = path.read_text().split("\n\n")[0] if path.exists() else ""
    return {
        key.strip(): value.strip()
        for key, _, value in (line.partition(":") for line in first.splitlines())
    }
