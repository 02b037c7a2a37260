"""The small setting of the step benchmark: TRL's tiny model shape (1.06M parameters) and one-line
equations."""

import json
import sys
from pathlib import Path

from tandem.model.tiny import make_tiny
from tandem.runtime.rng import permutation

folder = Path(sys.argv[1])
make_tiny(folder, hidden=128, layers=4, heads=4, kv_heads=4, intermediate=512)
triples = [
    (int(n) // 180 + 1, int(n) // 20 % 9 + 1, int(n) % 20)
    for n in permutation(1620, "benchmark")[:1024]
]
rows = [{"prompt": f"solve {a}x+{b}={a * x + b}, x?", "answer": str(x)} for a, x, b in triples]
(folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
