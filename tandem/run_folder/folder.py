"""The run folder: opened by one process at a time, for one config and one command, and never
overwritten in silence.

    runs/demo/  lock (pid of the process that has it)   config.toml (resolved, written last)
                run.json (command, and the directory that relative paths of the config begin in)
                log.txt   machine.json (processor)   and what others write: metrics.jsonl, episodes/, checkpoints/ ...

run.threads = 0 is resolved when a run begins, and kept: a resume with other cores at hand computes
as the run began.

It does not know what a step is, nor what the folder's other files hold.
"""

import errno
import fcntl
import hashlib
import json
import os
import socket
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tandem.config.recipe import to_toml
from tandem.config.schema import Config
from tandem.runtime import numerics
from tandem.runtime.disk import (
    append_line,
    disk_errors,
    existing_parent,
    open_plain,
    read_plain,
    write_atomic,
)
from tandem.runtime.errors import UserError

_MACHINE = "machine.json"
# What a kill during the first start can leave; config.toml, which comes last, marks the folder as a
# run.
_STARTING = {"lock", "log.txt", "run.json", ".tmp-run.json", ".tmp-config.toml"}

# Keys that change neither a step nor its place in the run. The folder may have been moved since.
_FREE = {
    "eval.every",
    "run.folder",
    "run.keep_checkpoints",
    "run.save_every",
    "run.show_samples",
    "run.stall_s",
    "reward.workers",
    "rollout.workers",
    "rollout.restarts",
    "rl.max_truncated",
    "rl.max_flat_steps",
    "train.activation_checkpointing",
}
_THREADS = "run.threads"  # free where the exactness probe has found that it changes no bit
# what stopped a run, and may grow from that value on
_BOUNDS = {"rl.max_gen_batches": 1, "train.max_bad_steps": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """An open run folder; its lock is held until the context of open_run ends, or the process."""

    path: Path
    config: Config
    command: str
    resumed: bool  # the folder was a run before this start
    log_descriptor: int
    news: tuple[str, ...] = ()  # of this start, in log.txt already

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def episodes(self) -> Path:
        return self.path / "episodes"

    def log(self, text: str) -> None:
        """Append a line with the time to log.txt. Raises UserError when the disk is full."""
        append_line(self.log_descriptor, f"{_now()} {text}\n".encode(), self.path / "log.txt")

    def note_directory(self) -> None:
        """Write down where relative paths of the config begin now, if that has changed; once they
        have been read."""
        about = _about(self.path)
        if about.get("directory") != os.getcwd():
            _write_about(self.path, about)

    def note_machine(self, processor: str, any_threads: bool) -> str:
        """Write machine.json: the processor, the thread count, and whether any count gives the same
        bits (any_threads). Returns a warning if the run was on another processor before.

        Raises UserError if the count matters here and has changed.
        """
        before, threads = read_machine(self.path), self.config.run.threads
        moved = before is not None and before["processor"] != processor
        if before is not None and not moved and not any_threads and before["threads"] != threads:
            raise UserError(
                "bits depend on the thread count here, and it has changed",
                where=_THREADS,
                found=str(threads),
                expected=str(before["threads"]),
                next=f"{_THREADS}={before['threads']}",
            )
        now = {"processor": processor, "threads": threads, "any_threads": any_threads}
        write_atomic(self.path / _MACHINE, json.dumps(now, indent=1).encode() + b"\n")
        if before is None or not moved:
            return ""
        return f"the run has computed on {before['processor']}, now on {processor}: from here on its bits are those of this one"


@contextmanager
def open_run(folder: Path, config: Config, *, fresh: bool, command: str) -> Iterator[RunFolder]:
    """Create the folder, or take up the run in it; command is "train" or "sft".

    fresh moves what is there to `<folder>.old-1` (-2, ...) first. Raises UserError when another
    process has the folder, when it belongs to another command or config, when it is not a run, and
    when the disk does not take it.
    """
    _refuse_foreign(folder)
    with _locked(folder) as lock_news:
        if fresh and _is_run(folder):
            # The lock moves with the old folder, so the new one is locked before this one is let
            # go.
            old = _move_aside(folder)
            with (
                _locked(folder) as none_before,
                _opened(folder, config, command, none_before) as run,
            ):
                run.log(f"started fresh; the run before is in {old}")
                yield run
        else:
            with _opened(folder, config, command, lock_news) as run:
                yield run


@contextmanager
def _opened(folder: Path, config: Config, command: str, lock_news: str) -> Iterator[RunFolder]:
    resumed = _is_run(folder)
    config = _with_threads(config, folder, resumed)
    changes = _take_up(folder, config, command) if resumed else _begin(folder, config, command)
    with disk_errors(folder):
        log = open_plain(folder / "log.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        news = tuple(filter(None, [lock_news, *changes]))
        run = RunFolder(
            path=folder,
            config=config,
            command=command,
            resumed=resumed,
            log_descriptor=log,
            news=news,
        )
        run.log(f"{'resumed' if resumed else 'started'} by pid {os.getpid()}: tandem {command}")
        for line in news:
            run.log(line)
        yield run
    finally:
        os.close(log)


def read_machine(folder: Path) -> dict[str, Any] | None:
    """Read machine.json of a run folder: processor, threads, any_threads; None where there is
    none."""
    path, names = folder / _MACHINE, ("processor", "threads", "any_threads")
    return (
        _read(path, lambda text: {name: json.loads(text)[name] for name in names})
        if path.exists()
        else None
    )


def identity(config: Config, inputs: dict[str, str]) -> str:
    """SHA-256 of all that the episodes of a run are a function of; inputs: hashes of its files by
    key."""
    leaves = {
        key: value
        for key, value in _leaves(to_toml(config)).items()
        if key not in _FREE | _BOUNDS.keys() | {"run.steps", _THREADS}
    }
    return hashlib.sha256(json.dumps([leaves, inputs], sort_keys=True).encode()).hexdigest()


def _is_run(folder: Path) -> bool:
    return (folder / "config.toml").exists()


def _refuse_foreign(folder: Path) -> None:
    with disk_errors(folder):
        names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if names - _STARTING and "config.toml" not in names:
        raise UserError(
            "the run folder holds something else",
            where=str(folder),
            found=", ".join(sorted(names)[:4])
            + (" ..." if len(names) > 4 else "")
            + ", and no config.toml",
            expected="a folder of an earlier run, an empty one, or none",
            next="choose another with run.folder=PATH",
        )


# The lock
# ------------------------------------------------------------------------------------------------------------


@contextmanager
def _locked(folder: Path) -> Iterator[str]:
    """Hold an exclusive flock on `lock`, which the system drops with the process; yields news of a
    killed holder."""
    descriptor = _acquire(folder)
    _close_in_forks(descriptor)
    try:
        held_before = os.pread(descriptor, 4096, 0).decode(errors="replace").strip()
        with disk_errors(folder / "lock"):
            os.ftruncate(descriptor, 0)
            os.pwrite(
                descriptor,
                f"pid {os.getpid()} on {socket.gethostname()} since {_now()}\n".encode(),
                0,
            )
        yield f"took over the lock of a run that was killed: {held_before}" if held_before else ""
    finally:
        with suppress(OSError):
            # an empty lock tells the next start that this one was not killed
            os.ftruncate(descriptor, 0)
        _open_locks.discard(descriptor)
        os.close(descriptor)


def _acquire(folder: Path) -> int:
    path = folder / "lock"
    while True:
        with disk_errors(path):
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = open_plain(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 4096, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise _in_use(folder, holder) from None
        if _is_same_file(descriptor, path):
            return descriptor
        os.close(descriptor)  # between open and flock a --fresh run moved the folder away


def _is_same_file(descriptor: int, path: Path) -> bool:
    return path.exists() and os.path.samestat(os.fstat(descriptor), path.lstat())


def _in_use(folder: Path, holder: str) -> UserError:
    return UserError(
        "the run folder is in use",
        where=str(folder),
        found=holder or "a process that is just starting",
        expected="no other run in this folder",
        next="wait for it or stop it, or choose another with run.folder=PATH",
    )


_open_locks: set[int] = set()
_fork_hook: list[bool] = []


def _close_in_forks(descriptor: int) -> None:
    """A forked worker shares the lock and would keep it after the run is killed, so the child
    closes its copy."""
    _open_locks.add(descriptor)
    if not _fork_hook:
        os.register_at_fork(after_in_child=_close_locks)
        _fork_hook.append(True)


def _close_locks() -> None:
    while _open_locks:
        os.close(_open_locks.pop())


# Start, start over, start again
# --------------------------------------------------------------------------------------


def _begin(folder: Path, config: Config, command: str) -> list[str]:
    _write_about(folder, {"command": command, "created": _now()})
    write_atomic(folder / "config.toml", to_toml(config).encode())
    return []


def _write_about(folder: Path, about: dict[str, Any]) -> None:
    here = {"directory": os.getcwd(), "config": "config.toml"}
    write_atomic(folder / "run.json", json.dumps(about | here, indent=1).encode() + b"\n")


def _with_threads(config: Config, folder: Path, resumed: bool) -> Config:
    """Resolve run.threads = 0: to the count of the run in the folder, or of torch where it has not
    begun."""
    if config.run.threads:
        return config
    begun = resumed and (folder / "metrics.jsonl").exists()
    known = _read(folder / "config.toml", lambda text: _leaves(text)[_THREADS]) if begun else 0
    run = config.run.model_copy(update={"threads": known or numerics.prepare()})
    return config.model_copy(update={"run": run})


def _move_aside(folder: Path) -> Path:
    number = 1
    while (target := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    with disk_errors(folder):
        folder.rename(target)
    return target


def check_run(folder: Path, config: Config, command: str) -> bool:
    """Check that open_run would take the folder, and change nothing; returns whether there is a run
    to go on with. Raises UserError as open_run."""
    _refuse_foreign(folder)
    _check_writable(folder)
    if (folder / "lock").is_file():
        with (folder / "lock").open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _in_use(folder, lock.read().strip()) from None
    begun = _is_run(folder) and (folder / "metrics.jsonl").exists()
    if begun:
        _changed(folder, _with_threads(config, folder, True), command)
    return begun


def _check_writable(folder: Path) -> None:
    """Raise the UserError that creating the folder would end in."""
    parent = existing_parent(folder)
    with disk_errors(folder):
        for place in (folder, *folder.parents):
            if place.exists() and not place.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(place))
        if not os.access(parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(parent))


def _take_up(folder: Path, config: Config, command: str) -> list[str]:
    """Check that the run in the folder is the same; returns what changed and may, for the log.

    A start that a mistake ended before the first metrics row leaves nothing to protect: the
    corrected config replaces it.
    """
    if not (folder / "metrics.jsonl").exists():
        return _begin(folder, config, command)
    changed = _changed(folder, config, command)
    if changed:
        write_atomic(folder / "config.toml", to_toml(config).encode())
    return [f"config changed: {change}" for change in changed]


def _about(folder: Path) -> dict[str, Any]:
    return _read(
        folder / "run.json",
        lambda text: {"command": json.loads(text)["command"], **json.loads(text)},
    )  # type: ignore[no-any-return]


def _changed(folder: Path, config: Config, command: str) -> list[str]:
    """What of the config has changed since the run in the folder began, and may. Raises UserError
    for what may not, and for a run of another command."""
    about = _about(folder)
    if about["command"] != command:
        raise UserError(
            "the run folder belongs to another command",
            where=str(folder),
            found=f"a run of `tandem {about['command']}`",
            expected=f"a run of `tandem {command}`",
            next="choose another with run.folder=PATH, or start over with --fresh (the old run is kept beside it)",
        )
    old, new = _read(folder / "config.toml", _leaves), _leaves(to_toml(config))
    changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    refused = [key for key in changed if key not in _FREE and not _extends(key, old, new)]
    machine = read_machine(folder)
    if _THREADS in refused and (
        old[_THREADS] == 0 or (machine is not None and machine["any_threads"])
    ):
        refused.remove(_THREADS)
    if refused:
        raise UserError(
            "the config differs from that of the run in the folder (its value -> the value now)\n"
            + "\n".join(f"  - {_change(key, old, new)}" for key in refused),
            where=str(folder / "config.toml"),
            expected=f"the same config ({', '.join(_BOUNDS)} may grow, and run.steps, with a constant schedule and no staleness; "
            f"{_THREADS} may change where the probe found that it changes no bit; free to change: see docs/determinism.md)",
            next="take the old values, another run.folder=PATH, or --fresh (the old run is kept beside it)",
        )
    return [_change(key, old, new) for key in changed]


def _extends(key: str, old: dict[str, Any], new: dict[str, Any]) -> bool:
    """More steps are the same run made longer, unless the learning rate of past steps was bent by
    their number, or rollouts that would have been ahead of the last step were not made.

    And a larger bound on what stopped the run changes no step that was made under the smaller one.
    """
    if key == "run.steps":
        return (
            new[key] > old.get(key, 0)
            and new["train.schedule"] == "constant"
            and not new["rollout.staleness"]
        )
    return key in _BOUNDS and new[key] > old.get(key, 0) >= _BOUNDS[key]


def _change(key: str, old: dict[str, Any], new: dict[str, Any]) -> str:
    return f"{key}: {old.get(key, 'unset')!r} -> {new.get(key, 'unset')!r}"


def _leaves(toml: str) -> dict[str, Any]:
    """ "[run]\\nseed = 1" -> {"run.seed": 1}."""
    tree = tomllib.loads(toml)
    return {
        f"{section}.{name}": value
        for section, fields in tree.items()
        for name, value in fields.items()
    }


def _read(path: Path, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(read_plain(path).decode())
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:  # absent, or of another shape
        raise UserError(
            "a file of the run folder cannot be read",
            where=str(path),
            found=f"{type(error).__name__}: {error}",
            expected="the file as Tandem wrote it",
            next="restore it, or start over with --fresh (the old run is kept beside it)",
        ) from error


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
