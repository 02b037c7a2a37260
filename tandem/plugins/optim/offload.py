"""State of AdamW in host memory between updates: the moments, and the masters of bfloat16 weights.

In an update it comes to the device bucket by bucket, and goes back behind the step of each, so the
device has one bucket at a time. A step reads what a copy has brought once: the copies are the time
of an update, and nothing is gained by arithmetic beside them. No bit changes: AdamW works element
by element (Ren et al. 2021, arXiv 2101.06840, section 4.2, offload the same state, and compute
there too).
"""

from typing import Any

import torch
from torch import Tensor, nn

from tandem.trainer.optimizer import BUCKET, MOMENTS, Optimizer, Settings
from tandem.trainer.parallel.pieces import buckets


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
        for master, parameter in self.parameter_of.items():
            if master is not parameter:
                master.data = self._to_host(master.detach())

    def _home(self, key: str, tensor: Tensor) -> Tensor:
        return super()._home(key, tensor) if key.startswith("step.") else self._to_host(tensor)

    def _to_host(self, tensor: Tensor) -> Tensor:
        pinned = self.device.type == "cuda"
        return torch.empty_like(tensor, device="cpu", pin_memory=pinned).copy_(tensor)

    @torch.no_grad()
    def _step(self, rate: float) -> None:
        """Make the step of AdamW with the parameters' gradients, and write the masters into their
        parameters."""
        groups = self.adam.param_groups
        for group in groups:
            sizes = {master: master.numel() for master in group["params"]}
            for masters in buckets(sizes, self.bucket):
                self.adam.param_groups = [{**group, "params": masters}]
                self._step_bucket(masters)
        self.adam.param_groups = groups
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # the state has left the device

    def _step_bucket(self, masters: list[nn.Parameter]) -> None:
        """Bring the state of these masters to the device, step them, and send it back."""
        hosts = [self._state_of(master) for master in masters]
        for master, host in zip(masters, hosts, strict=True):
            for name, tensor in host.items():
                self._place(master, name, tensor.to(self.device, non_blocking=True, copy=True))
            master.grad = self.parameter_of[master].grad
        self.adam.step()
        for master, host in zip(masters, hosts, strict=True):
            parameter = self.parameter_of[master]
            if master is not parameter:
                parameter.copy_(master)
                master.grad = None  # it is the parameter's, on the device
            for name, tensor in self._state_of(master).items():
                home = host.get(name)
                home = (
                    self._to_host(tensor) if home is None else home.copy_(tensor, non_blocking=True)
                )
                self._place(master, name, home)

    def _state_of(self, master: nn.Parameter) -> dict[str, Tensor]:
        """Return the tensors of a master that leave the device: its moments, once there are any,
        and its weights if they are not the parameter's."""
        state = self.adam.state.get(master, {})
        own = {} if master is self.parameter_of[master] else {"weights": master.detach()}
        return own | {name: state[name] for name in MOMENTS if name in state}

    def _place(self, master: nn.Parameter, name: str, tensor: Tensor) -> None:
        if name == "weights":
            master.data = tensor
        else:
            self.adam.state[master][name] = tensor
