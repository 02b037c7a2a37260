"""Data files for tests."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tandem.config.schema import Data
from tandem.data.problems import read_problems
from tandem.plugins.tasks import algebra
from tandem.runtime.disk import write_rows
from tandem.runtime.errors import UserError


def write_algebra(folder: Path, num_train: int, num_test: int, num_warm: int) -> None:
    """Write easy problems, train.jsonl and test.jsonl, and chats to begin with, warm.jsonl."""
    write_rows(folder / "train.jsonl", algebra.rows("train", num_train, seed=0, difficulty=1))
    write_rows(folder / "test.jsonl", algebra.rows("test", num_test, seed=0, difficulty=1))
    chats = algebra.warm_start(num_warm, seed=0, difficulty=1, careless=0.0)
    write_rows(folder / "warm.jsonl", chats)


def jsonl(path, *rows):
    """A file of rows, or of lines as they are; its name."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


def parquet(path, *rows):
    names = {name: None for row in rows for name in row}
    pq.write_table(pa.table({name: [row.get(name) for row in rows] for name in names}), path)
    return str(path)


def read(path, **columns):
    return read_problems(str(path), Data(**columns), key="data.train")


def error_of(path, **columns):
    with pytest.raises(UserError) as caught:
        read(path, **columns)
    return str(caught.value)
