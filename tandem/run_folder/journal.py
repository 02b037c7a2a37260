"""A run's journal, written and read back: no episode that ended before a kill is rolled out, scored
or evaluated again, unless it failed in an unfinished step.

    scoring threads                 the journal's thread            files in episodes/
    ---------------                 --------------------            ------------------
    Parts.add(row, episode)  ->     every PART_S: what is new  ->   part_step_000012_0_3.parquet
                                    close: the rest, unless
                                    Journal.write follows at once
    Journal.write (the step is complete)                            train_step_000012.parquet,
                                                                    parts removed

A file counts only if the same run wrote it: its note has the hash of the config and of the inputs.
So what cannot be repeated (a tool, a judge) stays what it was. It does not know what a step or its
state mean.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tandem.run_folder.episode_files import (
    episode_file,
    read_episodes,
    read_groups,
    read_note,
    write_episodes,
)
from tandem.runtime import watchdog
from tandem.runtime.disk import disk_errors
from tandem.runtime.errors import UserError
from tandem.types import Episode, Group, Problem

PART_S = 2.0  # seconds after which ended episodes are durable, until the step is complete

Ended = dict[int, Episode]  # by the key of its draws


class Journal:
    """The episodes of one run. run: the hash of all its inputs; problems: those of its data; mesh:
    of the trainer's processes, whose sums depend on it."""

    def __init__(self, folder: Path, run: str, problems: Sequence[Problem], mesh: str = ""):
        self.folder, self.run = folder, run
        self.note = {"run": run, "mesh": mesh} if mesh else {"run": run}
        self.problems: Mapping[str, Problem] = {problem.uid: problem for problem in problems}

    def write(
        self, step: int, groups: Sequence[Group], kind: str = "train", state: Any = None
    ) -> None:
        """Write the groups of a step, durable on return; state: what it leaves to the next, as
        JSON."""
        write_episodes(self.folder, step, groups, kind, note={**self.note, "state": state})
        part = "part" if kind == "train" else "eval_part"
        self._remove(self.folder.glob(f"{part}_step_{step:06d}_*.parquet"))

    def read(self, step: int, kind: str = "train") -> tuple[list[Group], Any] | None:
        """Read (groups, state) of a step; None if this run has not written them."""
        path = episode_file(self.folder, step, kind)
        note = read_note(path)
        if note is None or note["run"] != self.run:
            return None
        return read_groups(path, self.problems), note["state"]

    @contextmanager
    def parts(
        self, step: int, tick: int, problems: Sequence[Problem], last: bool, kind: str = "part"
    ) -> Iterator["Parts"]:
        """Collect the episodes of a step under way; `ended` has those of an earlier start of the
        run. last: the step's own file follows at once. kind: "eval_part" in an evaluation."""
        parts = Parts(self, step, tick, problems, kind)
        complete = False
        try:
            yield parts
            complete = last
        finally:
            parts.close(write_rest=not complete)

    def clean(self) -> None:
        """Remove the leftovers of a kill: half files, and parts of steps that are complete."""
        own = [path for path in self.folder.glob("train_step_*.parquet") if self.is_own(path)]
        complete = {path.stem.rpartition("_")[2] for path in own}
        parts = list(self.folder.glob("part_step_*.parquet"))
        self._remove(path for path in parts if path.stem.split("_")[2] in complete)
        self._remove(self.folder.glob(".tmp-*"))

    def drop_other_meshes(self, done: int, staleness: int) -> None:
        """Remove what another mesh wrote of steps whose weights a resume after step `done` makes
        anew: evaluations after that step, and rollouts by weights after it."""
        for path in self.folder.glob("*_step_*.parquet"):
            kind, _, rest = path.stem.partition("_step_")
            last = done if kind.startswith("eval") else done + 1 + staleness
            if int(rest.partition("_")[0]) > last:
                mesh = self.note.get("mesh", "")
                with suppress(UserError):  # a damaged file
                    mesh = (read_note(path) or {}).get("mesh", "")
                if mesh != self.note.get("mesh", ""):
                    self._remove(iter([path]))

    def is_own(self, path: Path) -> bool:
        """Tell whether this run wrote a file."""
        with suppress(UserError):  # a damaged file
            return bool((read_note(path) or {}).get("run") == self.run)
        return False

    def _remove(self, paths: Iterator[Path]) -> None:
        with disk_errors(self.folder):
            for path in list(paths):
                path.unlink()


class Parts:
    """A part of a step's episodes, added from any thread and made durable by one. `close` raises an
    error of the disk."""

    def __init__(
        self, journal: Journal, step: int, tick: int, problems: Sequence[Problem], kind: str
    ):
        self._kind = kind
        self._journal, self._step, self._tick, self._problems = journal, step, tick, problems
        self._new: list[tuple[int, Episode]] = []
        self._lock, self._over, self._error = threading.Lock(), threading.Event(), list[Exception]()
        self._rest = False  # whether the rest is written at the end
        self.ended, self._count = self._read()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def add(self, row: int, episode: Episode) -> None:
        if episode.reward_error or episode.env_error:
            return  # the next start tries it again
        with self._lock:
            self._new.append((row, episode))

    def close(self, write_rest: bool) -> None:
        self._rest = write_rest
        self._over.set()
        with watchdog.waiting_for("journal", "a part of the step's episodes"):
            self._thread.join()
        if self._error:
            raise self._error[0]

    def _run(self) -> None:
        try:
            while not self._over.wait(PART_S):
                self._write()
            if self._rest:
                self._write()
        except Exception as error:  # `close` raises it
            self._error.append(error)

    def _write(self) -> None:
        with self._lock:
            new, self._new = self._new, []
        if not new:
            return
        groups = [
            Group(problem=problem, episodes=tuple(e for place, e in new if place == row))
            for row, problem in enumerate(self._problems)
        ]
        note, part = self._journal.note, f"_{self._tick}_{self._count}"
        write_episodes(self._journal.folder, self._step, groups, self._kind, note=note, part=part)
        self._count += 1

    def _read(self) -> tuple[Ended, int]:
        """Read the episodes that ended in this tick in earlier starts; return them and the number
        of the next part."""
        ended: Ended = {}
        paths = self._journal.folder.glob(
            f"{self._kind}_step_{self._step:06d}_{self._tick}_*.parquet"
        )
        parts = {int(path.stem.rpartition("_")[2]): path for path in paths}
        for _, path in sorted(parts.items()):
            with suppress(UserError):  # a damaged one: its episodes are played again
                if self._journal.is_own(path):
                    ended |= {episode.key: episode for episode in read_episodes(path)}
        return ended, max(parts, default=-1) + 1
