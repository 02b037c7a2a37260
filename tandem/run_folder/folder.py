"""The run folder: opened by one process at a time, for one config and one command, and never
overwritten in silence.

    runs/demo/  lock           pid of the process that has it
                config.toml    resolved, written last; of a resume that changes it, once the resume
                               cannot be refused any more
                run.json       command, and the directory that relative paths of the config begin in
                log.txt        machine.json (processor, threads)
                and what others write: metrics.jsonl, episodes/, checkpoints/ ...

run.threads = 0 and model.dtype = auto are resolved when a run begins, and kept: a resume with other
cores at hand, or another mesh, computes as the run began. It does not know what a step is, nor what
the folder's other files hold.
"""

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.choices import is_here
from tandem.config.recipe import to_toml
from tandem.config.schema import Config
from tandem.config.training import RATED
from tandem.model import custom_code
from tandem.model.onednn import bfloat16_unit
from tandem.model.placement import place_models
from tandem.run_folder.config_changes import (
    THREADS,
    allowed_changes,
    identifying_values,
    toml_values,
)
from tandem.run_folder.files import FAILED, FRESH, OTHER_FOLDER, read_about, read_file
from tandem.run_folder.lock import check_unlocked, locked, now
from tandem.run_folder.status import STATUS
from tandem.runtime import numerics
from tandem.runtime.disk import DISK, append_line, disk_errors, existing_parent, write_atomic
from tandem.runtime.errors import InvariantError, UserError
from tandem.runtime.place import share_of_threads

MACHINE = "machine.json"
LONGEST = 300  # characters of the reason of a failure
_RESTORE = f"restore it, or {FRESH}"
_NEXT = ".next-config.toml"  # of a resume until then
# What a kill during the first start can leave; config.toml, which comes last, marks the folder as a
# run.
_STARTING = {"lock", "log.txt", "run.json", ".tmp-run.json", ".tmp-config.toml"}
_OF_A_START = {*_STARTING, "config.toml", MACHINE}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """An open run folder; its lock is held until the context of open_run ends, or the process."""

    path: Path
    config: Config
    command: str
    news: tuple[str, ...] = ()  # of this start, in log.txt already
    recipe: Path = Path()  # the file with the config of this start, for other processes

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def episodes(self) -> Path:
        return self.path / "episodes"

    def log(self, text: str) -> None:
        """Append a line with the time to log.txt. Raises UserError when the disk is full."""
        append_line(self.path / "log.txt", f"{now()} {text}\n".encode())

    def note_start(self) -> None:
        """Put this start's config in the place of that before, drop the status of the start before,
        and write the directory that relative paths begin in to run.json; call it once nothing can
        be refused any more."""
        with disk_errors(self.path):
            if self.recipe.name == _NEXT:
                self.recipe.replace(self.path / "config.toml")
                DISK.fsync(self.path)
            (self.path / STATUS).unlink(missing_ok=True)  # of the run before
        about = read_about(self.path, _RESTORE)
        if about["directory"] != os.getcwd():
            _write_about(self.path, about)

    def note_machine(self, processor: str, any_threads: bool, matmul: str = "plain") -> str:
        """Write machine.json: the processor, the thread count, whether any count gives the same
        bits (any_threads), and its kernels: the name of those of a CPU, of a GPU that of the
        matmul. Returns a warning if the run was on another processor before.

        Raises UserError if the count matters here and has changed.
        """
        before, threads = read_machine(self.path), self.config.run.threads
        moved = before is not None and before["processor"] != processor
        if before is not None and not moved and not any_threads and before["threads"] != threads:
            raise UserError(
                "bits depend on the thread count here, and it has changed",
                where=THREADS,
                found=str(threads),
                expected=str(before["threads"]),
                next=f"{THREADS}={before['threads']}",
            )
        machine = {"processor": processor, "threads": threads, "any_threads": any_threads}
        about = json.dumps({**machine, "matmul": matmul}, indent=1)
        write_atomic(self.path / MACHINE, about.encode() + b"\n")
        if before is None or not moved:
            return ""
        return (
            f"the run has computed on {before['processor']}, now on {processor}: "
            "from here on its bits are those of this one"
        )


