"""Checkpoints that several processes write: read whole and by parts of other divisions, damaged,
incomplete, and on a full disk."""

import errno

import pytest
import torch
from safetensors.torch import save_file

from chaos.checkpoints import contents
from tandem.model.boxes import Box, whole_box
from tandem.run_folder.checkpoint import (
    Saver,
    find_damage,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from tandem.run_folder.shards import Shard, unfinished_name, write_shard
from tandem.runtime.disk import DISK, Disk
from tandem.runtime.errors import UserError

WHOLE = {
    "w": torch.arange(42.0).reshape(7, 6),
    "bias": torch.arange(5.0).to(torch.bfloat16),
    "experts": torch.arange(48.0).reshape(4, 3, 4),
    "step.w": torch.tensor(3.0),
}
DIVISIONS = [("rows", 4), ("columns", 2), ("rows", 3), ("columns", 3), ("rows", 1)]


def boxes_of(shape, kind, size):
    """The box of each rank: rows or columns, as even as they come, the last ones maybe empty."""
    whole = whole_box(shape)
    if not shape:
        return [whole] * size
    axis = 0 if kind == "rows" else len(shape) - 1
    step, boxes = -(-shape[axis] // size), []
    for rank in range(size):
        first, last = (min(shape[axis], step * n) for n in (rank, rank + 1))
        start, part = list(whole.start), list(whole.shape)
        start[axis], part[axis] = first, last - first
        boxes.append(Box(tuple(start), tuple(part), whole.whole))
    return boxes


def divided(kind, size):
    """The tensors and boxes of each rank."""
    boxes = {name: boxes_of(tuple(tensor.shape), kind, size) for name, tensor in WHOLE.items()}
    for rank in range(size):
        own = {name: found[rank] for name, found in boxes.items()}
        yield {n: WHOLE[n][box.slices] for n, box in own.items() if box.size}, own


def shards_of(step, kind, size):
    name = unfinished_name(step)
    for rank, (tensors, boxes) in enumerate(divided(kind, size)):
        yield (
            Shard(rank=rank, size=size, folder=name, boxes={"policy": boxes}),
            {"policy": tensors},
        )


def save(folder, step, kind="rows", size=3, lost=(), disk=DISK):
    """Every rank writes, rank 0 last; `lost` ranks' files are not in the manifest."""
    (first, tensors), *others = shards_of(step, kind, size)
    entries = {}
    for shard, own in others:
        written = write_shard(folder, own, shard, disk)
        entries |= {} if shard.rank in lost else written
    return save_checkpoint(
        folder, contents(step, tensors, {}, shard=first, wait_for_others=lambda: entries)
    )


def assert_equal(found, expected):
    assert found.dtype == expected.dtype and torch.equal(found, expected)


def fail(text):
    raise AssertionError(text)


@pytest.mark.parametrize(("kind", "size"), DIVISIONS)
def test_any_division_is_read_whole_and_by_the_parts_of_any_other(tmp_path, kind, size):
    path = save(tmp_path, 1, kind, size)
    files = {f"policy-{n:05d}-of-{size:05d}.safetensors" for n in range(1, size + 1)}
    assert {file.name for file in path.iterdir()} == {*files, "state.json", "manifest.json"}
    saved = load_checkpoint(path)[0]["policy"]
    assert set(saved) == set(WHOLE) and len(saved) == len(WHOLE)
    for name, tensor in WHOLE.items():
        assert_equal(saved[name], tensor)
    for kind, size in DIVISIONS:
        for _, boxes in divided(kind, size):
            parts = saved.parts(boxes)
            assert set(parts) == set(WHOLE)
            for name, box in boxes.items():
                assert_equal(parts[name], WHOLE[name][box.slices])


def test_one_process_writes_the_plain_file_that_it_always_wrote(tmp_path):
    path = save_checkpoint(tmp_path, contents(1, {"policy": WHOLE}, {}))
    save_file(WHOLE, tmp_path / "plain")
    assert (path / "policy.safetensors").read_bytes() == (tmp_path / "plain").read_bytes()
    saved = load_checkpoint(path)[0]["policy"]
    for _, boxes in divided("columns", 2):
        for name, box in boxes.items():
            assert_equal(saved.parts(boxes)[name], WHOLE[name][box.slices])


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_damaged_or_missing_shard_is_named_and_the_checkpoint_before_is_taken(tmp_path, number):
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    file = second / f"policy-{number:05d}-of-00003.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    (damage,) = find_damage(second)
    assert file.name in damage and "sha256" in damage
    file.unlink()
    (damage,) = find_damage(second)
    assert file.name in damage and "found none" in damage
    reports = []
    assert latest_checkpoint(tmp_path, reports.append) == first
    assert file.name in reports[0]


def test_a_checkpoint_without_the_file_of_a_rank_is_refused_when_it_is_read(tmp_path):
    saved = load_checkpoint(save(tmp_path, 1, lost=[1]))[0]["policy"]
    with pytest.raises(UserError, match="not this model's"):
        saved["w"]
    rows = Box((0, 0), (2, 6), (7, 6))  # all of these are there
    assert_equal(saved.read("w", rows), WHOLE["w"][:2])


def test_a_tensor_of_another_shape_is_refused(tmp_path):
    saved = load_checkpoint(save(tmp_path, 1))[0]["policy"]
    with pytest.raises(UserError, match="not this model's"):
        saved.read("w", whole_box((7, 5)))


def test_a_save_removes_what_a_killed_one_left_but_not_what_others_write_now(tmp_path):
    left = tmp_path / unfinished_name(1)
    left.mkdir()
    (left / "policy-00002-of-00003.safetensors").write_bytes(b"half")
    path = save(tmp_path, 1)
    assert [file.name for file in tmp_path.iterdir()] == [path.name] and not find_damage(path)


class FullDisk(Disk):
    def write(self, path, save):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))


def test_a_full_disk_of_another_process_is_reported_and_the_checkpoint_before_stays(tmp_path):
    before = save(tmp_path, 1)
    (first, tensors), (second, own) = shards_of(2, "rows", 2)
    reports = []
    with Saver(FullDisk()) as saver:
        saver.save_shard(tmp_path, 2, own, second, reports.append)
    [error] = reports
    assert error["what"] == "the disk is full" and "policy-00002" in error["where"]

    def wait_for_others():
        raise UserError(error["what"])

    with pytest.raises(UserError, match="the disk is full"):
        save_checkpoint(
            tmp_path, contents(2, tensors, {}, shard=first, wait_for_others=wait_for_others)
        )
    assert latest_checkpoint(tmp_path, fail) == before
    assert [path.name for path in tmp_path.iterdir()] == [before.name]


def test_a_process_saves_a_snapshot_of_what_it_has_when_asked(tmp_path):
    (first, tensors), (second, own) = shards_of(1, "rows", 2)
    own = {"policy": {name: tensor.clone() for name, tensor in own["policy"].items()}}
    reports = {}
    with Saver() as saver:
        saver.save_shard(tmp_path, 1, own, second, reports.update)
        own["policy"]["w"].zero_()
    path = save_checkpoint(
        tmp_path, contents(1, tensors, {}, shard=first, wait_for_others=lambda: reports)
    )
    assert_equal(load_checkpoint(path)[0]["policy"]["w"], WHOLE["w"])
