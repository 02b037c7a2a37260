"""The device of a process's models, and the type of their weights.

A GPU is taken where there is one, and bfloat16 with it. This file knows no models.
"""

import re
from dataclasses import dataclass
from typing import Literal

import torch

from tandem.runtime import numerics
from tandem.runtime.errors import UserError


@dataclass(frozen=True, slots=True)
class Placement:
    """A device and the type of the weights on it. Example: Placement(cuda:0, torch.bfloat16)"""

    device: torch.device
    dtype: torch.dtype

    @property
    def dtype_name(self) -> Literal["float32", "bfloat16"]:
        return "float32" if self.dtype == torch.float32 else "bfloat16"

    def processor(self) -> str:
        """Name the processor that computes, and what its bits depend on."""
        if self.device.type == "cpu":
            return numerics.processor()
        properties = torch.cuda.get_device_properties(self.device)
        capability = f"sm_{properties.major}{properties.minor}"
        return f"{properties.name}, {capability}, CUDA {torch.version.cuda}"


DEVICES = r"auto|cpu|cuda(:[0-9]+)?"
DTYPES = ("auto", "float32", "bfloat16")
CPU_FLOAT32 = Placement(torch.device("cpu"), torch.float32)


def place_models(device: str, dtype: str) -> Placement:
    """Resolve model.device ("auto", "cpu", "cuda", "cuda:1") and model.dtype ("auto", "float32",
    "bfloat16").

    Raises UserError for a device that is not there, or that cannot compute in bfloat16, and for
    other words.
    """
    if not re.fullmatch(DEVICES, device) or dtype not in DTYPES:
        raise UserError(
            "models cannot be placed so",
            where="device and dtype",
            found=f"{device}, {dtype}",
            expected=f"auto, cpu, cuda or cuda:N, and one of {', '.join(DTYPES)}",
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind, _, number = device.partition(":")
    if kind == "cuda" and int(number or 0) >= count:
        raise UserError(
            "there is no such GPU",
            where=f"model.device = {device}",
            found=f"{count or 'none'} that this PyTorch can use",
            expected=f"a number below {count}"
            if count
            else "a CUDA GPU, its driver and a CUDA build",
            next="set model.device=auto; `tandem doctor` says what is missing",
        )
    on_gpu = kind == "cuda" or (device == "auto" and count > 0)
    place = torch.device("cuda", int(number or 0)) if on_gpu else torch.device("cpu")
    if on_gpu and dtype != "float32" and not torch.cuda.is_bf16_supported(False):
        if dtype == "bfloat16":
            raise UserError(
                "the GPU has no bfloat16",
                where="model.dtype = bfloat16",
                found=torch.cuda.get_device_name(place),
                expected="compute capability 8.0 or more (A100, RTX 30 and later)",
                next="set model.dtype=float32",
            )
        dtype = "float32"
    auto = "bfloat16" if on_gpu else "float32"
    return Placement(place, getattr(torch, auto if dtype == "auto" else dtype))
