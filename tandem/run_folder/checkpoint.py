"""Checkpoints: safetensors and JSON in `checkpoints/step_000012/`, proved whole by a manifest that
is written last.

    .tmp-step_000012/                policy.safetensors  optimizer.safetensors  state.json,
                                     each fsynced; then manifest.json: step, versions, SHA-256
                                     of the config, size and SHA-256 of each file; fsynced
    .tmp-step_000012 -> step_000012  one atomic rename, then fsync of the parent, then older
                                     ones are pruned

A kill leaves a `.tmp-` folder, which nobody reads, or a whole checkpoint. `sha256sum` checks one
too. Of several processes each writes its own tensor files (shards.py), and rank 0 the manifest.
`Saver` does this beside training:

    trainer                                thread "saver", one for each save
    -------                                ---------------------------------
    save(step 12)
      wait()   <- no save under way
      snapshot: clone tensors and state
      start    --------------------------> write and fsync tensors and state
    train step 13 ...                      before_write()  <- blocks until the caller's part
                                                              is durable
    train step 14 ...                      manifest, fsync, rename, fsync, prune older ones
    save(step 20)
      wait()   <-------------------------- ends, durable or with an error,
      snapshot ...                         which wait() raises once

A snapshot costs the memory of what is saved until it is written. A program that ends without
close() is not held up, and leaves a `.tmp-` folder, as a kill does. It does not know what the
tensors and the state mean. No pickle is read or written.
"""

import hashlib
import json
import os
import platform
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from threading import Thread
from typing import Any

from tandem.run_folder.files import RESTORE_OR_FRESH
from tandem.run_folder.shards import (
    Entries,
    SavedTensors,
    Shard,
    Tensors,
    file_entry,
    open_tensors,
    write_file,
    write_shard,
    write_tensors,
)
from tandem.runtime.disk import DISK, Disk, disk_errors, make_folder
from tandem.runtime.errors import UserError
from tandem.runtime.version import __version__
from tandem.runtime.watchdog import waiting_for

MANIFEST = "manifest.json"
STATE = "state.json"
_LIBRARIES = ("torch", "transformers", "safetensors", "numpy")
_GONE, _ASIDE = ".tmp-gone-", ".aside-"

# Called in the saver's thread of a process after rank 0: with the entries of its files once they
# are durable, or the fields of a UserError.
Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """Parts of a checkpoint.

    before_write is called when all but the manifest is written: the checkpoint cannot be seen
    before it returns. wait_for_others returns, once the files of the other processes are durable,
    their entries in the manifest. Example: Contents(step=12, tensors={"policy": {"embed.weight":
    ...}, "optimizer": {"embed.weight.exp_avg": ...}}, state={"step": 12}, config="[run]...")
    """

    step: int
    tensors: Tensors  # by the stem of their file; no tensor twice
    state: dict[str, Any]  # JSON
    config: str  # the text of the run's config.toml, whose hash goes into the manifest
    keep: int = 2  # the newest so many checkpoints stay
    best: int | None = None  # a step whose checkpoint stays too
    shard: Shard | None = None  # of this process, if others write the rest
    before_write: Callable[[], None] = lambda: None
    wait_for_others: Callable[[], Entries] = dict


def save_checkpoint(folder: Path, contents: Contents, disk: Disk = DISK) -> Path:
    """Write `folder/step_N`, durable on return, and prune older ones. Only one process may save
    into a folder.

    Raises UserError when the disk is full or read-only, and every error of before_write and
    wait_for_others; checkpoints already there stay intact.
    """
    step, shard = contents.step, contents.shard
    state = json.dumps(plain_state(contents.state), sort_keys=True).encode()
    temporary = folder / (f".tmp-{step_name(step)}" if shard is None else shard.folder)
    with disk_errors(folder):
        make_folder(folder, disk)
        _sweep(folder, disk, None if shard is None else temporary)
        try:
            temporary.mkdir(exist_ok=shard is not None)
            files = write_tensors(temporary, contents.tensors, shard, disk)
            files[STATE] = write_file(temporary / STATE, lambda path: path.write_bytes(state), disk)
            contents.before_write()
            body = {
                "step": step,
                "versions": versions(),
                # as `sha256sum config.toml` prints it
                "config_sha256": hashlib.sha256(contents.config.encode()).hexdigest(),
                "files": files | contents.wait_for_others(),
            }
            manifest = _sealed(body)
            write_file(temporary / MANIFEST, lambda path: path.write_bytes(manifest), disk)
            disk.fsync(temporary)
        except (OSError, UserError):
            with suppress(OSError):  # the error to raise is the first one
                disk.remove(temporary)  # it takes the space that the user is about to look for
            raise
        _put_in_place(temporary, folder / step_name(step), disk)
        _prune(folder, contents, disk)
    return folder / step_name(step)


