"""Hashes of weights: equal exactly when every bit is. Engine, trainer and checkpoints compare by
them."""

import hashlib

import torch
from torch import Tensor


def weight_hash(tensors: dict[str, Tensor]) -> str:
    """Hex digest of names, dtypes, shapes and bytes, in name order: equal exactly when every bit of
    the weights is."""
    lines = [f"{name} {tensor_hash(tensors[name])}\n" for name in sorted(tensors)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def tensor_hash(tensor: Tensor) -> str:
    """Hex digest of one tensor's dtype, shape and bytes, the strides and the device left out."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} ".encode())
    digest.update(data.numpy().data)
    return digest.hexdigest()
