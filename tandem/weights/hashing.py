"""Hashes of weights: equal if and only if every bit is. Engine, trainer and checkpoints compare
them."""

import hashlib

import torch
from torch import Tensor


def weight_hash(tensors: dict[str, Tensor]) -> str:
    """Hash names, dtypes, shapes and bytes, in name order, to hex: equal if and only if every bit
    is."""
    lines = [f"{name} {tensor_hash(tensors[name])}\n" for name in sorted(tensors)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def tensor_hash(tensor: Tensor) -> str:
    """Hash a tensor's dtype, shape and bytes to hex, without strides and device."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} ".encode())
    digest.update(data.numpy().data)
    return digest.hexdigest()
