"""Data files for tests."""

from pathlib import Path

from tandem.plugins.tasks import algebra
from tandem.runtime.disk import write_rows


def write_algebra(folder: Path, num_train: int, num_test: int, num_warm: int) -> None:
    """Write easy problems, train.jsonl and test.jsonl, and chats to begin with, warm.jsonl."""
    write_rows(folder / "train.jsonl", algebra.rows("train", num_train, seed=0, difficulty=1))
    write_rows(folder / "test.jsonl", algebra.rows("test", num_test, seed=0, difficulty=1))
    chats = algebra.warm_start(num_warm, seed=0, difficulty=1, careless=0.0)
    write_rows(folder / "warm.jsonl", chats)
