"""The reward `answer` beside other graders, on 300 pairs graded by hand; writes results/graders.json
and results/graders.md.

    python benchmarks/graders.py                 # Tandem, Math-Verify, TRL's accuracy_reward; a minute
    python benchmarks/graders.py --verl DIR      # also verl's, from its unpacked wheel; pylatexenc in DIR/extra

Every grader gets the answer in the form that it looks for: those that read boxes have an `Answer:`
put in a box, and math_dapo has a box written behind `Answer:`. A grader that raises has refused the
answer.
"""

import argparse
import importlib
import json
import sys
import tomllib
import types
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import machine  # noqa: E402

from tandem.plugins.graders import answer  # noqa: E402

PAIRS = [
    ROOT / "tests/plugins/graders" / name
    for name in ("graded_answers.toml", "graded_answers_2.toml")
]
RESULTS, DOCUMENT = ROOT / "results" / "graders.json", ROOT / "results" / "graders.md"
FALSE_POSITIVES, FALSE_NEGATIVES = 3, 20  # most that Tandem may have


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--verl", help="a folder that holds the package verl")
    parser.add_argument("--show", action="store_true", help="print Tandem's mistakes")
    args = parser.parse_args()
    sets = [tomllib.loads(file.read_text())["pair"] for file in PAIRS]
    graders = {"Tandem `answer`": answer.score, **peers(), **(verl(args.verl) if args.verl else {})}
    rows = [
        {
            "grader": name,
            "sets": [
                mistakes(grade, pairs, args.show and name.startswith("Tandem")) for pairs in sets
            ],
        }
        for name, grade in graders.items()
    ]
    figures = {
        "machine": machine.describe(),
        "date": str(date.today()),
        "pairs": [len(pairs) for pairs in sets],
    }
    RESULTS.write_text(json.dumps({**figures, "graders": rows}, indent=1) + "\n")
    text = table(rows)
    DOCUMENT.write_text(HEAD + text)
    print(text)
    ours = rows[0]["sets"][0]
    if ours["paid_wrong"] > FALSE_POSITIVES or ours["refused_right"] > FALSE_NEGATIVES:
        sys.exit(
            f"error: missed: at most {FALSE_POSITIVES} wrong answers paid and {FALSE_NEGATIVES} right ones refused"
        )


HEAD = """# The verifier `answer` beside other graders

Written by `python benchmarks/graders.py`: pairs of a ground truth and the end of a completion in 20 kinds, graded by hand and
without a look at the code (tests/plugins/graders/graded_answers.toml, 300 pairs; graded_answers_2.toml, 100). Each grader gets
the answer in the form that it looks for.

- First set: Tandem's mistakes were fixed, so its row is not a blind figure.
- Second set: Tandem first accepted 1 wrong answer and rejected 7 right ones. Only the wrong acceptance was fixed.

"""


def mistakes(grade, pairs, show):
    paid, refused = 0, 0
    for pair in pairs:
        try:
            right = grade(pair["completion"], pair["truth"]) > 0
        except Exception:  # a grader of somebody else's
            right = False
        paid += right and not pair["right"]
        refused += pair["right"] and not right
        if show and right != pair["right"]:
            print(
                "paid" if right else "refused",
                pair["kind"],
                repr(pair["truth"]),
                repr(pair["completion"]),
                sep="  ",
            )
    return {"paid_wrong": paid, "refused_right": refused}


def boxed(completion):
    """The completion with its final answer in a box, where it stands behind `Answer:`."""
    final = answer.extract(completion)
    if "\\boxed" in completion or final is None:
        return completion
    before, _, _ = completion.rpartition(final)
    return f"{before}$\\boxed{{{final.strip(' $.*')}}}$."


def peers():
    import math_verify
    from trl.rewards import accuracy_reward

    def verify(completion, truth):
        return math_verify.verify(
            math_verify.parse(f"${truth}$"), math_verify.parse(boxed(completion))
        )

    def trl(completion, truth):
        return accuracy_reward([[{"content": boxed(completion)}]], [f"${truth}$"])[0] or 0.0

    return {"Math-Verify 0.9": verify, "TRL 1.16 `accuracy_reward`": trl}


def verl(folder):
    """The graders of verl without what the rest of the package imports."""
    for name in ("verl", "verl.utils", "verl.utils.reward_score"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(Path(folder, *name.split(".")))]
    sys.path.append(str(Path(folder, "extra")))
    math_reward, math_dapo, prime = (
        importlib.import_module(f"verl.utils.reward_score.{name}")
        for name in ("math_reward", "math_dapo", "prime_math")
    )
    return {
        "verl 0.9.1 `math_reward`": lambda completion, truth: math_reward.compute_score(
            boxed(completion), truth
        ),
        "verl 0.9.1 `math_dapo`": lambda completion, truth: math_dapo.compute_score(
            f"Answer: {answer.extract(completion) or ''}", truth
        )["acc"],
        "verl 0.9.1 `prime_math`": lambda completion, truth: prime.compute_score(
            boxed(completion), truth
        )[0],
    }


def table(rows):
    lines = [
        "| grader | wrong answers paid, of 150 | right ones refused, of 150 | second set: paid, of 50 | refused, of 50 |"
    ]
    lines.append("|---|---|---|---|---|")
    for row in rows:
        counts = [
            str(found[name]) for found in row["sets"] for name in ("paid_wrong", "refused_right")
        ]
        lines.append(f"| {row['grader']} | {' | '.join(counts)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
