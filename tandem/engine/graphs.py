"""Steps captured as CUDA graphs, and copies that no host waits for: all that a decode step needs of
a GPU. Elsewhere a step is called as it is, and a copy is done at once."""

from collections.abc import Callable, Hashable

import numpy as np
import torch
from torch import Tensor

Step = Callable[[], None]
MOST_STEPS = 512  # kinds that are kept; one more, and all are forgotten

# Returns what replays a step.
Capture = Callable[[Step], Step]
# Makes a function that captures steps; the graphs of one function share their memory.
NewCapture = Callable[[], Capture]


class StepGraphs:
    """Captured steps by their keys. `new_capture` None: none is captured.

    A step must be a function of tensors that stay where they are. Its first run is an ordinary one,
    which compiles its kernels; it is captured at the second and replayed from then on. So is the
    first run after `renew`.
    """

    def __init__(self, new_capture: NewCapture | None):
        self._new_capture = new_capture
        self.clear()

    def clear(self) -> None:
        """Forget every step: a graph reads the weights, also packed ones, where they once were."""
        self._steps: dict[Hashable, Step | None] = {}
        self._renews = False
        # a pool that has lost all its graphs takes no other
        self._capture = self._new_capture() if self._new_capture is not None else None

    def renew(self) -> None:
        """Let the next step run as it is: the weights have changed where they are, and it makes
        their packs anew."""
        self._renews = True

    def run(self, key: Hashable, step: Step) -> None:
        """Run the step of that key."""
        if self._capture is None or self._renews:
            self._renews = False
            return step()
        if key not in self._steps:
            if len(self._steps) == MOST_STEPS:
                self.clear()
            self._steps[key] = None
            return step()
        replay = self._steps[key] or self._capture(step)
        self._steps[key] = replay
        return replay()


def cuda_capture(device: torch.device) -> Capture:
    """Make a function that captures steps of a GPU as CUDA graphs in one memory pool.

    They never run at once, and what they leave lies outside of the pool, so the order of replays is
    free. Other threads may go on using the device.
    """
    # torch's own for captures is of the GPU that was the current one at the first
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def capture(step: Step) -> Step:
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(device),
            torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"),
        ):
            step()
        return graph.replay

    return capture


class HostCopy:
    """Copy of tensors as they are after all work launched so far; it arrives beside later work."""

    def __init__(self, *tensors: Tensor):
        # pinned memory, if from a GPU
        self._copies = [t.to("cpu", non_blocking=True, copy=True) for t in tensors]
        stream = torch.cuda.current_stream(tensors[0].device) if tensors[0].is_cuda else None
        self._done = None if stream is None else stream.record_event()

    def wait(self) -> list[Tensor]:
        """Return the copies once they have arrived."""
        if self._done is not None:
            self._done.synchronize()
        return self._copies


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to the device without waiting for its work."""
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
