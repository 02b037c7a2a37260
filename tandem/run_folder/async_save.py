"""Checkpoint saves while training goes on, as of the moment of `save`.

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

The trainer waits only for the save before, the saver only for before_write; neither waits for the
other while it holds anything. A snapshot costs the memory of what is saved until it is written. The
thread is a daemon: a program that ends without close() is not held up, and leaves a `.tmp-` folder,
as a kill does. It gives a sign of life to the watchdog after each file. Of several processes each
has a thread "saver": rank 0's waits for the files of the others, which report each one that is
durable. It does not know the content or the time of a save.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any, Self

from tandem.run_folder.checkpoint import plain_state, save_checkpoint
from tandem.run_folder.shards import SUFFIX, Entry, Shard, Tensors, write_shard
from tandem.runtime.disk import DISK, Disk
from tandem.runtime.errors import UserError
from tandem.runtime.watchdog import waiting_for

# Called in the saver's thread of a process after rank 0: with the name of each file, and its entry
# in the manifest once it is durable, or the fields of a UserError.
Report = Callable[[str, dict[str, Any]], None]


class Saver:
    """The saves of a run, one at a time. A context manager: leaving it finishes the save under way,
    also on an error.

    with Saver() as saver:
        saver.save(folder, 12, {"policy": weights}, {"step": 12}, keep=2, config=to_toml(config))
    """

    def __init__(self, disk: Disk = DISK):
        self._disk = disk
        self._under_way: _Save | None = None

    def save(
        self,
        folder: Path,
        step: int,
        tensors: Tensors,
        state: dict[str, Any],
        keep: int,
        *,
        config: str,
        before_write: Callable[[], None] = lambda: None,
        shard: Shard | None = None,
        wait_for_others: Callable[[], dict[str, Entry]] = dict,
        best: int | None = None,
    ) -> None:
        """Save a snapshot taken now, as save_checkpoint does; wait for the save before, and raise
        its error if it failed.

        before_write runs in the saver's thread, after the tensors are written and before anyone can
        see the checkpoint.
        """
        self.wait()
        write = partial(
            save_checkpoint,
            folder,
            step,
            _snapshot(tensors),
            plain_state(state),
            keep,
            config=config,
            before_write=before_write,
            shard=shard,
            wait_for_others=wait_for_others,
            best=best,
            disk=self._disk,
        )
        self._under_way = _Save(step, write)
        self._under_way.start()

    def save_shard(
        self, folder: Path, step: int, tensors: Tensors, shard: Shard, report: Report
    ) -> None:
        """Save a snapshot taken now of what a process after rank 0 has, as write_shard does."""
        self.wait()
        write = partial(_write_and_report, folder, _snapshot(tensors), shard, report, self._disk)
        self._under_way = _Save(step, write)
        self._under_way.start()

    def wait(self) -> None:
        """Wait until the save under way is durable. Raises its UserError (disk full ...) once: the
        checkpoint before is intact."""
        if self._under_way is None:
            return
        with waiting_for("saver", f"the checkpoint of step {self._under_way.step}"):
            self._under_way.join()
        ended, self._under_way = self._under_way, None
        ended.raise_error()

    def close(self) -> None:
        self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as unsaved:
            if error is None:
                raise
            # the error to raise is the first cause
            error.add_note(f"and the checkpoint under way was not saved: {unsaved}")


class _Save(Thread):
    """One save under way, and how it ended."""

    def __init__(self, step: int, write: Callable[[], object]):
        super().__init__(name="saver", daemon=True)
        self.step, self._write = step, write
        self._durable = False
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            self._write()
            self._durable = True
        except Exception as error:  # carried to the trainer's thread, all of them
            self._error = error

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error
        if not self._durable:  # by a panic of a library, which Python has printed
            raise RuntimeError(f"the thread that saved step {self.step} died")


def _snapshot(tensors: Tensors) -> Tensors:
    return {
        stem: {name: tensor.detach().to("cpu", copy=True) for name, tensor in named.items()}
        for stem, named in tensors.items()
    }


def _write_and_report(
    folder: Path, tensors: Tensors, shard: Shard, report: Report, disk: Disk
) -> None:
    for stem, named in tensors.items():
        name = f"{shard.stem(stem)}{SUFFIX}"
        try:
            report(name, write_shard(folder, stem, named, shard, disk))
        except Exception as error:  # all of them are rank 0's, which raises them
            report(name, vars(error) if isinstance(error, UserError) else {"what": repr(error)})
            return
