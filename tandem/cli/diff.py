"""`tandem diff`: the first difference of two runs."""

from pathlib import Path

from tandem.audit.diff import Comparison, compare_runs
from tandem.cli.progress import print_lines
from tandem.run_folder.past_run import open_past


def diff(a: Path, b: Path) -> int:
    """Print where two runs differ; returns the exit code, 0 where all steps that both have are
    equal."""
    found = compare_runs(open_past(a), open_past(b))
    print_lines(lines(found, str(a), str(b)))
    return int(found.divergence is not None or bool(found.altered))


def lines(found: Comparison, a: str, b: str) -> list[str]:
    """Describe a comparison of the run folders a and b."""
    text = [f"A {a}: step {found.last[0]}    B {b}: step {found.last[1]}"]
    for title, differing in (("config", found.config), ("input", found.inputs)):
        text += [f"  {title} {one.what}: A {one.a}, B {one.b}" for one in differing]
    if found.other_bytes:
        text.append(
            f"  note: journal files of {len(found.other_bytes)} steps hold equal episodes "
            "in different bytes"
        )
    text += [f"{name} is not as it was written: {one}" for name, one in found.altered]
    if found.divergence is not None:
        place = f"at step {found.step}" if found.step else "before the first step"
        text.append(f"they part {place}: {found.divergence.what}")
        return [*text, f"    A  {found.divergence.a}", f"    B  {found.divergence.b}"]
    if found.altered:
        verdict = f"NOT known to be equal over {found.steps} steps: "
        return [*text, verdict + "restore what is not as it was written"]
    longer = "" if found.last[0] == found.last[1] else ", all that both have"
    return [*text, f"equal to the last bit over {found.steps} steps{longer}"]
