"""Prints the runs and the rows of .wandb files as JSON, a file a line.

A program of its own, as importing wandb makes folders that only the end of the process removes.

    python tests/support/read_wandb.py FILE...
"""

import json
import struct
import sys
from pathlib import Path

from wandb.proto.wandb_internal_pb2 import Record


def records(path):
    """The records of a file: a log as LevelDB writes it, after a header of 7 bytes."""
    data, place, record = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if (left := -place % 32768) < 7 and left:  # no record begins so near a block's end
            place += left
            continue
        size, kind = struct.unpack_from("<HB", data, place + 4)
        record += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(record)
            record = b""


def read(path):
    """The run's id, its name, its config and its rows."""
    run, shown, config, rows = "", "", {}, []
    for record in records(path):
        items = record.history.item
        if items:
            names = ["/".join(item.nested_key) or item.key for item in items]
            values = [json.loads(item.value_json) for item in items]
            rows.append(dict(zip(names, values, strict=True)))
        if record.HasField("run"):
            run, shown = record.run.run_id, record.run.display_name
            config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
    return run, shown, config, rows


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(json.dumps(read(Path(name))))
