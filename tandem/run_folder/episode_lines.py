"""Episodes of a file of the journal as lines of JSON."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

from tandem.run_folder.episode_files import JSON, MAPS, read_table


def json_lines(path: Path) -> Iterator[bytes]:
    """Yield each episode of a file as a line of JSONL with the same columns; chats, metadata and
    maps are objects, not text. Raises UserError for a damaged file.

    A float32 is written as the double of its value, and a value without a JSON number (NaN,
    infinities) as null.
    """
    for row in read_table(path).to_pylist():
        logprobs = [value if math.isfinite(value) else None for value in row["engine_logprobs"]]
        plain = {
            **row,
            **{name: json.loads(row[name]) for name in JSON},
            **{name: dict(row[name]) for name in MAPS},
            "engine_logprobs": logprobs,
        }
        yield json.dumps(plain, ensure_ascii=False, allow_nan=False).encode() + b"\n"