@contextmanager
def open_run(folder: Path, config: Config, *, fresh: bool, command: str) -> Iterator[RunFolder]:
    """Create the folder, or take up the run in it; command is "train" or "sft".

    fresh first moves its contents to `<folder>.old-1` (-2, ...). Raises UserError when another
    process has the folder, when it belongs to another command or config, when it is not a run, and
    when the disk does not take it.
    """
    _refuse_foreign(folder)
    # what it refuses makes and moves no folder
    resolved(config, Path(os.devnull) if fresh else folder)
    is_new = not folder.exists()
    with locked(folder) as news, ExitStack() as opened:
        if fresh and _is_run(folder):
            number = 1
            while (old := folder.with_name(f"{folder.name}.old-{number}")).exists():
                number += 1
            with disk_errors(folder):
                folder.rename(old)
            opened.callback(lambda: folder.exists() or old.rename(folder))  # it was refused
            # The lock has moved with the old folder: the new one is locked before it is let go.
            opened.enter_context(locked(folder))
            news, is_new = f"started fresh; the run before is in {old}", True
        yield opened.enter_context(_opened(folder, config, command, news, is_new))


@contextmanager
def _opened(
    folder: Path, config: Config, command: str, start_news: str, is_new: bool
) -> Iterator[RunFolder]:
    """Open a locked folder. is_new: this start has made it; if it is refused, it goes."""
    start = f"{'resumed' if _is_run(folder) else 'started'} by pid {os.getpid()}: tandem {command}"
    given, config, changes = config, resolved(config, folder), list[str]()
    # before the first step there is nothing to protect: the corrected config replaces that one
    begins = not has_steps(folder)
    if begins:
        _write_about(folder, {"command": command, "created": now()})
    else:
        changes = [f"config changed: {change}" for change in _changes(folder, config, command)]
    recipe = folder / (_NEXT if changes else "config.toml")
    if begins or changes:
        write_atomic(recipe, to_toml(config).encode())
    chosen = [
        f"{name}.learning_rate = auto: {getattr(config, name).learning_rate}"
        for name in RATED
        if getattr(given, name).learning_rate == "auto"
    ]
    if given.model.dtype == "auto" and config.model.dtype == "bfloat16":
        chosen.append("model.dtype = auto: bfloat16")
    news = tuple(filter(None, [start, start_news, *changes, *chosen]))
    run = RunFolder(path=folder, config=config, command=command, news=news, recipe=recipe)
    for line in news:
        run.log(line)
    try:
        yield run
    except Exception as error:
        is_users = isinstance(error, UserError) and not isinstance(error, InvariantError)
        first, kind = next(iter(str(error).splitlines()), ""), type(error).__name__
        reason = first if is_users else f"{kind}: {first}" if first else kind
        with suppress(UserError):  # a full disk: the error itself says more
            run.log(f"{FAILED}{reason[:LONGEST]}")
        if is_new and is_users and {path.name for path in folder.iterdir()} <= _OF_A_START:
            DISK.remove(folder)
        raise


def check_run(folder: Path, config: Config, command: str) -> bool:
    """Check that open_run would take the folder, and change nothing; return whether there is a run
    to go on with. Raises UserError as open_run."""
    _refuse_foreign(folder)
    with disk_errors(folder):
        for place in (folder, *folder.parents):
            if place.exists() and not place.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(place))
        if not os.access(parent := existing_parent(folder), os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(parent))
    check_unlocked(folder)
    if has_steps(folder):
        _changes(folder, resolved(config, folder), command)
    return has_steps(folder)


def read_matmul(folder: Path, processor: str) -> str:
    """Return the kernels that a run has taken on this processor; "" if it has taken none."""
    machine = read_machine(folder)
    return "" if machine is None or machine["processor"] != processor else machine["matmul"]