def latest_checkpoint(folder: Path, report: Callable[[str], None]) -> Path | None:
    """Find the newest whole and verified checkpoint, None if there is none at all; write nothing.

    A damaged one is told to report and the one before it is tried. Raises UserError when there are
    some and none verifies: the user must ask for a training from scratch.
    """
    damaged = []
    for path in _newest_first(folder):
        damage = find_damage(path)
        if not damage:
            return path
        damaged += [f"{path.name}/{line}" for line in damage]
        report(f"checkpoint {path.name} is damaged, trying the one before: {'; '.join(damage)}")
    if damaged:
        raise UserError(
            "every checkpoint of the run is damaged",
            where=str(folder),
            found="; ".join(damaged),
            expected="one whose files have the sizes and hashes of its manifest.json",
            next=RESTORE_OR_FRESH,
        )
    return None


def load_checkpoint(
    path: Path, *, verify: bool = True
) -> tuple[dict[str, SavedTensors], dict[str, Any]]:
    """Read (tensors, state), as saved. verify=False only for a path just returned by
    latest_checkpoint, which verified it.

    The tensors are read when touched, and a write does not reach the file.
    """
    damage = find_damage(path) if verify else []
    if damage:
        raise UserError(
            "the checkpoint is damaged",
            where=str(path),
            found="; ".join(damage),
            next="take another step_N",
        )
    _, files = _read_manifest(path)  # other files of the folder have no hash
    tensors = open_tensors([path / name for name in files if name != STATE])
    return tensors, dict(json.loads((path / STATE).read_bytes()))


def find_damage(path: Path, *, hashed: bool = True) -> list[str]:
    """Describe the damage of a checkpoint, one line a file with the expected and the found value;
    empty when it is whole. hashed=False checks the sizes only."""
    damage, files = _read_manifest(path)
    return damage or [
        line for name, entry in files.items() for line in _file_damage(path / name, entry, hashed)
    ]


def checkpoint_step(path: Path) -> int:
    """Return the N of a path that latest_checkpoint returned."""
    return int(path.name.rpartition("_")[2])


def step_name(step: int) -> str:
    """Return the name of a step's folder: 12 -> "step_000012"."""
    return f"step_{step:06d}"


def versions() -> dict[str, str]:
    """Return the versions that bits depend on, of this process."""
    libraries = {name: version(name) for name in _LIBRARIES}
    return {"tandem": __version__, "python": platform.python_version(), **libraries}


def checkpoint_versions(path: Path) -> dict[str, str]:
    """Return the versions that a checkpoint was saved with, as load_checkpoint has verified it."""
    return dict(json.loads((path / MANIFEST).read_bytes())["versions"])


def plain_state(state: dict[str, Any]) -> dict[str, Any]:
    """Copy a state as it will be read back. Raises TypeError or ValueError for values that JSON
    would silently change (tuples, integer keys, NaN): a resumed run must read what was saved."""
    copy: dict[str, Any] = json.loads(json.dumps(state, allow_nan=False))
    if copy != state:
        raise TypeError(
            "the state of a checkpoint does not survive JSON: "
            "use lists, string keys and plain numbers"
        )
    return copy


def _put_in_place(temporary: Path, target: Path, disk: Disk) -> None:
    """Rename. A target that is already there (a resumed run saves a step again) steps aside, and is
    the checkpoint until then."""
    aside = target.with_name(f"{_ASIDE}{target.name}")
    if target.exists():
        disk.rename(target, aside)
    disk.rename(temporary, target)
    disk.fsync(target.parent)
    if aside.exists():
        _discard(aside, disk)


def _prune(folder: Path, contents: Contents, disk: Disk) -> None:
    """Keep the newest whole ones up to this step, and the best one. Sizes are checked, not hashes:
    that would read gigabytes each save.

    Steps after this one are left: a resume from before a damaged checkpoint reaches them again.
    """
    older = [path for path in _newest_first(folder) if checkpoint_step(path) <= contents.step]
    intact = [path for path in older if not find_damage(path, hashed=False)]
    if len(intact) >= contents.keep:
        for path in older[older.index(intact[contents.keep - 1]) + 1 :]:
            if checkpoint_step(path) != contents.best:
                _discard(path, disk)


def _discard(path: Path, disk: Disk) -> None:
    """Rename and remove: after a kill in between nothing looks like a damaged checkpoint, and no
    process that knows the old name adds a file meanwhile."""
    gone = path.with_name(f"{_GONE}{path.name}")
    disk.rename(path, gone)
    disk.remove(gone)


def _sweep(folder: Path, disk: Disk, own: Path | None) -> None:
    """Remove the unfinished folders of a killed save; bring back a checkpoint that stepped aside in
    vain. own: the unfinished folder of this save, which other processes write into already."""
    for path in sorted(folder.glob(".tmp-*")):  # those renamed already come first
        if path.name.startswith(_GONE):
            disk.remove(path)
        elif path != own:
            _discard(path, disk)  # a process of a killed run may still write into it
    for aside in folder.glob(f"{_ASIDE}step_*"):
        target = folder / aside.name.removeprefix(_ASIDE)
        if target.exists():  # the successor, which may have gone bad since
            _discard(target if find_damage(target) else aside, disk)
        if not target.exists():
            disk.rename(aside, target)


