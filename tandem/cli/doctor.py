"""`tandem doctor`: check whether this machine can make an exact run. Exit code 0 when every check
passes, else 1."""

import platform
import shutil
from collections.abc import Callable

from tandem.cli.progress import console
from tandem.runtime import numerics
from tandem.runtime.errors import UserError

Check = tuple[str, Callable[[], tuple[bool, str]]]


def doctor() -> int:
    numerics.prepare()
    checks: list[Check] = [
        ("python", lambda: (True, platform.python_version())),
        ("torch", _torch),
        ("transformers", _transformers),
        ("exactness", _exactness),
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

    device = "CPU"
    if torch.cuda.is_available():
        device = "CUDA is available, but the exact engine runs on the CPU for now"
    threads = f"{torch.get_num_threads()} threads on {numerics.cores()} cores"
    return True, f"{torch.__version__}, {threads}, {numerics.processor()}, {device}"


def _transformers() -> tuple[bool, str]:
    from transformers import __version__

    return True, __version__


def _exactness() -> tuple[bool, str]:
    """Run model/probe.py on a random model with the shapes of a 0.5B Qwen layer."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from tandem.model.load import make_exact
    from tandem.model.probe import probe

    config = Qwen2Config(
        vocab_size=32768,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=1,
        num_attention_heads=14,
        num_key_value_heads=2,
    )
    with torch.random.fork_rng(devices=[]):
        exactness = probe(make_exact(AutoModelForCausalLM.from_config(config).float()))
    if exactness.parity:
        operators = "; ".join(exactness.parity)
        return False, f"not exact on this machine: {operators}; set rl.correction in recipes"
    threads = ", with any number of threads"
    if exactness.thread_dependent:
        threads = f"; bits depend on the thread count: {'; '.join(exactness.thread_dependent)}"
    return True, f"engine = trainer, bit for bit{threads}"


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
