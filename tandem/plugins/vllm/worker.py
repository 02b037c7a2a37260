"""A rollout worker with vLLM as its engine, in vLLM's own interpreter: its packages are not
Tandem's.

    driver's interpreter                     vLLM's interpreter
    --------------------                     ------------------
    command() finds it   -- spawn, socket -> only the package `tandem` of the driver's is added
    Workers              -- the messages  -> worker.run with vllm_engine.load
                            of any worker

What this process imports of tandem needs numpy and torch, and no version of transformers beyond
vLLM's. Found in this order: TANDEM_VLLM_PYTHON; .venv-vllm beside the current directory or the
package (`make cluster` builds it); the driver's own interpreter, if vllm is in it.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Any

from tandem.plugins.vllm import WHERE
from tandem.rollout_workers.worker import run
from tandem.runtime.errors import UserError
from tandem.workers.fork_server import prepare

if TYPE_CHECKING:
    from tandem.rollout_workers.worker import ServedEngine

VARIABLE, FOLDER = "TANDEM_VLLM_PYTHON", ".venv-vllm"
_PACKAGE = Path(__file__).parent.parent.parent
# PYTHONPATH would add all that is installed beside the package, another torch among it
_START = """
import importlib.util, runpy, sys
spec = importlib.util.spec_from_file_location("tandem", sys.argv[1] + "/__init__.py")
sys.modules["tandem"] = package = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
runpy.run_module("tandem.plugins.vllm.worker", run_name="__main__")
"""
# not beside the current directory, which may have a folder of that name
_LOOK = "import sys, importlib.util as u; del sys.path[0]; sys.exit(u.find_spec('vllm') is None)"
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process, which the pool can kill and hear
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # cores belong to no worker
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # the worker's log, quoted after a crash
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",  # the trainer has the model already
}


def command() -> tuple[str, ...]:
    """Return the command of a vLLM worker. Raises UserError if no interpreter has vLLM."""
    return find_python(), "-c", _START, str(_PACKAGE)


def find_python() -> str:
    """Return the path of vLLM's interpreter. Raises UserError if there is none."""
    folders = [folder / FOLDER / "bin" / "python" for folder in (Path.cwd(), _PACKAGE.parent)]
    named = os.environ.get(VARIABLE)
    places = [named] if named else [*map(str, folders), sys.executable]
    for python in places:
        with suppress(OSError):  # it is no program
            look = (python, "-c", _LOOK)
            if which(python) and not subprocess.run(look, capture_output=True).returncode:
                return python
    raise _no_vllm(f"no vllm in {', '.join(places)}")


def _no_vllm(found: str) -> UserError:
    return UserError(
        "there is no vLLM to roll out with",
        where=WHERE,
        found=found,
        next=f"make cluster (on a CPU), or set {VARIABLE} to the Python of an environment with "
        "vllm 0.32",
    )


def set_environment(devices: str, options: Mapping[str, Any]) -> None:
    """Set what vLLM reads when it is imported. devices: of its ranks, with commas between; options:
    rollout.vllm."""
    os.environ.update(ENVIRONMENT)
    if options.get("enforce_eager") is not False:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # the sampler's helpers would compile for minutes
    if devices.startswith("cuda"):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices(devices, visible)
        # not every GPU and kernel has it, so a choice of the user stays
        os.environ.setdefault("VLLM_BATCH_INVARIANT", "1")


def visible_devices(devices: str, visible: str) -> str:
    """Return the devices as CUDA_VISIBLE_DEVICES has them. visible: its value so far."""
    places = [int(device.partition(":")[2] or 0) for device in devices.split(",")]
    return ",".join(visible.split(",")[place] if visible else str(place) for place in places)


def memory_share(start: dict[str, Any], tokens: int, total: int) -> float:
    """Return vLLM's gpu_memory_utilization, which must be free when it starts: what a rank needs of
    a GPU of `total` bytes. tokens: of a pass."""
    from tandem.weights.shared import DTYPES, Layout

    layout = Layout.from_json(start["layout"])
    *_, width, vocabulary = sorted({n for _, _, shape in layout.parts for n in (0, *shape)})
    weights = layout.tensor_bytes // start["tensor_parallel"]
    # at once: about eight tensors of the widest layer, and four copies of the logits in float32
    hidden = 8 * tokens * width * DTYPES[f"torch.{start['dtype']}"].itemsize
    logits = 4 * start["max_batch"] * vocabulary * 4
    return min(1.0, (weights + start["cache_bytes"] + hidden + logits) / total)


def load(start: dict[str, Any]) -> "ServedEngine":
    """Load the engine. Raises UserError if vLLM cannot be imported or refuses the model."""
    set_environment(start["device"], start["options"])
    try:
        from tandem.plugins.vllm.engine import load_vllm
    except ImportError as error:
        raise _no_vllm(f"{sys.executable}: {error}") from None
    return load_vllm(start, memory_share)


if __name__ == "__main__":
    run(prepare(int(sys.argv[-1])), load)
