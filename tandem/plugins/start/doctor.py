"""`tandem doctor`: check whether this machine can make an exact run. Exit code 0 when every check
passes, else 1."""

import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import NamedTuple

from tandem.cli.progress import console
from tandem.registry import find
from tandem.runtime import numerics
from tandem.runtime.disk import human_bytes
from tandem.runtime.errors import UserError

# The versions that the tests have run with: all of them with those of constraints.txt, their core
# with the others (`make newest`, docs/reference/versions.md).
TESTED = {"python": ("3.11", "3.12", "3.13"), "torch": ("2.13", "2.15"), "transformers": ("5.23",)}


class Finding(NamedTuple):
    """The result of a check."""

    ok: bool
    detail: str


Check = tuple[str, Callable[[], Finding]]


def doctor() -> None:
    """Check this machine. Versions, exactness of the operators, reward workers, disk."""
    numerics.prepare()
    free = shutil.disk_usage(".").free
    checks: list[Check] = [
        ("python", lambda: versioned("python", platform.python_version())),
        ("torch", _torch),
        ("transformers", lambda: versioned("transformers", version("transformers"))),
        ("gpu", _gpu),
        ("exactness", lambda: _exactness("cpu", "float32")),
        ("bfloat16", lambda: _exactness("cpu", "bfloat16")),
        *_gpu_checks(),
        ("reward workers", _rewards),
        ("sandbox", _sandbox),
        ("disk", lambda: Finding(free > 1 << 30, f"{free / 2**30:.1f} GiB free here")),
    ]
    passed = True
    for name, check in checks:
        one = check()
        passed &= one.ok
        state = "ok  " if one.ok else "FAIL"
        console.print(f"{state}  {name:<15} {one.detail}", markup=False)
    sys.exit(0 if passed else 1)


def versioned(name: str, found: str, others: str = "") -> Finding:
    """Return the finding of a version, which says if it is none of those tested; that fails
    nothing. others: what else there is to say."""
    tested = any(_numbers(found) == _numbers(version) for version in TESTED[name])
    note = "" if tested else f" (not tested: the tests have run with {', '.join(TESTED[name])})"
    return Finding(True, f"{found}{note}{others}")


def _numbers(version: str) -> tuple[int, ...]:
    """Read the first two numbers of a version: "2.13.0+cpu" -> (2, 13)."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def _torch() -> Finding:
    import torch

    threads, cores, processor = torch.get_num_threads(), numerics.cores(), numerics.processor()
    others = f", threads: {threads}, cores: {cores}, {processor}"
    return versioned("torch", str(torch.__version__), others)


def _gpu() -> Finding:
    """Describe the GPUs. A GPU without what it needs fails; none at all does not."""
    import torch

    if torch.version.cuda is None:
        return Finding(True, "none: this PyTorch is built for the CPU; runs take the CPU")
    if not torch.cuda.is_available():
        return Finding(
            True,
            f"none that PyTorch sees, which is built for CUDA {torch.version.cuda}; runs take the "
            "CPU. If there is one: does nvidia-smi show it, and is its driver new enough?",
        )
    from tandem.model.placement import place_models

    found = []
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        processor = place_models(f"cuda:{number}", "auto").processor()
        found.append(f"cuda:{number} {processor}, {human_bytes(free)} of {human_bytes(total)} free")
    if find_spec("triton") is None:
        missing = f"{'; '.join(found)}; Triton is missing (the kernels): pip install triton"
        return Finding(False, missing)
    driver = "unknown (no nvidia-smi)"
    if shutil.which("nvidia-smi") is not None:
        command = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        asked = subprocess.run(command, capture_output=True, text=True, timeout=20)
        driver = (asked.stdout.splitlines() or ["unknown"])[0]
    return Finding(True, f"{'; '.join(found)}; driver {driver}, Triton {version('triton')}")


def _gpu_checks() -> list[Check]:
    import torch

    if not torch.cuda.is_available() or find_spec("triton") is None:
        return []  # the check of the GPUs says which
    types = ("float32", "bfloat16")
    return [(f"gpu {dtype}", partial(_exactness, "cuda", dtype)) for dtype in types]


def _exactness(device: str, dtype: str) -> Finding:
    """Run model/probe.py on a random model with the shapes of a 0.5B Qwen layer."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from tandem.model.load import make_exact
    from tandem.model.onednn import bfloat16_unit
    from tandem.model.placement import place_models
    from tandem.model.probe import fastest_exact, probe, try_matmuls

    place = place_models(device, dtype)

    config = Qwen2Config(
        vocab_size=32768,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=1,
        num_attention_heads=14,
        num_key_value_heads=2,
    )
    with torch.random.fork_rng(devices=[]):
        module = AutoModelForCausalLM.from_config(config, dtype=place.dtype)
        model = make_exact(module.to(place.device))
        kernels = f"; {model.kernels.chosen} kernels"
        if device == "cuda":
            trials = try_matmuls(model)
            model.kernels.use_matmul(fastest_exact(trials))
            kernels = f"; matmul kernel: {model.kernels.chosen} of {', '.join(map(str, trials))}"
        exactness = probe(model)
    if exactness.parity:
        operators = "; ".join(exactness.parity)
        failed = f"not exact on this machine: {operators}; set rl.correction in recipes"
        return Finding(False, failed)
    threads = ", with any number of threads"
    if exactness.thread_dependent:
        threads = f"; bits depend on the thread count: {'; '.join(exactness.thread_dependent)}"
    slow = ""
    if (device, dtype) == ("cpu", "bfloat16") and not bfloat16_unit():
        slow = "; no faster in training: neither AMX nor AVX512_BF16 is in use"
    return Finding(True, f"engine = trainer, bit for bit{threads}{slow}{kernels}")


def _rewards() -> Finding:
    from tandem.rewards.pool import RewardPool
    from tandem.types import Attempt, Problem

    problem = Problem(uid="doctor", messages=({"role": "user", "content": "1/2?"},), answer="1/2")
    try:
        with RewardPool("answer") as pool:
            score = pool.submit(problem, Attempt(text="Answer: 0.5")).result()
    except UserError as error:
        return Finding(False, str(error))
    return Finding(
        score.reward == 1.0, f"a worker scored `Answer: 0.5` against 1/2 as {score.reward}"
    )


def _sandbox() -> Finding:
    """Describe the sandbox. A missing one fails nothing: only code of a model needs it."""
    from tandem.config.episodes import Sandbox

    section = Sandbox()
    try:
        return Finding(True, find("sandboxes", section.kind, key="sandbox")(section).state())
    except UserError as error:
        return Finding(True, f"none: {error.found}; next: apt-get install bubblewrap")
