"""`tandem doctor`: check whether this machine can make an exact run. Exit code 0 when every check
passes, else 1."""

import platform
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec

from tandem.cli.progress import console
from tandem.runtime import numerics
from tandem.runtime.disk import human_bytes
from tandem.runtime.errors import UserError

Check = tuple[str, Callable[[], tuple[bool, str]]]


def doctor() -> int:
    numerics.prepare()
    checks: list[Check] = [
        ("python", lambda: (True, platform.python_version())),
        ("torch", _torch),
        ("transformers", _transformers),
        ("gpu", _gpu),
        ("exactness", lambda: _exactness("cpu", "float32")),
        ("bfloat16", lambda: _exactness("cpu", "bfloat16")),
        *_gpu_checks(),
        ("reward workers", _rewards),
        ("sandbox", _sandbox),
        ("disk", _disk),
    ]
    passed = True
    for name, check in checks:
        ok, detail = check()
        passed &= ok
        console.print(f"{'ok  ' if ok else 'FAIL'}  {name:<15} {detail}", markup=False)
    return 0 if passed else 1


def _torch() -> tuple[bool, str]:
    import torch

    threads = f"{torch.get_num_threads()} threads on {numerics.cores()} cores"
    return True, f"{torch.__version__}, {threads}, {numerics.processor()}"


def _gpu() -> tuple[bool, str]:
    """Describe the GPUs. A GPU without what it needs fails; none at all does not."""
    import torch

    if torch.version.cuda is None:
        return True, "none: this PyTorch is built for the CPU; runs take the CPU"
    if not torch.cuda.is_available():
        return True, (
            f"none that PyTorch sees, which is built for CUDA {torch.version.cuda}; runs take the "
            "CPU. If there is one: does nvidia-smi show it, and is its driver new enough?"
        )
    from tandem.model.placement import place_models

    found = []
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        processor = place_models(f"cuda:{number}", "auto").processor()
        found.append(f"cuda:{number} {processor}, {human_bytes(free)} of {human_bytes(total)} free")
    if find_spec("triton") is None:
        return False, f"{'; '.join(found)}; Triton is missing: pip install triton"
    return True, f"{'; '.join(found)}; driver {_driver()}, Triton {version('triton')}"


def _driver() -> str:
    command = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if shutil.which(command[0]) is None:
        return "unknown (no nvidia-smi)"
    asked = subprocess.run(command, capture_output=True, text=True, timeout=20)
    return (asked.stdout.splitlines() or ["unknown"])[0]


def _gpu_checks() -> list[Check]:
    import torch

    if not torch.cuda.is_available():
        return []
    types = ("float32", "bfloat16")
    return [(f"gpu {dtype}", partial(_exactness, "cuda", dtype)) for dtype in types]


def _transformers() -> tuple[bool, str]:
    from transformers import __version__

    return True, __version__


def _exactness(device: str, dtype: str) -> tuple[bool, str]:
    """Run model/probe.py on a random model with the shapes of a 0.5B Qwen layer."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from tandem.model.linear import has_bfloat16_tiles
    from tandem.model.load import make_exact
    from tandem.model.placement import place_models
    from tandem.model.probe import fastest_exact, probe, try_matmuls
    from tandem.model.triton.dispatch import matmul_kernel, use_matmul

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
        model, kernels = make_exact(module.to(place.device)), ""
        if device == "cuda":
            trials = try_matmuls(model)
            use_matmul(fastest_exact(trials))
            kernels = f"; matmul kernel: {matmul_kernel()} of {', '.join(map(str, trials))}"
        exactness = probe(model)
    if exactness.parity:
        operators = "; ".join(exactness.parity)
        return False, f"not exact on this machine: {operators}; set rl.correction in recipes"
    threads = ", with any number of threads"
    if exactness.thread_dependent:
        threads = f"; bits depend on the thread count: {'; '.join(exactness.thread_dependent)}"
    slow = ""
    if (device, dtype) == ("cpu", "bfloat16") and not has_bfloat16_tiles():
        slow = "; no faster than float32 on this processor, which has no AMX"
    return True, f"engine = trainer, bit for bit{threads}{slow}{kernels}"


def _rewards() -> tuple[bool, str]:
    from tandem.rewards.pool.pool import RewardPool
    from tandem.types import Attempt, Problem

    problem = Problem(uid="doctor", messages=({"role": "user", "content": "1/2?"},), answer="1/2")
    try:
        with RewardPool("answer") as pool:
            score = pool.submit(problem, Attempt(text="Answer: 0.5")).result()
    except UserError as error:
        return False, str(error)
    return score.reward == 1.0, f"a worker scored `Answer: 0.5` against 1/2 as {score.reward}"


def _sandbox() -> tuple[bool, str]:
    """Describe the sandbox. A missing one fails nothing: only code of a model needs it."""
    from tandem.config.schema import Sandbox
    from tandem.runtime.sandbox import sandbox_state

    return True, sandbox_state(Sandbox())


def _disk() -> tuple[bool, str]:
    free = shutil.disk_usage(".").free
    return free > 1 << 30, f"{free / 2**30:.1f} GiB free here"
