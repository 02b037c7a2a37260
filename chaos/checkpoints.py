"""Chaos around the files of a checkpoint: a save killed at every operation, damaged checkpoints,
disks that refuse.

Right is: the next start finds the checkpoint before or the new one, to the bit, and the next save
goes through.
"""

import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from chaos.calls import deaths_at_calls
from chaos.results import Case, Result, tally
from tandem.run_folder.checkpoint import (
    Contents,
    Saver,
    Tensors,
    find_damage,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from tandem.runtime.disk import DISK, Disk
from tandem.runtime.errors import UserError
from tandem.weights.hashing import weight_hash
from tests.support.faults import (
    DIED,
    MODES,
    DyingDisk,
    FaultyDisk,
    RefusingDisk,
    in_a_fork,
    limit_file_size,
    make_read_only,
    memory_folder,
    small_disk,
)

PAGE = 4096
DAMAGES = 1000
KINDS = (
    "truncate",
    "flip a bit",
    "zero a page",
    "delete",
    "empty",
    "append",
    "swap two files",
    "swap with another checkpoint",
    "damage the manifest",
)
NUMBERS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO)

Save = Callable[[Path, int, Disk], object]  # folder, step, disk

# The checkpoints in the folder before step 30 is saved with keep=2: step and run of each.
SCENARIOS: dict[str, tuple[tuple[int, int], ...]] = {
    "the first save": (),
    "a later save": ((10, 0),),
    "a save that prunes": ((10, 0), (20, 0)),
    "a damaged step saved again": ((20, 0), (30, 1)),
    "the only step saved again": ((30, 1),),
}
DAMAGED = "a damaged step saved again"  # its newest one, before which the run has resumed
ONLY = "the only step saved again"  # with the metrics of the evaluation that a stop has cut short


EACH_WAY = "killed before and midway in each operation, and with the power gone"


def section() -> list[Result]:
    with memory_folder() as folder:

        def each_way(name: str, save: Save) -> Iterator[Case]:
            return chain.from_iterable(kills(folder, name, mode, save) for mode in MODES)

        pairs = chain.from_iterable(kill_pairs(folder, mode) for mode in MODES)
        results = [
            tally(f"{name}, {EACH_WAY}", each_way(name, at_once), at_least=33) for name in SCENARIOS
        ]
        results += [
            tally(
                f"a save beside training, {EACH_WAY}",
                each_way("a save that prunes", beside),
                at_least=39,
            ),
            tally(
                "a killed save, and the one after it killed too, at each pair of operations",
                pairs,
                at_least=400,
            ),
            tally(
                "a save that prunes, kill -9 at each of its system calls",
                calls(folder, "a save that prunes"),
                100,
            ),
            tally(f"{ONLY}, kill -9 at each call", calls(folder, ONLY), 100),
            tally(
                "a damaged checkpoint: each found, and the one before taken",
                damages(folder, DAMAGES),
                DAMAGES,
            ),
        ]
        for suffix, save in (("", at_once), (" beside training", beside)):
            results += [
                tally(
                    f"a save{suffix}, an error of the disk at each operation",
                    refusals(folder, save),
                    at_least=60,
                ),
                tally(
                    f"a save{suffix}, the disk full after each page",
                    full_disks(folder, save),
                    at_least=8,
                ),
                tally(
                    f"a save{suffix}, the disk read-only from each operation on",
                    frozen_disks(folder, save),
                    at_least=8,
                ),
            ]
    return results


# ---- what is saved


def contents(step: int, tensors: Tensors, state: dict[str, Any], **more: Any) -> Contents:
    return Contents(step=step, tensors=tensors, state=state, config="[run]\n", **more)


