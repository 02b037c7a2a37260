"""Program that compiles every Triton kernel for GPUs that need not be there, by the operators
themselves.

Run `python -m tests.support.compile_kernels 80 90 100` without TRITON_INTERPRET. The operators run
on tensors of the CPU, and Triton compiles what they launch for the target of `Driver`, down to the
machine code of ptxas, which is then not run. Prints a JSON line a kernel. A kernel that needs more
shared memory than the GPU has raises OutOfResources, as it would there.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver

from tandem.model.attention import Scoring
from tandem.plugins.triton import rowwise, vocabulary
from tandem.plugins.triton.attention import (
    PagedRows,
    attend_kernel,
    attend_split_kernel,
    attention,
    tile_pairs,
    write_cache,
)
from tandem.plugins.triton.matmul import TILES, matmul
from tandem.plugins.triton.packed_attention import PackedSegments, packed_attention
from tandem.plugins.triton.shared_splits import shared_attention

SHARED_BYTES = {80: 166_912, 90: 232_448, 100: 232_448}  # of a block, by compute capability
# Head sizes of all kernels; float32 products are unrolled, and those of a larger head take long to
# compile. Then those of attention over pages alone: the shared memory of a kernel is the same for
# every GPU, so the one that has least gets the largest.
WIDTHS = {torch.float32: 16, torch.bfloat16: 128}
PAGED_WIDTHS = {
    (80, torch.float32): (256,),
    (90, torch.float32): (128,),
    (90, torch.bfloat16): (64, 256),
}
ROWS, SEGMENTS = 40, [(0, 20, 0, 0), (20, 20, 0, 20)]


class Driver(DriverBase):
    """Triton's driver of a GPU that is not there: it takes programs and runs none."""

    def __init__(self, capability):
        self.capability, self.compiled = capability, []
        self.utils = self

    @classmethod
    def is_active(cls):
        return True

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return self.capability

    def get_current_stream(self, device):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_benchmarker(self):
        raise NotImplementedError

    def map_python_to_cpp_type(self, ty):
        raise NotImplementedError

    def get_device_properties(self, device):
        return {"max_shared_mem": SHARED_BYTES[self.capability]}

    def load_binary(self, name, binary, shared, device):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(binary)
            usage = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
            text = subprocess.run(usage, capture_output=True, text=True, check=True).stdout
        stack = int(re.search(r"STACK:(\d+)", text)[1])  # bytes of registers that did not fit
        found = {"kernel": name, "bytes": len(binary), "shared": shared, "stack": stack}
        self.compiled.append(found)
        return None, None, 0, 0, 1024  # module, function, registers, spills, most threads

    def launcher_cls(self, source, metadata):
        return lambda *arguments: None


def layouts(kernel, rows, width):
    """Find how a GPU's threads hold [rows, width] whose rows a kernel sums: the order of those
    sums; and how many loads it waits for no longer than it must."""
    found, ahead = set(), set()
    for programs, *_ in kernel.device_caches.values():
        for text in (program.asm["ttgir"] for program in programs.values()):
            names = dict(re.findall(r"^(#\w+) = (.*)$", text, re.M))
            sums = re.findall(rf"}}\) : \(tensor<{rows}x{width}xf32, (#\w+)>\) -> tensor<", text)
            found |= {names[name] for name in sums}
            ahead.add(max(map(int, re.findall(r"async_wait .*num = (\d+)", text)), default=0))
    return sorted(found), sorted(ahead)


def new_of(default, *shape, dtype=None):
    dtype = dtype or default
    return torch.zeros(shape, dtype=dtype, requires_grad=dtype.is_floating_point)