def read_machine(folder: Path) -> dict[str, Any] | None:
    """Read machine.json of a run folder: processor, threads, any_threads and matmul; None if there
    is no file."""
    path, names = folder / MACHINE, ("processor", "threads", "any_threads", "matmul")
    if not path.exists():
        return None
    return read_file(path, lambda text: {n: json.loads(text)[n] for n in names}, _RESTORE)


def identity(config: Config, inputs: dict[str, str]) -> str:
    """Return the SHA-256 of all inputs of the episodes of a run; inputs: hashes of its files by
    key."""
    values = identifying_values(to_toml(config))
    return hashlib.sha256(json.dumps([values, inputs], sort_keys=True).encode()).hexdigest()


def _is_run(folder: Path) -> bool:
    return (folder / "config.toml").exists()


def has_steps(folder: Path) -> bool:
    """Tell whether a run there has ended a step; its first row is of the evaluation before."""
    rows = folder / "metrics.jsonl"
    return _is_run(folder) and rows.exists() and rows.read_bytes().count(b"\n") > 1


def _refuse_foreign(folder: Path) -> None:
    with disk_errors(folder):
        names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if names - _STARTING and "config.toml" not in names:
        more = " ..." if len(names) > 4 else ""
        raise UserError(
            "the run folder holds something else",
            where=str(folder),
            found=f"{', '.join(sorted(names)[:4])}{more}, and no config.toml",
            expected="a folder of an earlier run, an empty one, or none",
            next=OTHER_FOLDER,
        )


def resolved(config: Config, folder: Path, *, trial: bool = True) -> Config:
    """Resolve run.threads = 0 and model.dtype = "auto": to those of the run in the folder, or of
    this machine if it has not recorded; and learning_rate = "auto", by the model. trial: a CPU may
    try bfloat16."""
    run, model, old = config.run, config.model, folder / "config.toml"
    recorded = read_file(old, toml_values, _RESTORE) if has_steps(folder) else {}
    if not run.threads:
        threads = recorded.get(THREADS) or share_of_threads(
            numerics.prepare(), os.environ, config.parallel.processes
        )
        run = run.model_copy(update={"threads": threads})
    if model.dtype == "auto":
        place, dtype = place_models(model.device, "auto"), recorded.get("model.dtype")
        has_unit = place.device.type == "cpu" and bfloat16_unit()
        if trial and model.path and not dtype and has_unit and is_here(config):
            from tandem.model.probe import auto_dtype

            custom_code.allow(model.trust_remote_code)
            # journalled episodes of a first step that was killed are of the type that it had
            kept = read_file(old, toml_values, _RESTORE) if _is_run(folder) else {}
            same = kept.get("model.path") == model.path
            dtype = kept["model.dtype"] if same else auto_dtype(model.path, run.threads)
        model = model.model_copy(update={"dtype": dtype or place.dtype_name})
    rated = {}
    for name in RATED:
        if (section := getattr(config, name)).learning_rate == "auto":
            from tandem.model.auto_rate import auto_learning_rate

            rate = auto_learning_rate(model.path, bool(config.lora.rank), name == "sft")
            rated[name] = section.model_copy(update={"learning_rate": rate})
    return config.model_copy(update={"run": run, "model": model, **rated})


def _changes(folder: Path, config: Config, command: str) -> list[str]:
    """Describe the allowed changes of the config since the run in the folder began. Raises
    UserError for others, and for a run of another command."""
    about = read_about(folder, _RESTORE)
    if about["command"] != command:
        raise UserError(
            "the run folder belongs to another command",
            where=str(folder),
            found=f"a run of `tandem {about['command']}`",
            expected=f"a run of `tandem {command}`",
            next=f"{OTHER_FOLDER}, or {FRESH}",
        )
    path, machine = folder / "config.toml", read_machine(folder)
    any_threads = machine is not None and machine["any_threads"]
    old, new = read_file(path, toml_values, _RESTORE), toml_values(to_toml(config))
    return allowed_changes(old, new, any_threads=any_threads, path=path)


def _write_about(folder: Path, about: dict[str, Any]) -> None:
    here = {"directory": os.getcwd(), "config": "config.toml"}
    write_atomic(folder / "run.json", json.dumps(about | here, indent=1).encode() + b"\n")