def content(step: int, run: int = 0) -> tuple[Tensors, dict[str, Any]]:
    """Make weights of four pages, with other values for each step and run."""
    generator = torch.Generator().manual_seed(1000 * run + step)
    weight, moment = torch.randn(2, 64, 64, generator=generator)
    policy = {"a.weight": weight, "b": torch.randn(5, generator=generator).bfloat16()}
    return {
        "policy": policy,
        "optimizer": {"a.weight.exp_avg": moment, "steps": torch.tensor(step)},
    }, {"step": step, "run": run, "cursor": [step, 0.1], "note": "é"}


def at_once(folder: Path, step: int, disk: Disk = DISK, *, run: int = 0, keep: int = 2) -> Path:
    return save_checkpoint(folder, contents(step, *content(step, run), keep=keep), disk)


def beside(folder: Path, step: int, disk: Disk = DISK) -> None:
    """Save through the Saver, and change the tensors at once."""
    with Saver(disk) as saver:
        tensors, state = content(step)
        saver.save(folder, contents(step, tensors, state))
        tensors["policy"]["a.weight"].zero_()
        state["step"] = -1


def what_is(path: Path | None) -> tuple[object, ...] | None:
    """Read all that a checkpoint holds, for a comparison."""
    if path is None:
        return None
    tensors, state = load_checkpoint(path)
    return tuple(
        sorted((stem, weight_hash(named.items())) for stem, named in tensors.items())
    ), str(sorted(state.items()))