def run_everything(dtype, width, kernel):
    """Call each operator forward and backward; kernel: of matmuls of all tiles, if any."""
    new = partial(new_of, dtype)
    x, weight = new(ROWS, 256).detach(), new(256, 256).detach()
    for tile in (None, *TILES[: len(TILES) * bool(kernel)]):
        matmul(x, weight, new(256).detach(), kernel if tile else "plain", tile=tile)
    if kernel:
        matmul(x, weight, None, kernel, tile=TILES[0], gated=True)
    q, k, v = attend(new, width)
    plan = PackedSegments(np.array(SEGMENTS), torch.device("cpu"))
    packed_attention(q, k, v, plan, Scoring(0.1)).backward(torch.zeros_like(q))
    head, weight = new(ROWS, 6, width), new(width)
    for results in (
        (rowwise.rms_norm(head[:, :4], weight, 1e-6),),
        rowwise.add_rms_norm(new(ROWS, 2048), new(ROWS, 2048), new(2048), 1e-6),
        (rowwise.rotate(head, new(ROWS, 1, width), new(ROWS, 1, width)),),
        (rowwise.swiglu(new(ROWS, 512)),),
    ):
        torch.autograd.backward(results, [torch.zeros_like(t) for t in results])
    logits, targets = new(ROWS, 32_000).detach(), torch.zeros(ROWS).long()
    vocabulary.log_softmax(logits, 0.7)
    above, entropies = vocabulary.target_logprobs(logits, targets, 0.7, entropy=True)
    vocabulary.logprob_slope(logits, targets, 0.7, above, entropies)
    vocabulary.draw(logits, 0.7, above)
    vocabulary.find(logits.float(), 1.0, above, reaching=True)


def attend(new, width):
    """Attend over pages, alone and shared; return queries, keys and values of packed rows."""
    q, k, v = new(ROWS, 8, width), new(ROWS, 2, width), new(ROWS, 2, width)
    keys, values = (new(4, 2, 128, width).detach() for _ in range(2))
    first, count, start = torch.zeros(3, 1, dtype=torch.int32)
    rows = PagedRows(tables=first[:, None], first=first, count=count, start=start, max_length=1024)
    attention(q.detach(), keys, values, rows, Scoring(0.1))
    tiles = torch.zeros(4, 2, 1, dtype=torch.int32)
    shared_attention(q.detach(), keys, values, rows, tiles, Scoring(0.1))
    slots = torch.zeros(ROWS, dtype=torch.int64)
    write_cache(k.detach(), v.detach(), keys, values, slots)
    norm, turn = SimpleNamespace(weight=new(width), variance_epsilon=1e-6), new(ROWS, 1, width)
    rowwise.turn_heads(new(ROWS, 12, width), [norm, norm], (turn, turn), keys, values, slots)
    if q.dtype == torch.bfloat16:  # products of float32 take long to compile
        attention(q.detach(), keys, values, replace(rows, alone=True), Scoring(0.1))
        attention(q.detach(), keys, values, rows, Scoring(0.1), scratch_bytes=0)
    return q, k, v


def main():
    for capability in map(int, sys.argv[1:]):
        for dtype in (torch.float32, torch.bfloat16):
            gpu, norms = Driver(capability), (rowwise.rms_norm_kernel, rowwise.heads_kernel)
            attends = attend_kernel, attend_split_kernel
            for measured in (*norms, *attends):
                measured.device_caches.clear()
            driver.set_active(gpu)
            # a float32 matmul has one tile, which takes long to compile
            kernel = "" if dtype == torch.float32 else "persistent" if capability == 80 else "tma"
            run_everything(dtype, width := WIDTHS[dtype], kernel)
            kind = {"capability": capability, "dtype": str(dtype).removeprefix("torch.")}
            kind["norms"] = [layouts(norm, rowwise.TILE // width, width)[0] for norm in norms]
            pairs = tile_pairs(torch.empty(0, width, dtype=dtype))
            kind["attention"] = [layouts(kernel, pairs, 64) for kernel in attends]
            for width in (WIDTHS[dtype], *PAGED_WIDTHS.get((capability, dtype), ())):
                if width != WIDTHS[dtype]:
                    attend(partial(new_of, dtype), width)
                while gpu.compiled:
                    print(json.dumps(kind | {"width": width} | gpu.compiled.pop()))


if __name__ == "__main__":
    main()
