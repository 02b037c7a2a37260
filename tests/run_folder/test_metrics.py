"""Metrics: rows that a resumed and an uninterrupted run write alike."""

import math
import shutil

import pytest

from tandem.run_folder.metrics import MetricsWriter, read_metrics
from tandem.runtime.errors import UserError
from tests.support.faults import in_a_fork, limit_file_size, memory_folder


def numbers(step):
    return {
        "reward": 1 / (step + 3),
        "episodes": 8 * step,
        "eval": {"sampled": 0.1 * step, "greedy": None},
    }


def write(folder, steps, resume_step):
    with MetricsWriter(folder, resume_step) as writer:
        for step in steps:
            writer.write(step, numbers(step), {"step_s": 0.5})


def rows_of(folder, name="metrics.jsonl"):
    return (folder / name).read_bytes()


def tensorboard(folder, tag):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {event.step: event.value for event in events.Scalars(tag)}


def test_rows_are_read_back_as_written(tmp_path):
    write(tmp_path, range(1, 4), 0)
    assert read_metrics(tmp_path) == [{"step": step, **numbers(step)} for step in (1, 2, 3)]
    times = [{"step": step, "step_s": 0.5} for step in (1, 2, 3)]
    assert read_metrics(tmp_path, "timings.jsonl") == times


def test_metrics_cut_anywhere_are_resumed_to_the_same_bytes():
    with memory_folder() as folder:
        whole, work = folder / "whole", folder / "work"
        whole.mkdir()
        write(whole, range(7), -1)
        wanted = rows_of(whole)
        ends = [place for place, byte in enumerate(wanted) if byte == ord("\n")]
        beside = [end + by for end in ends for by in (-1, 0, 1)]
        for length in sorted({0, 5, len(wanted), *beside}):
            complete_steps = wanted[:length].count(b"\n")
            for resume_step in {-1, min(2, complete_steps - 1), complete_steps - 1}:
                work.mkdir()
                for name in ("metrics.jsonl", "timings.jsonl"):
                    (work / name).write_bytes(wanted[:length])
                write(work, [], resume_step)
                kept = wanted.splitlines(keepends=True)[: resume_step + 1]
                assert rows_of(work) == b"".join(kept)
                write(work, range(resume_step + 1, 7), resume_step)
                assert rows_of(work) == wanted, (length, resume_step)
                shutil.rmtree(work)


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path):
    write(tmp_path, range(6), -1)
    with MetricsWriter(tmp_path, 2) as writer:
        for step in (3, 4):
            writer.write(step, {"reward": 10.0 + step}, {"step_s": 0.25})
    seen = tensorboard(tmp_path, "reward")
    assert seen == pytest.approx({0: 1 / 3, 1: 1 / 4, 2: 1 / 5, 3: 13.0, 4: 14.0})
    assert tensorboard(tmp_path, "eval/sampled")[2] == pytest.approx(0.2)
    assert tensorboard(tmp_path, "timings/step_s")[4] == 0.25


def test_a_number_that_is_not_finite_is_null_and_named(tmp_path):
    with MetricsWriter(tmp_path, 0) as writer:
        writer.write(1, {"loss": math.nan, "eval": {"a": -math.inf, "b": 1.0}}, {"step_s": 1.0})
    assert read_metrics(tmp_path)[0] == {
        "step": 1,
        "loss": None,
        "eval": {"a": None, "b": 1.0},
        "non_finite": {"loss": "nan", "eval.a": "-inf"},
    }
    assert b"NaN" not in rows_of(tmp_path)
    assert math.isnan(tensorboard(tmp_path, "loss")[1])


def test_a_missing_row_is_an_error_and_not_a_gap(tmp_path):
    write(tmp_path, range(3), -1)
    with pytest.raises(UserError, match="end before the checkpoint") as caught:
        MetricsWriter(tmp_path, 5)
    assert "step 2" in caught.value.found
    assert "step 5" in caught.value.expected
    assert caught.value.next
    assert len(read_metrics(tmp_path)) == 3
    # step 2 lost its end: not a row to go on after
    (tmp_path / "metrics.jsonl").write_bytes(rows_of(tmp_path)[:-1])
    with pytest.raises(UserError, match="end before the checkpoint"):
        MetricsWriter(tmp_path, 2)


def test_a_broken_row_is_named_by_its_line(tmp_path):
    write(tmp_path, range(3), -1)
    lines = rows_of(tmp_path).splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_bytes(lines[0] + b"{oops\n" + lines[2])
    with pytest.raises(UserError, match="cannot be read") as caught:
        MetricsWriter(tmp_path, 2)
    assert caught.value.where.endswith("metrics.jsonl:2") and "oops" in caught.value.found


def test_full_disk_is_an_error_and_the_torn_row_is_dropped(tmp_path):
    def limited_write():
        with MetricsWriter(tmp_path, 2) as writer:
            limit_file_size((tmp_path / "metrics.jsonl").stat().st_size + 5)
            with pytest.raises(UserError, match="the disk is full") as caught:
                writer.write(3, numbers(3), {"step_s": 0.5})
        assert caught.value.where == str(tmp_path / "metrics.jsonl")

    write(tmp_path, range(3), -1)
    before = rows_of(tmp_path)
    assert in_a_fork(limited_write) == 0
    assert rows_of(tmp_path) == before + b'{"ste'
    write(tmp_path, [3], 2)
    assert rows_of(tmp_path).startswith(before) and len(read_metrics(tmp_path)) == 4