def _newest_first(folder: Path) -> list[Path]:
    """List the checkpoints by falling step, with any that a killed save had moved aside."""
    names = [path for path in folder.glob("*") if re.fullmatch(r"(\.aside-)?step_\d+", path.name)]
    return sorted(names, key=lambda path: (checkpoint_step(path), path.name), reverse=True)


def _sealed(body: dict[str, Any]) -> bytes:
    """Return the manifest with its own hash, as bytes, so that any changed byte in it is found."""
    seal = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    sealed = {**body, "sha256_of_the_rest": seal}
    return json.dumps(sealed, sort_keys=True, indent=1).encode() + b"\n"


def _read_manifest(path: Path) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Read (damage, name -> size and hash)."""
    try:
        data = (path / MANIFEST).read_bytes()
        body = json.loads(data)
        del body["sha256_of_the_rest"]
        intact = _sealed(body) == data
    except FileNotFoundError:
        return [f"{MANIFEST}: found none, expected one"], {}
    except OSError as error:
        return [f"{MANIFEST}: found {error.strerror}, expected a readable file"], {}
    # not JSON, not UTF-8, or another shape
    except (ValueError, TypeError, KeyError, RecursionError):
        intact = False
    if not intact:
        return [f"{MANIFEST}: found other bytes, expected those its own hash was made of"], {}
    if body["step"] != checkpoint_step(path):
        return [f"{MANIFEST}: found step {body['step']}, expected {checkpoint_step(path)}"], {}
    return [], body["files"]


def _file_damage(file: Path, entry: dict[str, Any], hashed: bool) -> list[str]:
    if not file.is_file():
        return [f"{file.name}: found none, expected {entry['size']} bytes"]
    if (size := os.path.getsize(file)) != entry["size"]:
        return [f"{file.name}: found {size} bytes, expected {entry['size']}"]
    try:
        digest = file_entry(file)["sha256"] if hashed else entry["sha256"]
    # a bad sector: the checkpoint before this one is the way out, so it counts as damage
    except OSError as error:
        return [f"{file.name}: found {error.strerror}, expected sha256 {entry['sha256']}"]
    if digest != entry["sha256"]:
        return [f"{file.name}: found sha256 {digest}, expected {entry['sha256']}"]
    return []


# ---- beside training


class Saver(AbstractContextManager["Saver"]):
    """The saves of a run, one at a time. A context manager: leaving it finishes the save under way,
    also on an error.

    with Saver() as saver:
        saver.save(folder, Contents(step=12, tensors={"policy": weights}, state={}, config=toml))
    """

    def __init__(self, disk: Disk = DISK):
        self._disk = disk
        self._under_way: tuple[int, Thread] | None = None
        self._error: Exception | None = None  # of the save under way

    def save(self, folder: Path, contents: Contents) -> None:
        """Save a snapshot taken now, as save_checkpoint does; wait for the save before, and raise
        its error if it failed.

        before_write runs in the saver's thread.
        """
        self.wait()
        tensors, state = _snapshot(contents.tensors), plain_state(contents.state)
        snapshot = replace(contents, tensors=tensors, state=state)
        self._start(contents.step, partial(save_checkpoint, folder, snapshot, self._disk))

    def save_shard(
        self, folder: Path, step: int, tensors: Tensors, shard: Shard, report: Report
    ) -> None:
        """Save a snapshot taken now of what a process after rank 0 has, as write_shard does."""
        self.wait()
        snapshot = _snapshot(tensors)

        def write() -> None:
            try:
                report(write_shard(folder, snapshot, shard, self._disk))
            except Exception as error:  # all of them are rank 0's, which raises them
                report(vars(error) if isinstance(error, UserError) else {"what": repr(error)})

        self._start(step, write)

    def _start(self, step: int, write: Callable[[], object]) -> None:
        def run() -> None:
            try:
                write()
                self._error = None
            except Exception as error:  # `wait` raises it
                self._error = error

        # if a panic of a library ends the thread, which Python has printed
        self._error = RuntimeError(f"the thread that saved step {step} died")
        self._under_way = step, Thread(target=run, name="saver", daemon=True)
        self._under_way[1].start()

    def wait(self) -> None:
        """Wait until the save under way is durable. Raises its UserError (disk full ...) once: the
        checkpoint before is intact."""
        if self._under_way is None:
            return
        step, thread = self._under_way
        with waiting_for("saver", f"the checkpoint of step {step}"):
            thread.join()
        error, self._under_way, self._error = self._error, None, None
        if error is not None:
            raise error

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.wait()
        except Exception as unsaved:
            if error is None:
                raise
            # the error to raise is the first cause
            error.add_note(f"and the checkpoint under way was not saved: {unsaved}")


def _snapshot(tensors: Tensors) -> Tensors:
    return {
        stem: {name: tensor.detach().to("cpu", copy=True) for name, tensor in named.items()}
        for stem, named in tensors.items()
    }
