"""A function run by every process of a mesh, over gloo, one thread each."""

import math
import multiprocessing
import tempfile
import traceback
from contextlib import contextmanager
from datetime import timedelta
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist

from tandem.config.parallel import Parallel
from tandem.runtime import numerics
from tandem.train.parallel.mesh import make_mesh

TIMEOUT = timedelta(seconds=240)  # of a busy machine
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.support.meshes", "tests.support.tiny"])


def on_mesh(function, *arguments, **sizes):
    """Return what function(mesh, *arguments) returns in each process, in rank order.

    function: of a module; sizes: of section [parallel], e.g. data=2.
    """
    config = Parallel(**sizes)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            CONTEXT.Process(
                target=_run, args=(function, arguments, config, rank, store.port, Path(folder))
            )
            for rank in range(config.processes)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(TIMEOUT.total_seconds())
            process.kill()
            process.join()
        errors = [path.read_text() for path in sorted(Path(folder).glob("*.error"))]
        assert not errors, "\n".join(errors)
        return [
            torch.load(Path(folder) / f"{rank}.pt", weights_only=False)
            for rank in range(len(processes))
        ]


def sent_bytes(function, size):
    """Return the bytes of float32 weights and gradients that this process, one of a group of so
    many, sends while function() runs: those of PyTorch's own collectives, by its profiler."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, record_shapes=True) as profile:
        function()
    factors = {"c10d::_allgather_base_": (1, size - 1), "c10d::alltoall_base_": (0, 1 - 1 / size)}
    return sum(
        4 * math.prod(event.input_shapes[factors[event.name][0]]) * factors[event.name][1]
        for event in profile.events()
        if event.name in factors
    )


def peak_bytes(function):
    """Return the most bytes of tensors that function() has allocated on the CPU at once, by
    PyTorch's profiler, which does not see it free those that were there before."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
        function()
    events = profile.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(accumulate(size for _, size in changes))


def _run(function, arguments, config, rank, port, folder):
    try:
        numerics.prepare(1)
        store = dist.TCPStore("127.0.0.1", port, timeout=TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=config.processes)
        mesh = make_mesh(config, torch.device("cpu"), _unannounced)
        torch.save(function(mesh, *arguments), folder / f"{rank}.pt")
        dist.destroy_process_group()
    except BaseException:
        (folder / f"{rank}.error").write_text(f"rank {rank}: {traceback.format_exc()}")


@contextmanager
def _unannounced(what, ranks):
    yield
