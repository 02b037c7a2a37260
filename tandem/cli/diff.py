"""`tandem diff`: the first difference of two runs."""

from pathlib import Path

from tandem.cli.progress import print_lines
from tandem.run_folder.diff import Comparison, compare_runs
from tandem.run_folder.read import open_past
from tandem.runtime.wording import counted


def diff(a: Path, b: Path) -> int:
    """Print where two runs differ and return the exit code, 0 if all their common steps are
    equal."""
    comparison = compare_runs(open_past(a), open_past(b))
    print_lines(lines(comparison, str(a), str(b)))
    return int(comparison.divergence is not None or bool(comparison.altered))


def lines(comparison: Comparison, a: str, b: str) -> list[str]:
    """Describe a comparison of the run folders a and b."""
    text = [f"A {a}: step {comparison.last[0]}    B {b}: step {comparison.last[1]}"]
    for title, differences in (("config", comparison.config), ("input", comparison.inputs)):
        text += [f"  {title} {one.what}: A {one.a}, B {one.b}" for one in differences]
    if comparison.other_bytes:
        text.append(
            f"  note: journal files of {len(comparison.other_bytes)} steps hold equal episodes "
            "in different bytes"
        )
    text += [f"{name} is not as it was written: {one}" for name, one in comparison.altered]
    if comparison.divergence is not None:
        place = f"at step {comparison.step}" if comparison.step else "before the first step"
        text.append(f"they part {place}: {comparison.divergence.what}")
        return [*text, f"    A  {comparison.divergence.a}", f"    B  {comparison.divergence.b}"]
    if comparison.altered:
        doubt = f"NOT known to be equal over {counted(comparison.steps, 'steps')}: "
        return [*text, doubt + "restore what is not as it was written"]
    longer = "" if comparison.last[0] == comparison.last[1] else ", all that both have"
    return [*text, f"equal to the last bit over {counted(comparison.steps, 'steps')}{longer}"]
