"""Checks of the weight files of a model directory before transformers opens them.

They must be safetensors inside the directory, as exported, and as many numbers as config.json
describes: transformers fills missing ones with random numbers, however much memory that takes.
Only headers and hashes are read, never a tensor. A hub name's files are not checked, but
transformers fetches safetensors only.
"""

import json
import math
from pathlib import Path
from typing import Any

from tandem.model.config_file import first_line, read_json, refuse_adapter
from tandem.runtime.disk import file_hash
from tandem.runtime.errors import UserError

SUMS = "SHA256SUMS"  # beside exported weights
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack")
MAX_HEADER = 100 << 20  # bytes, safetensors' own limit
# Parameters, 1 GiB in float32, that transformers may make up before they are reported missing.
MOST_MISSING = 1 << 28


def check_weights(path: str, parameters: int = 0) -> None:
    """Raise UserError unless the weights are safetensors inside the directory and nearly complete.

    parameters: how many numbers config.json describes.
    """
    refuse_adapter(path, path)
    folder = Path(path)
    if not folder.is_dir():
        return
    try:
        found = sum(_numbers(file) for file in _weight_files(folder))
    except (OSError, ValueError, RecursionError) as error:
        raise cannot_load(path, first_line(error)) from None
    if found + MOST_MISSING < parameters:
        raise cannot_load(
            path, f"{found:,} numbers in the weights, and {parameters:,} parameters in config.json"
        )


def check_sums(path: str) -> None:
    """Raise UserError if weights differ from SHA256SUMS; a directory without it passes."""
    folder = Path(path)
    if not (folder / SUMS).is_file():
        return
    for line in (folder / SUMS).read_text(errors="replace").splitlines():
        recorded, _, name = line.partition("  ")
        if name.endswith(".safetensors"):
            found = file_hash(folder / name) if (folder / name).is_file() else "no such file"
            if found != recorded.lower():
                raise _not_as_exported(folder / name, found, recorded)


def _weight_files(folder: Path) -> list[Path]:
    """List the safetensors files that transformers will read.

    Raises UserError, and ValueError for a malformed index.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    index = read_json(str(folder), INDEX, what="index of the weights")
    if index is None:
        raise _no_safetensors(folder)
    names = index.get("weight_map")
    if not isinstance(names, dict) or not isinstance(index.get("metadata"), dict):
        raise ValueError(f"{INDEX} has no weight_map and metadata")
    files = []
    for name in sorted({str(name) for name in names.values()}):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(
                f"{INDEX} names {name!r:.80}, not a safetensors file of this directory"
            )
        files.append(folder / name)
    return files


def _numbers(file: Path) -> int:
    """Count the numbers in the tensors of a safetensors file, by its header."""
    if not file.is_file():
        raise ValueError(f"{file.name} is not a file")
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if not 0 < size <= min(MAX_HEADER, file.stat().st_size - 8):
            raise ValueError(f"{file.name} is truncated, or is not safetensors")
        header = json.loads(stream.read(size))
    if not isinstance(header, dict):
        raise ValueError(f"{file.name} has a broken header")
    tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
    extents = [_end_and_count(file, tensor) for tensor in tensors]
    expected = 8 + size + max((end for end, _ in extents), default=0)
    if file.stat().st_size < expected:
        raise ValueError(f"{file.name} is truncated: {file.stat().st_size:,} of {expected:,} bytes")
    return sum(count for _, count in extents)


def _end_and_count(file: Path, tensor: Any) -> tuple[int, int]:
    """Read a tensor's end, in bytes behind the header, and how many numbers it has."""
    match tensor:
        case {"data_offsets": [int(), int(end)], "shape": [*sizes], **others} if all(
            type(size) is int and size >= 0 for size in sizes
        ):
            in_a_byte = 2 if others.get("dtype") == "U8" else 1  # mxfp4
            return end, in_a_byte * math.prod(sizes)
    raise ValueError(f"{file.name} has a broken header")


def _no_safetensors(folder: Path) -> UserError:
    others = sorted(file.name for pattern in OTHER_FORMATS for file in folder.glob(pattern))
    if not others:
        return cannot_load(str(folder), f"no {WEIGHTS} and no {INDEX}")
    convert = (
        'python -c "from transformers import AutoModelForCausalLM as M; '
        f"M.from_pretrained('{folder}', trust_remote_code=False)"
        f".save_pretrained('{folder}-safetensors')\" where you trust the file, "
        "and copy the tokenizer files beside it"
    )
    return UserError(
        "the model cannot be loaded",
        where=f"{folder / others[0]}",
        found="weights in a format that can run code when it is loaded, or is not exact",
        expected="weights in safetensors beside config.json",
        next=f"convert them: {convert}",
    )


def _not_as_exported(file: Path, found: str, recorded: str) -> UserError:
    return UserError(
        "the weights are not those that were exported",
        where=str(file),
        found=found,
        expected=f"{recorded}, as in {SUMS}",
        next=f"export them again; or remove {SUMS} if they were changed on purpose",
    )


def cannot_load(path: str, found: str) -> UserError:
    return UserError(
        "the model cannot be loaded",
        where=path,
        found=found,
        expected="weights in safetensors beside config.json",
        next="copy or export the model's files again",
    )
