"""Stand-ins that let Megatron-Core run without a GPU: three functions of torch.cuda that it calls
on any device, one of its own that copies from the GPU, and two that keep a GPU's random state for
recomputed layers. Call `prepare` in a process of the tests."""

import sys

import torch


class NoStream:
    """A stream of a device that has none: everything is done in order."""

    def wait_stream(self, other):
        pass

    def record_event(self):
        return self

    def synchronize(self):
        pass


def prepare():
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.Stream = torch.cuda.current_stream = NoStream
    # Megatron imports wandb where it is installed, and a forked process leaves wandb's folders
    sys.modules.setdefault("wandb", None)
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    random._get_cuda_rng_state = lambda *_, **__: None
    random._set_cuda_rng_state = lambda *_, **__: None
    token_dispatcher.maybe_move_tensor_to_cpu = as_from_gpu


def as_from_gpu(tensor, as_numpy=False, record_stream=False):
    """The copy that a tensor on the GPU becomes; Megatron leaves those of the CPU as they are."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
