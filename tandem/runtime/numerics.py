"""Reproducible arithmetic of a process: settings, made before the first product, on which its bits
depend.

Every process that computes calls `prepare` first: driver, rollout worker, benchmark, notebook. A
process that runs a user's code is started with `environment`. Importing this module, or `tandem`,
changes nothing.

MKL's strict mode  A batched product takes other kernels for few rows and for transposed keys, a
                   gradient for other thread counts. Seen on Intel Xeons (AVX-512, AMX), and much
                   more with MKL held at AVX2. Fixed by MKL's first product. On AMD it means slow
                   kernels and is not needed, so it stays off there.
a small exp        MKL's first parallel exp of a process can race with its own set-up, and some
                   elements get other bits. Seen on one Intel Xeon in 5 of 16 new processes, on
                   another in 0 of 42.
thread count       Once it is set, MKL no longer takes fewer by itself. On every processor.
oneDNN's kernels   Each row count of a product has its own, about 0.6 MB and 0.3 ms. Those used last
                   are kept, 128 instead of up to 1,024: a process whose batches shrink and grow
                   had 420 MB of them, and holes between its tensors. No bit depends on it.
denormal numbers   Each thread flushes them or not, as a caller may have set it: they are kept.
float32 products   A caller may have told torch to round them to bf16: they are not rounded.
cuBLAS             By default it may take another workspace, and so other kernels, in other streams,
                   add a sum in parts (split-K) and round these to bfloat16. Gradients are its
                   products. No GPU has shown either here: NVIDIA and PyTorch document them.
"""

import ctypes
import os
import platform
import sys
from functools import cache
from pathlib import Path

STRICT = "AUTO,STRICT"
# of oneDNN and of PyTorch's layer above it; oneDNN has two entries for a kernel
KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256", "LRU_CACHE_CAPACITY": "128"}
# buffers of a fixed size, KiB:number, too small for a sum in parts (split-K)
CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
CUBLAS |= {"TORCH_BLAS_PREFER_CUBLASLT": "1"}
_STRICT_BIT = 0x10000  # MKL_CBWR_STRICT of mkl_types.h


def prepare(threads: int = 0) -> int:
    """Make this process's arithmetic reproducible; return its number of compute threads.

    threads: 0 takes torch's own choice (the cores at hand, or OMP_NUM_THREADS). An MKL_CBWR set
    before stays; `why_not_reproducible` then names it.
    """
    if vendor() == "GenuineIntel":
        os.environ.setdefault("MKL_CBWR", STRICT)
    for name, entries in (*KERNELS.items(), *CUBLAS.items()):
        os.environ.setdefault(name, entries)
    import torch

    torch.set_num_threads(threads or torch.get_num_threads())
    torch.set_flush_denormal(False)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
    torch.zeros(64).exp()  # too small for a second thread
    return torch.get_num_threads()


def environment() -> dict[str, str]:
    """Return the environment variables of a process that computes beside others.

    One thread, and the mode of `prepare`.
    """
    variables = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    if vendor() == "GenuineIntel":
        variables["MKL_CBWR"] = os.environ.get("MKL_CBWR", STRICT)
    return variables


def why_not_reproducible() -> list[str]:
    """Return the reasons why this process is not reproducible; none after a timely `prepare`."""
    if vendor() != "GenuineIntel" or _mkl_mode() & _STRICT_BIT:
        return []
    asked = os.environ.get("MKL_CBWR", "unset")
    too_late = "it computed before the mode was set: restart the process"
    return [
        f"MKL is not in its strict mode ({too_late if asked == STRICT else f'MKL_CBWR={asked}'})"
    ]


def processor() -> str:
    """Name the processor and the switches that change how libraries see it.

    Example: "Intel(R) Xeon(R) Processor 6/167, AVX512, AMX, MKL_CBWR=AUTO,STRICT"
    """
    import torch

    info = _cpuinfo()
    name = info.get("model name", platform.processor() or platform.machine())
    keys = ("cpu family", "model", "CPU implementer", "CPU part")
    model = "/".join(info[key] for key in keys if key in info)
    found = [torch.backends.cpu.get_cpu_capability()]
    found += ["AMX"] if torch.cpu._is_amx_tile_supported() else []
    names = ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY", "MKL_CBWR")
    switches = [f"{key}={os.environ[key]}" for key in names if key in os.environ]
    return ", ".join([f"{name} {model}".strip(), *found, *switches])


def vendor() -> str:
    """Return the maker of the processor, e.g. "GenuineIntel" or "AuthenticAMD"; "" if unknown."""
    intel_mac = sys.platform == "darwin" and os.uname().machine == "x86_64"
    return _cpuinfo().get("vendor_id", "GenuineIntel" if intel_mac else "")


def cores() -> int:
    """Count the cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _mkl_mode() -> int:
    """Ask MKL for its mode; if torch does not export the call, return the requested mode."""
    import torch

    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if not torch.backends.mkl.is_available():
        return _STRICT_BIT  # no MKL, nothing to set
    if library.exists() and (get := getattr(ctypes.CDLL(str(library)), "mkl_serv_cbwr_get", None)):
        return int(get(-1))
    return _STRICT_BIT * os.environ.get("MKL_CBWR", "").endswith("STRICT")


@cache
def _cpuinfo() -> dict[str, str]:
    """Read the first processor of /proc/cpuinfo."""
    path = Path("/proc/cpuinfo")
    first = path.read_text().split("\n\n")[0] if path.exists() else ""
    rows = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in rows}
