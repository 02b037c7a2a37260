"""A function run by every process of a mesh, over gloo, one thread each.

Rank n of any mesh is the n-th of a few processes that live as long as the tests: what a start and
the first imports cost is paid once.
"""

import gc
import math
import multiprocessing
import sys
import tempfile
import traceback
from contextlib import contextmanager
from datetime import timedelta
from itertools import accumulate
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist

from tandem.config.parallel import Parallel
from tandem.runtime import numerics
from tandem.trainer.parallel.mesh import make_mesh

TIMEOUT = timedelta(seconds=240)  # of a busy machine
CONTEXT = multiprocessing.get_context("forkserver")
# what forks, of which there is one server in a process, import: meshes, and runs (support/runs.py),
# pandas by way of pyarrow among it; a module that is not there is passed over
PRELOAD = ["tandem.cli.train", "tandem.trainer.parallel.ranks", "pandas"]
PRELOAD += ["transformers.models.qwen3.modeling_qwen3", "transformers.models.auto.modeling_auto"]
_members = []  # (process, this end of its pipe)


def on_mesh(function, *arguments, **sizes):
    """Return what function(mesh, *arguments) returns in each process, in rank order.

    function: of a module; sizes: of section [parallel], e.g. data=2.
    """
    config = Parallel(**sizes)
    CONTEXT.set_forkserver_preload(PRELOAD)  # another file's import may have chosen others
    while len(_members) < config.processes:
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=_member, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        _members.append((process, ours))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    with tempfile.TemporaryDirectory() as folder:
        torch.save((function, arguments, config), Path(folder) / "call.pt")
        pipes = [pipe for _, pipe in _members[: config.processes]]
        for rank, pipe in enumerate(pipes):
            pipe.send((folder, rank, store.port))
        error, waiting = "", list(pipes)
        while waiting and not error:
            ready = wait(waiting, TIMEOUT.total_seconds())
            error = "".join(map(_error, ready)) if ready else f"{len(waiting)} do not answer"
            waiting = [pipe for pipe in waiting if pipe not in ready]
        if error:  # the others may wait for one that has failed
            _end_members()
            raise AssertionError(error)
        return [torch.load(Path(folder) / f"{n}.pt", weights_only=False) for n in range(len(pipes))]


def _error(pipe):
    try:
        return pipe.recv()
    except EOFError:
        return "a process has ended"


def _end_members():
    while _members:
        process, pipe = _members.pop()
        process.kill()
        process.join()
        pipe.close()


def _member(pipe):
    """Answer each call with its traceback, or with nothing; end with who calls."""
    while True:
        try:
            folder, rank, port = pipe.recv()
        except EOFError:
            return
        pipe.send(_run(Path(folder), rank, port))
        gc.collect()  # models of the last mesh


def _run(folder, rank, port):
    try:
        numerics.prepare(1)
        function, arguments, config = torch.load(folder / "call.pt", weights_only=False)
        store = dist.TCPStore("127.0.0.1", port, timeout=TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=config.processes)
        mesh = make_mesh(config, torch.device("cpu"), _unannounced)
        torch.save(function(mesh, *arguments), folder / f"{rank}.pt")
        if megatron := sys.modules.get("megatron.core.parallel_state"):
            megatron.destroy_model_parallel()
        dist.destroy_process_group()
        return ""
    except BaseException:
        return f"rank {rank}: {traceback.format_exc()}"


def collected(pieces, tensors):
    """Every whole tensor by name, put together on rank 0 of what all processes have."""
    found = {}
    for name, box, part in pieces.collect_parts(tensors):
        found.setdefault(name, torch.empty(box.whole, dtype=part.dtype))[box.slices] = part
    return found


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


@contextmanager
def _unannounced(what, ranks):
    yield
