"""Pairs for `tandem dpo` and `tandem rm` out of what a model said: the first right and the first
wrong answer of every problem that has both.

    tandem rollout my.toml --out rollouts.jsonl
    python examples/pairs.py rollouts.jsonl pairs.jsonl
"""

import json
import sys
from pathlib import Path

source, target = map(Path, sys.argv[1:])
problems: dict[str, dict] = {}
for row in map(json.loads, source.read_text(encoding="utf-8").splitlines()):
    pair = problems.setdefault(row["uid"], {"prompt": row["messages"]})
    pair.setdefault("chosen" if row["reward"] == 1 else "rejected", row["text"])
pairs = [pair for pair in problems.values() if len(pair) == 3]
target.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
print(f"{len(pairs)} pairs of {len(problems)} problems -> {target}")