def made(folder: Path, scenario: str) -> Path:
    """Make the folder of a scenario, before the save that is struck."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for step, run in SCENARIOS[scenario]:
        at_once(folder, step, run=run)
    if scenario == DAMAGED:
        (folder / "step_000030" / "state.json").unlink()
    return folder


def newest(folder: Path) -> tuple[object, ...] | None:
    return what_is(latest_checkpoint(folder, lambda _: None))


def torn(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step_*") if find_damage(path))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Before:
    """The folder of a scenario, its newest checkpoint, and the one that the save adds."""

    def __init__(self, place: Path, scenario: str):
        self.made, self.folder = made(place / "made", scenario), place / "checkpoints"
        self.old, self.torn = newest(self.made), torn(self.made)
        at_once(place / "after", 30)
        self.new = newest(place / "after")
        self.again()

    def again(self) -> Path:
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.made, self.folder)
        return self.folder

    def wrong(self, what: str) -> str:
        """Describe what is wrong with the folder after a fault and after the next save, or ""."""
        try:
            if newest(self.folder) not in (self.old, self.new):
                return f"{what}: neither the checkpoint before nor the new one"
            if torn(self.folder) not in ([], self.torn):
                return f"{what}: {torn(self.folder)} under a real name, and not whole"
            at_once(self.folder, 30)
            if newest(self.folder) != self.new or torn(self.folder):
                return f"{what}: the next save is not what is found"
        except (AssertionError, UserError) as error:
            return f"{what}: {error}"
        odd = [name for name in names(self.folder) if not name.startswith("step_")]
        return f"{what}: {odd} left behind" if odd else ""


# ---- killed


def deaths(action: Callable[[Disk], object], mode: str) -> Iterator[int]:
    """Run action again and again, dying one operation later each time, until it ends; the caller
    resets between."""
    n = 0
    while (code := in_a_fork(partial(action, DyingDisk(n, mode)))) == DIED:
        yield n
        n += 1
    assert code == 0


def kills(place: Path, scenario: str, mode: str, save: Save) -> Iterator[Case]:
    before = Before(place, scenario)
    for n in deaths(lambda disk: save(before.folder, 30, disk), mode):
        yield True, before.wrong(f"{scenario}, {mode}, operation {n}")
        before.again()


def kill_pairs(place: Path, mode: str) -> Iterator[Case]:
    """Kill the save that follows a killed one too; it starts by tidying up."""
    before = Before(place, ONLY)
    for first in deaths(lambda disk: at_once(before.folder, 30, disk), mode):
        left = place / "left"
        shutil.rmtree(left, ignore_errors=True)
        shutil.copytree(before.folder, left)
        for second in deaths(lambda disk: at_once(before.folder, 30, disk), mode):
            yield True, before.wrong(f"{mode}, operation {first} and then {second}")
            shutil.rmtree(before.folder)
            shutil.copytree(left, before.folder)
        before.again()


def calls(place: Path, scenario: str, every: int = 1) -> Iterator[Case]:
    """Kill a save at the entry of each of its system calls."""
    before = Before(place, scenario)
    for n in deaths_at_calls(lambda: at_once(before.folder, 30), every):
        yield True, before.wrong(f"{scenario}, system call {n}")
        before.again()


# ---- damaged


def damages(place: Path, count: int) -> Iterator[Case]:
    """Damage the newest of three checkpoints, in each way in turn; a swap hurts the second too."""
    rng, sound, folder = random.Random(0), place / "sound", place / "damaged"
    for step in (10, 20, 30):
        at_once(sound, step, keep=3)
    for number in range(count):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(sound, folder)
        before = bytes_of(folder)
        kind = KINDS[number % len(KINDS)]
        hurt = damage(rng, kind, folder / "step_000030", folder / "step_000020")
        changed = {name for name, data in before.items() if bytes_of(folder).get(name) != data}
        yield (
            bool(changed) and changed == hurt,
            missed(folder, changed, f"{kind} of {sorted(hurt)} (case {number})"),
        )


def damage(rng: random.Random, kind: str, checkpoint: Path, other: Path) -> set[str]:
    """Damage a random file; returns the files changed, e.g. {"step_000030/state.json"}."""
    files = sorted(path.name for path in checkpoint.iterdir())
    file = checkpoint / ("manifest.json" if kind == "damage the manifest" else rng.choice(files))
    match kind:
        case "swap two files":
            swap(
                file,
                partner := checkpoint / rng.choice([name for name in files if name != file.name]),
            )
            return {f"{checkpoint.name}/{file.name}", f"{checkpoint.name}/{partner.name}"}
        case "swap with another checkpoint":
            swap(file, other / file.name)
            return {f"{checkpoint.name}/{file.name}", f"{other.name}/{file.name}"}
        case "delete":
            file.unlink()
        case "damage the manifest":
            file.write_bytes(
                altered(rng, rng.choice(("truncate", "flip a bit", "zero a page", "append")), file)
            )
        case _:
            file.write_bytes(altered(rng, kind, file))
    return {f"{checkpoint.name}/{file.name}"}


def altered(rng: random.Random, kind: str, file: Path) -> bytes:
    data = bytearray(file.read_bytes())
    place = rng.randrange(len(data))
    match kind:
        case "truncate":
            del data[place:]
        case "flip a bit":
            data[place] ^= 1 << rng.randrange(8)
        case "zero a page":
            start = place - place % PAGE
            data[start : start + PAGE] = bytes(len(data[start : start + PAGE]))
        case "empty":
            data.clear()
        case "append":
            data += rng.randbytes(rng.randrange(1, 100))
    return bytes(data)


def swap(first: Path, second: Path) -> None:
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.glob("*/*")}


def missed(folder: Path, hurt: set[str], what: str) -> str:
    """Check that just the changed files are named and the newest undamaged checkpoint is taken."""
    for path in folder.iterdir():
        files = {name.partition("/")[2] for name in hurt if name.startswith(f"{path.name}/")}
        if "manifest.json" in files:
            files = {"manifest.json"}  # without it nothing is known of the others
        if {line.partition(":")[0] for line in find_damage(path)} != files:
            return f"{what}: found {find_damage(path)}"
    reports: list[str] = []
    taken = latest_checkpoint(folder, reports.append)
    damaged = {name.partition("/")[0] for name in hurt}
    told = all(
        any(name in line and "found" in line and "expected" in line for line in reports)
        for name in damaged
    )
    expected = max(name for name in names(folder) if name not in damaged)
    good = taken is not None and taken.name == expected and what_is(taken) is not None and told
    return "" if good else f"{what}: took {taken}, reported {reports}"


# ---- refused


def refused(
    before: Before, save: Save, disk: Disk, words: tuple[str, ...], what: str
) -> tuple[str | None, str]:
    """Return (`found` of the save's error or None, what is wrong)."""
    found = None
    try:
        save(before.folder, 30, disk)
    except UserError as error:
        found = error.found
        if error.what not in words or not error.where or not error.next:
            return found, f"{what}: an unclear error: {error}"
    expected = (before.new,) if found is None else (before.old, before.new)
    try:
        return found, "" if newest(
            before.folder
        ) in expected else f"{what}: neither the one before nor the new one"
    except (AssertionError, UserError) as error:
        return found, f"{what}: {error}"


def refusals(place: Path, save: Save) -> Iterator[Case]:
    """Refuse each operation, and all after it, with each error number."""
    words = ("the disk is full", "the disk refuses to be written", "the disk fails")
    for number in NUMBERS:
        before, n, struck = Before(place, ONLY), 0, True
        while struck:
            disk = RefusingDisk(n, number)
            found, wrong = refused(before, save, disk, words, f"errno {number} at operation {n}")
            struck = disk.struck
            if struck:
                yield (
                    found is not None,
                    wrong or before.wrong(f"after errno {number} at operation {n}"),
                )
            before.again()
            n += 1


def full_disks(place: Path, save: Save) -> Iterator[Case]:
    """Fill a real small disk, with one more free page each time, until the save goes through."""
    with small_disk(place / "full", "2m") as mounted:
        if not mounted:
            yield from limits(place, save)
            return
        before, ballast, pages, found = (
            Before(place / "full", ONLY),
            place / "full/ballast",
            0,
            "",
        )
        while found is not None:
            ballast.write_bytes(bytes(shutil.disk_usage(place / "full").free - pages * PAGE))
            found, wrong = refused(before, save, DISK, ("the disk is full",), f"{pages} pages free")
            ballast.unlink()
            if found is not None:
                yield "No space left" in found, wrong or before.wrong(f"after {pages} pages free")
            before.again()
            pages += 1


def limits(place: Path, save: Save) -> Iterator[Case]:
    """Limit the size of files instead, where no disk may be mounted."""
    before = Before(place, ONLY)
    for size in range(0, 4 * PAGE, PAGE // 2):

        def limited(size: int = size) -> None:
            limit_file_size(size)
            found, wrong = refused(
                before, save, DISK, ("the disk is full",), f"files of {size} bytes"
            )
            assert found and "File too large" in found and not wrong, wrong

        yield in_a_fork(limited) == 0, before.wrong(f"after files of {size} bytes")
        before.again()


class FreezingDisk(FaultyDisk):
    """A disk that calls freeze before operation n."""

    def __init__(self, n: int, freeze: Callable[[], object]):
        super().__init__(n)
        self.freeze = freeze

    def strike(self, part: Callable[[], None]) -> None:
        self.freeze()


def frozen_disks(place: Path, save: Save) -> Iterator[Case]:
    """Turn a real file system read-only before operation n; the folder, if none may be mounted."""
    mount = place / "frozen"
    with small_disk(mount, "2m") as mounted:
        before, n, struck = Before(mount, ONLY), 0, True
        freeze = partial(make_read_only, mount) if mounted else partial(before.folder.chmod, 0o555)
        thaw = (
            partial(make_read_only, mount, undo=True)
            if mounted
            else partial(before.folder.chmod, 0o755)
        )
        while struck:
            disk = FreezingDisk(n, freeze)
            _, wrong = refused(
                before,
                save,
                disk,
                ("the disk refuses to be written",),
                f"read-only at operation {n}",
            )
            struck, fired = disk.struck, not os.access(before.folder, os.W_OK)
            thaw()
            if struck:
                yield fired, wrong or before.wrong(f"after read-only at operation {n}")
            before.again()
            n += 1
