"""Program that compiles every Triton kernel for GPUs that need not be there, by the operators
themselves.

Run `python -m tests.support.compile_kernels 80 90 100` without TRITON_INTERPRET. The operators run
on tensors of the CPU, and Triton compiles what they launch for the target of `Driver`, down to the
machine code of ptxas, which is then not run. Prints a JSON line a kernel. A kernel that needs more
shared memory than the GPU has raises OutOfResources, as it would there.
"""

import json
import sys

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver

from tandem.model.triton import cumulative, ops, rowwise, vocabulary
from tandem.model.triton.packed_attention import PackedSegments, packed_attention
from tandem.model.triton.shared_splits import shared_attention

SHARED_BYTES = {80: 166_912, 90: 232_448, 100: 232_448}  # of a block, by compute capability
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
        found = {"kernel": name, "bytes": len(binary), "shared": shared}
        self.compiled.append(found)
        return None, None, 0, 0, 1024  # module, function, registers, spills, most threads

    def launcher_cls(self, source, metadata):
        return lambda *arguments: None


def run_everything(dtype, width):
    """Call each operator forward and backward."""

    def new(*shape, dtype=dtype):
        return torch.zeros(shape, dtype=dtype, requires_grad=dtype.is_floating_point)

    x, weight = new(ROWS, 256).detach(), new(256, 256).detach()
    for kernel in ("plain", "persistent", "tma"):
        ops.matmul(x, weight, new(256).detach(), kernel)
    attend_everywhere(new, width)
    head, weight = new(ROWS, 6, width), new(width)
    for results in (
        (rowwise.rms_norm(head[:, :4], weight, 1e-6),),
        rowwise.add_rms_norm(new(ROWS, 2048), new(ROWS, 2048), new(2048), 1e-6),
        (rowwise.rotate(head, new(ROWS, 1, width), new(ROWS, 1, width)),),
        (rowwise.swiglu(new(ROWS, 512)),),
    ):
        torch.autograd.backward(results, [torch.zeros_like(t) for t in results])
    logits, targets = new(ROWS, 32_000, dtype=torch.float32).detach(), torch.zeros(ROWS).long()
    vocabulary.log_softmax(logits, 0.7)
    above, entropies = vocabulary.target_logprobs(logits, targets, 0.7, entropy=True)
    vocabulary.logprob_slope(logits, targets, 0.7, above, entropies)
    cumulative.inverse_cdf(logits, above)
    cumulative.top_p_edge(logits, 0.9)


def attend_everywhere(new, width):
    """Attend over pages, alone and shared, and over packed rows with gradients in turn."""
    q, k, v = new(ROWS, 8, width), new(ROWS, 2, width), new(ROWS, 2, width)
    keys, values = (new(4, 2, 128, width).detach() for _ in range(2))
    first, count, start = torch.zeros(3, 1, dtype=torch.int32)
    rows = ops.PagedRows(
        tables=first[:, None], first=first, count=count, start=start, max_length=1024
    )
    ops.attention(q.detach(), keys, values, rows, 0.1)
    tiles = torch.zeros(4, 2, 1, dtype=torch.int32)
    shared_attention(q.detach(), keys, values, rows, tiles, 0.1)
    ops.write_cache(k.detach(), v.detach(), keys, values, torch.zeros(ROWS, dtype=torch.int64))
    plan = PackedSegments(np.array(SEGMENTS), torch.device("cpu"))
    packed_attention(q, k, v, plan, 0.1, None).backward(torch.zeros_like(q))


def main():
    for capability in map(int, sys.argv[1:]):
        for dtype in (torch.float32, torch.bfloat16):
            gpu = Driver(capability)
            driver.set_active(gpu)
            # float32 products are unrolled: those of a larger head take long to compile
            run_everything(dtype, 128 if dtype == torch.bfloat16 else 16)
            for found in gpu.compiled:
                kind = {"capability": capability, "dtype": str(dtype).removeprefix("torch.")}
                print(json.dumps(kind | found))


if __name__ == "__main__":
    main()
