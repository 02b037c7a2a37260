"""The files of a checkpoint that several processes write, and the tensors of any checkpoint, read
by parts.

    one process     policy.safetensors
    two processes   policy-00001-of-00002.safetensors  policy-00002-of-00002.safetensors
                    each with {"boxes": JSON of name -> [start, shape of the whole]} in its metadata

A process reads the boxes that it needs, from the files that overlap them, so a checkpoint of any
number of processes is one of any other number. It does not know how a mesh divides a tensor.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tandem.model.boxes import Box, whole_box
from tandem.runtime.disk import Disk, disk_errors, file_hash, make_folder, os_error
from tandem.runtime.errors import UserError
from tandem.runtime.watchdog import heartbeat

SUFFIX = ".safetensors"
Tensors = Mapping[str, Mapping[str, torch.Tensor]]  # file stem -> name -> tensor
Boxes = Mapping[str, Mapping[str, Box]]  # the same, of parts
Entry = dict[str, Any]  # of a file in a manifest: {"size": bytes, "sha256": hex}
Entries = dict[str, Entry]  # by the name of the file


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The part of a checkpoint that one of several processes writes.

    folder: the name of the unfinished checkpoint in checkpoints/, which all of them write into;
    boxes: of the tensors.
    """

    rank: int
    size: int  # processes
    folder: str
    boxes: Boxes

    def stem(self, stem: str) -> str:
        """Return the stem of this rank's file: "policy-00001-of-00002"."""
        return f"{stem}-{self.rank + 1:05d}-of-{self.size:05d}"


def unfinished_name(step: int) -> str:
    """Return a name of the folder that processes write the checkpoint of a step into, another one
    each time: processes of a killed run do not know it."""
    return f".tmp-step_{step:06d}-{secrets.token_hex(4)}"


def write_shard(checkpoints: Path, tensors: Tensors, shard: Shard, disk: Disk) -> Entries:
    """Write the tensor files of a process after rank 0, durable on return. Raises UserError when
    the disk is full or read-only."""
    folder = checkpoints / shard.folder
    with disk_errors(folder):
        make_folder(folder, disk)
        return write_tensors(folder, tensors, shard, disk)


def write_tensors(folder: Path, tensors: Tensors, shard: Shard | None, disk: Disk) -> Entries:
    """Write the tensor files of a process into a folder, durable on return."""
    entries = {}
    for stem, named in tensors.items():
        boxes = None if shard is None else shard.boxes[stem]
        file = folder / f"{stem if shard is None else shard.stem(stem)}{SUFFIX}"
        entries[file.name] = write_file(file, partial(_save, named, boxes), disk)
    return entries


def write_file(file: Path, save: Callable[[Path], object], disk: Disk) -> Entry:
    """Have a file written, durable on return; return its entry in the manifest."""
    disk.write(file, save)
    disk.fsync(file)
    return file_entry(file)


def file_entry(file: Path) -> Entry:
    """Return the size and SHA-256 of a file as it can be read back."""
    heartbeat()
    return {"size": file.stat().st_size, "sha256": file_hash(file)}


def _save(named: Mapping[str, torch.Tensor], boxes: Mapping[str, Box] | None, path: Path) -> None:
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}
    metadata = None
    if boxes is not None:
        places = {name: [boxes[name].start, boxes[name].whole] for name in plain}
        metadata = {"boxes": json.dumps(places, sort_keys=True)}
    try:
        save_file(plain, path, metadata)
    except SafetensorError as error:
        raise os_error(error, path) or error from None
    # safetensors makes files that only their owner can read
    path.chmod(path.parent.stat().st_mode & 0o666)


class SavedTensors(Mapping[str, torch.Tensor]):
    """The tensors of one stem of a checkpoint. Nothing is read before it is asked for, and a whole
    tensor that several files hold is put together when it is. Files that were whole give private
    maps: a write does not reach the file."""

    def __init__(self, files: Sequence[Path]):
        self._parts: dict[str, list[tuple[Box, Any]]] = {}
        for path in files:
            file = safe_open(path, "pt")
            places = json.loads((file.metadata() or {}).get("boxes", "{}"))
            for name in file.keys():  # noqa: SIM118
                shape = tuple(file.get_slice(name).get_shape())
                start, whole = places.get(name, (whole_box(shape).start, shape))
                box = Box(tuple(start), shape, tuple(whole))
                self._parts.setdefault(name, []).append((box, file))
        self._boxes = {name: whole_box(parts[0][0].whole) for name, parts in self._parts.items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self._boxes)

    def __len__(self) -> int:
        return len(self._boxes)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.read(name, self._boxes[name])

    def parts(self, boxes: Mapping[str, Box]) -> "SavedTensors":
        """Return the parts of these boxes, read when asked for."""
        part = copy(self)
        part._boxes = {name: box for name, box in boxes.items() if name in self._parts}
        return part

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Read a part of a tensor. Raises UserError if the tensor has another shape, or the files
        lack some of it."""
        parts = self._parts[name]
        if any(part.whole != box.whole for part, _ in parts):
            raise other_tensors(name, f"shape {list(parts[0][0].whole)}", list(box.whole))
        if parts[0][0] == box:
            return parts[0][1].get_tensor(name)  # type: ignore[no-any-return]
        found, count = None, 0
        for part, file in parts:
            if found is None:  # any slice tells the type
                none = tuple(slice(0, 0) for _ in box.shape)
                found = torch.empty(box.shape, dtype=file.get_slice(name)[none].dtype)
            if (common := box.overlap(part)) is not None:
                found[common.within(box)] = file.get_slice(name)[common.within(part)]
                count += common.size
        if found is None or count != box.size:
            raise other_tensors(name, f"{count} of its numbers", box.size)
        return found


def open_tensors(files: Sequence[Path]) -> dict[str, SavedTensors]:
    """Open the tensor files of a checkpoint, by stem."""
    by_stem: dict[str, list[Path]] = {}
    for file in sorted(files):
        stem = re.sub(r"-\d{5}-of-\d{5}$", "", file.name.removesuffix(SUFFIX))
        by_stem.setdefault(stem, []).append(file)
    return {stem: SavedTensors(paths) for stem, paths in by_stem.items()}


def other_tensors(name: str, found: str, expected: object) -> UserError:
    """Return the error of a checkpoint whose tensors are not the model's."""
    return UserError(
        "the weights are not this model's",
        where=name,
        found=found,
        expected=f"{expected}: the model, and the adapter, that the weights were saved from",
    )
