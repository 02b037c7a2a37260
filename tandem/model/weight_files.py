"""The weight files of a model directory, looked at before transformers opens them: safetensors
only, inside the directory, and as much as config.json describes. transformers fills what is missing
with random numbers, as much memory as that takes.

It reads headers, never a tensor. A hub name's files are looked at when they are here; transformers
fetches safetensors only.
"""

import json
import math
from pathlib import Path
from typing import Any

from tandem.model.config_file import first_line, read_json, refuse_adapter
from tandem.runtime.errors import UserError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack")
MAX_HEADER = 100 << 20  # bytes, as safetensors itself has it
# parameters: 1 GiB in float32, which transformers may make up before they are reported missing
MOST_MISSING = 1 << 28


def check_weights(path: str, parameters: int = 0) -> None:
    """Raises UserError for a model whose weights are not safetensors inside its directory, or far
    fewer than `parameters`."""
    refuse_adapter(path, path)
    folder = Path(path)
    if not folder.is_dir():
        return
    try:
        found = sum(_numbers(file) for file in _weight_files(folder))
    except (OSError, ValueError, RecursionError) as error:
        raise _cannot_load(path, first_line(error)) from None
    if found + MOST_MISSING < parameters:
        raise _cannot_load(
            path, f"{found:,} numbers in the weights, and {parameters:,} parameters in config.json"
        )


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers will read. Raises UserError, and ValueError for an
    index that makes no sense."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    index = read_json(str(folder), INDEX, f"{folder / INDEX}", "index of the weights")
    if index is None:
        raise _no_safetensors(folder)
    names = index.get("weight_map")
    if not isinstance(names, dict) or not isinstance(index.get("metadata"), dict):
        raise ValueError(f"{INDEX} has no weight_map and metadata")
    files = []
    for name in sorted({str(name) for name in names.values()}):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(
                f"{INDEX} names {name!r:.80}, which is no safetensors file of this directory"
            )
        files.append(folder / name)
    return files


def _numbers(file: Path) -> int:
    """How many numbers the tensors of a safetensors file have, by its header."""
    if not file.is_file():
        raise ValueError(f"{file.name} is not a file")
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if not 0 < size <= min(MAX_HEADER, file.stat().st_size - 8):
            raise ValueError(f"{file.name} is cut, or is not safetensors")
        header = json.loads(stream.read(size))
    if not isinstance(header, dict):
        raise ValueError(f"{file.name} has a broken header")
    tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
    whole = 8 + size + max((_end(file, tensor) for tensor in tensors), default=0)
    if file.stat().st_size < whole:
        raise ValueError(f"{file.name} is cut: {file.stat().st_size:,} of {whole:,} bytes")
    return sum(_count(file, tensor) for tensor in tensors)


def _end(file: Path, tensor: Any) -> int:
    """Where a tensor ends, in bytes behind the header."""
    match tensor:
        case {"data_offsets": [int(), int(end)]}:
            return end
    raise ValueError(f"{file.name} has a broken header")


def _count(file: Path, tensor: Any) -> int:
    match tensor:
        case {"shape": [*sizes]} if all(type(size) is int and size >= 0 for size in sizes):
            return math.prod(sizes)
    raise ValueError(f"{file.name} has a broken header")


def _no_safetensors(folder: Path) -> UserError:
    others = sorted(file.name for pattern in OTHER_FORMATS for file in folder.glob(pattern))
    if not others:
        return _cannot_load(str(folder), f"no {WEIGHTS} and no {INDEX}")
    convert = (
        "python -c \"from transformers import AutoModelForCausalLM as M; M.from_pretrained('{0}', trust_remote_code=False)"
        ".save_pretrained('{0}-safetensors')\" where you trust the file, and copy the tokenizer files beside it"
    )
    return UserError(
        "the model cannot be loaded",
        where=f"{folder / others[0]}",
        found="weights in a format that can run code when it is loaded, or is not exact",
        expected="weights in safetensors beside config.json",
        next=f"convert them: {convert.format(folder)}",
    )


def _cannot_load(path: str, found: str) -> UserError:
    return UserError(
        "the model cannot be loaded",
        where=path,
        found=found,
        expected="weights in safetensors beside config.json",
        next="copy or export the model's files again",
    )
