"""`tandem diff`: where two runs part."""

from pathlib import Path

from tandem.audit.diff import Comparison, Parting, compare
from tandem.cli.progress import console
from tandem.run_folder.past_run import open_past


def diff(a: Path, b: Path) -> int:
    """Print where they part; returns the exit code, 0 where all steps that both have are equal."""
    found = compare(open_past(a), open_past(b))
    for line in lines(found, str(a), str(b)):
        console.print(line, markup=False)
    return int(found.parted is not None or bool(found.altered))


def lines(found: Comparison, a: str, b: str) -> list[str]:
    """What a person reads."""
    told = [f"A {a}: step {found.last[0]}    B {b}: step {found.last[1]}"]
    for title, partings in (("config", found.config), ("input", found.inputs)):
        told += [f"  {title} {parting.what}: A {parting.a}, B {parting.b}" for parting in partings]
    if found.other_bytes:
        told.append(
            f"  note: journal files of {len(found.other_bytes)} steps hold equal episodes in different bytes"
        )
    told += [f"{name} is not as it was written: {one}" for name, one in found.altered]
    if found.parted is None and found.altered:
        return [
            *told,
            f"NOT known to be equal over {found.steps} steps: restore what is not as it was written",
        ]
    if found.parted is None:
        longer = "" if found.last[0] == found.last[1] else ", all that both have"
        return [*told, f"equal to the last bit over {found.steps} steps{longer}"]
    return [*told, *_parting(found.parted, found.step)]


def _parting(parted: Parting, step: int) -> list[str]:
    place = f"at step {step}" if step else "before the first step"
    return [f"they part {place}: {parted.what}", f"    A  {parted.a}", f"    B  {parted.b}"]
