"""State of AdamW in host memory between updates: the moments, and the masters of bfloat16 weights.

In an update it comes to the device in buckets of parameters, and goes back. The copies run on a
stream of their own, so that they and the arithmetic of another bucket overlap:

    copies       fetch 0 | fetch 1 | store 0, fetch 2 | store 1, fetch 3 | ...
    arithmetic           | step 0  | step 1           | step 2           | ...

The memory on the device is that of three buckets. On a CPU each copy is done at once. No bit
changes: AdamW works element by element (Ren et al. 2021, arXiv 2101.06840, section 4.2, offload the
same state, and compute there too).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tandem.trainer.optimizer import BUCKET, MOMENTS, Optimizer, Settings


class OffloadedOptimizer(Optimizer):
    """AdamW whose state is in host memory between updates, pinned if the device is a GPU. What it
    steps may be a parameter itself, which then stays on the device. bucket: most parameters of a
    bucket, but for a larger tensor."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        settings: Settings,
        *,
        bucket: int = BUCKET,
        **whole: Any,
    ):
        super().__init__(parameters, settings, **whole)
        self.parameter_of = {self.masters[name]: p for name, p in parameters.items()}
        self.bucket, self.device = bucket, next(iter(parameters.values())).device
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        for master, parameter in self.parameter_of.items():
            if master is not parameter:
                master.data = self._to_host(master.detach())

    def _home(self, key: str, tensor: Tensor) -> Tensor:
        return super()._home(key, tensor) if key.startswith("step.") else self._to_host(tensor)

    def _to_host(self, tensor: Tensor) -> Tensor:
        pinned = self.stream is not None
        return torch.empty_like(tensor, device="cpu", pin_memory=pinned).copy_(tensor)

    @torch.no_grad()
    def _step(self, rate: float) -> None:
        """Make the step of AdamW with the parameters' gradients, and write the masters into their
        parameters."""
        groups = self.adam.param_groups
        buckets = [
            {**group, "params": part}
            for group in groups
            for part in split(group["params"], self.bucket)
        ]
        coming = self._fetch(buckets[0]["params"])
        for number, bucket in enumerate(buckets):
            here = coming
            if number + 1 < len(buckets):
                coming = self._fetch(buckets[number + 1]["params"])
            self.adam.param_groups = [bucket]
            self._step_bucket(bucket["params"], here)
        self.adam.param_groups = groups
        if self.stream is not None:
            self.stream.synchronize()

    def _fetch(self, masters: list[nn.Parameter]) -> "_Fetched":
        """Begin to copy the state of these masters to the device."""
        hosts = [tensor for master in masters for tensor in self._state_of(master).values()]
        fetched = _Fetched([torch.empty_like(host, device=self.device) for host in hosts])
        with self._beside(fetched.tensors):
            for tensor, host in zip(fetched.tensors, hosts, strict=True):
                tensor.copy_(host, non_blocking=True)
        if self.stream is not None:
            fetched.event = self.stream.record_event()
        return fetched

    def _step_bucket(self, masters: list[nn.Parameter], fetched: "_Fetched") -> None:
        """Step these masters on the device, and begin to copy their state back."""
        if fetched.event is not None:
            torch.cuda.current_stream(self.device).wait_event(fetched.event)
        tensors, hosts = iter(fetched.tensors), []
        for master in masters:
            hosts.append(self._state_of(master))
            self._place(master, {name: next(tensors) for name in hosts[-1]})
            master.grad = self.parameter_of[master].grad
        self.adam.step()
        for master, host in zip(masters, hosts, strict=True):
            parameter = self.parameter_of[master]
            if master is not parameter:
                parameter.copy_(master)
                master.grad = None  # it is the parameter's, on the device
            on_device = self._state_of(master)
            with self._beside(list(on_device.values())):
                for name, tensor in on_device.items():
                    if name in host:
                        host[name].copy_(tensor, non_blocking=True)
                    else:
                        host[name] = self._to_host(tensor)
            self._place(master, host)

    def _state_of(self, master: nn.Parameter) -> dict[str, Tensor]:
        """Return the tensors of a master that leave the device: its moments, once there are any,
        and its weights if they are not the parameter's."""
        state = self.adam.state.get(master, {})
        own = {} if master is self.parameter_of[master] else {"weights": master.detach()}
        return own | {name: state[name] for name in MOMENTS if name in state}

    def _place(self, master: nn.Parameter, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if name == "weights":
                master.data = tensor
            else:
                self.adam.state[master][name] = tensor

    @contextmanager
    def _beside(self, tensors: list[Tensor]) -> Iterator[None]:
        """Run copies of the device's tensors on the stream of copies, after all work so far."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            yield
        for tensor in tensors:  # their memory is not given to others before the copy is done
            tensor.record_stream(self.stream)


class _Fetched:
    """Tensors that are on their way to the device; `event` is None on a CPU."""

    def __init__(self, tensors: list[Tensor]):
        self.tensors = tensors
        self.event: torch.cuda.Event | None = None


def split(parameters: list[nn.Parameter], most: int) -> list[list[nn.Parameter]]:
    """Split parameters in their order into buckets of at most that many elements, or of one
    tensor."""
    buckets: list[list[nn.Parameter]] = []
    count = most
    for parameter in parameters:
        count += parameter.numel()
        if count > most:
            buckets.append([])
            count = parameter.numel()
        buckets[-1].append(parameter)
    return buckets
