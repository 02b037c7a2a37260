"""Checkpoints: kill a save at every operation, damage a saved one in every way, fill the disk."""

import json
import random
import shutil
import stat
import subprocess

import pytest
import torch

from tandem.checkpoint import (
    checkpoint_step,
    find_damage,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from tandem.disk import DISK, Disk
from tandem.errors import UserError
from tandem.model.hashing import tensor_hash, weight_hash
from tests.faults import MODES, deaths, in_a_fork, limit_file_size, make_read_only, memory_folder, small_disk


@pytest.fixture
def memory():
    with memory_folder() as folder:
        yield folder


def content(step):
    generator = torch.Generator().manual_seed(step)
    policy = {"a.weight": torch.randn(16, 8, generator=generator), "b": torch.randn(5, generator=generator).bfloat16()}
    optimizer = {"a.weight.exp_avg": torch.randn(16, 8, generator=generator), "steps": torch.tensor(step)}
    return {"policy": policy, "optimizer": optimizer}, {"step": step, "cursor": [step, 0.1], "note": "é"}


def save(folder, step, keep=2, disk=DISK):
    return save_checkpoint(folder, step, *content(step), keep, disk=disk)


def fail(text):
    raise AssertionError(text)


def assert_is(path, step):
    tensors, state = load_checkpoint(path)
    wanted, wanted_state = content(step)
    assert state == wanted_state and set(tensors) == set(wanted)
    for stem, named in wanted.items():
        assert weight_hash(tensors[stem]) == weight_hash(named)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_is_read_back_to_the_bit(tmp_path):
    path = save(tmp_path, 12)
    assert path.name == "step_000012" and checkpoint_step(path) == 12
    assert latest_checkpoint(tmp_path, fail) == path
    assert_is(path, 12)


def test_other_users_can_read_a_checkpoint_as_they_can_read_its_folder(tmp_path):
    tmp_path.chmod(0o755)
    files = list(save(tmp_path, 1).iterdir())
    assert len(files) == 4 and all(stat.S_IMODE(file.stat().st_mode) == 0o644 for file in files)


def test_a_tensor_that_is_not_contiguous_keeps_its_values(tmp_path):
    turned = torch.arange(6.0).reshape(2, 3).T
    path = save_checkpoint(tmp_path, 1, {"policy": {"w": turned}}, {}, 2)
    assert torch.equal(load_checkpoint(path)[0]["policy"]["w"], turned)


def test_the_same_content_gives_the_same_bytes(tmp_path):
    first, second = save(tmp_path / "a", 3), save(tmp_path / "b", 3)
    assert names(first) == names(second)
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names(first))


def test_no_checkpoint_at_all_is_none(tmp_path):
    assert latest_checkpoint(tmp_path / "absent", fail) is None
    assert latest_checkpoint(tmp_path, fail) is None


def test_only_the_newest_are_kept(tmp_path):
    for step in (10, 20, 30, 40):
        save(tmp_path, step, keep=3)
    assert names(tmp_path) == ["step_000020", "step_000030", "step_000040"]


def test_a_damaged_checkpoint_does_not_count_among_those_kept(tmp_path):
    for step in (10, 20):
        save(tmp_path, step)
    (tmp_path / "step_000020" / "state.json").unlink()
    save(tmp_path, 30)
    assert names(tmp_path) == ["step_000010", "step_000020", "step_000030"]


def test_a_damaged_later_step_is_replaced_when_the_run_comes_to_it_again(tmp_path):
    for step in (10, 20):
        save(tmp_path, step)
    (tmp_path / "step_000020" / "state.json").write_text("{}")
    reports = []
    assert latest_checkpoint(tmp_path, reports.append).name == "step_000010"
    save(tmp_path, 15)
    save(tmp_path, 20)
    assert_is(latest_checkpoint(tmp_path, fail), 20)
    assert names(tmp_path) == ["step_000015", "step_000020"]


def test_what_is_saved_before_damaged_later_steps_is_not_pruned_for_them(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step, keep=3)
    for step in (20, 30):
        file = tmp_path / f"step_{step:06d}" / "policy.safetensors"
        data = file.read_bytes()
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))  # of the right size
    assert latest_checkpoint(tmp_path, lambda _: None).name == "step_000010"
    save(tmp_path, 15)
    assert latest_checkpoint(tmp_path, lambda _: None).name == "step_000015"
    assert {"step_000010", "step_000015"} <= set(names(tmp_path))


def test_state_that_json_would_change_is_refused(tmp_path):
    for state in ({"a": (1, 2)}, {1: "a"}):
        with pytest.raises(TypeError, match="JSON"):
            save_checkpoint(tmp_path, 1, {}, state, 2)
    with pytest.raises(ValueError, match="JSON"):
        save_checkpoint(tmp_path, 1, {}, {"a": float("nan")}, 2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("before", [[], [10], [10, 20]], ids=["first", "second", "pruning"])
def test_a_save_killed_at_any_operation_leaves_the_old_checkpoint_or_the_new_one(memory, before, mode):
    made, folder = memory / "made", memory / "checkpoints"
    made.mkdir()
    for step in before:
        save(made, step)
    shutil.copytree(made, folder)
    count = 0
    for n in deaths(lambda disk: save(folder, 30, disk=disk), mode):
        found = latest_checkpoint(folder, fail)  # a torn one would be reported, even if it were not chosen
        if found is not None:
            assert_is(found, checkpoint_step(found))
        assert (checkpoint_step(found) if found else None) in {*(before or [None]), 30}, n
        assert not [damage for path in folder.glob("step_*") for damage in find_damage(path)]
        save(folder, 30)
        assert_is(latest_checkpoint(folder, fail), 30)
        assert names(folder) == sorted(f"step_{step:06d}" for step in [*before, 30][-2:])
        shutil.rmtree(folder)
        shutil.copytree(made, folder)
        count += 1
    assert count >= 10  # 4 writes, 4 + 2 fsyncs of files and folders ...


@pytest.mark.parametrize("mode", MODES)
def test_replacing_the_only_checkpoint_never_leaves_none(memory, mode):
    made, folder = memory / "made", memory / "checkpoints"
    save_checkpoint(made, 30, {"policy": {"w": torch.zeros(3)}}, {}, 2)
    shutil.copytree(made, folder)
    outcomes = set()
    for _ in deaths(lambda disk: save(folder, 30, disk=disk), mode):
        found = latest_checkpoint(folder, fail)
        outcomes.add(load_checkpoint(found)[1] == {})
        save(folder, 40)  # the next save tidies up whatever was left
        assert names(folder) == ["step_000030", "step_000040"]
        shutil.rmtree(folder)
        shutil.copytree(made, folder)
    assert outcomes == {True, False}  # killed before the swap, and after it
    assert_is(latest_checkpoint(folder, fail), 30)


def test_every_file_is_durable_before_the_manifest_and_the_manifest_before_the_rename(tmp_path):
    events = []

    class Recorder(Disk):
        def write(self, path, save):
            events.append(("write", path.name))
            super().write(path, save)

        def fsync(self, path):
            events.append(("fsync", path.name))
            super().fsync(path)

        def rename(self, source, target):
            events.append(("rename", target.name))
            super().rename(source, target)

    save(tmp_path, 1, disk=Recorder())
    files = ["optimizer.safetensors", "policy.safetensors", "state.json"]
    assert sorted(events[:3]) == [("write", name) for name in files]
    assert sorted(events[3:6]) == [("fsync", name) for name in files]
    assert events[6:] == [
        ("write", "manifest.json"),
        ("fsync", "manifest.json"),
        ("fsync", ".tmp-step_000001"),
        ("rename", "step_000001"),
        ("fsync", tmp_path.name),
    ]


def damage_one_file(rng, checkpoint, other):
    """One random damage; returns the file it is in."""
    file = checkpoint / rng.choice(sorted(p.name for p in checkpoint.iterdir()))
    data = bytearray(file.read_bytes())
    place = rng.randrange(len(data))
    match rng.choice(["flip", "truncate", "zero", "delete", "append", "swap", "mix"]):
        case "flip":
            data[place] ^= 1 << rng.randrange(8)
        case "truncate":
            del data[place:]
        case "zero":
            place = min(place, next(i for i in reversed(range(len(data))) if data[i]))
            data[place : place + 64] = bytes(len(data[place : place + 64]))
            if bytes(data) == file.read_bytes():
                data[-1] ^= 1
        case "append":
            data += b"\n"
        case "delete":
            file.unlink()
            return file.name
        case "swap":
            first, second = checkpoint / "policy.safetensors", checkpoint / "optimizer.safetensors"
            kept = first.read_bytes()
            shutil.copyfile(second, first)
            second.write_bytes(kept)
            return first.name
        case "mix":
            shutil.copyfile(other / file.name, file)
            return file.name
    file.write_bytes(data)
    return file.name


def test_a_hundred_random_damages_are_all_found_and_the_checkpoint_before_is_taken(memory):
    made, rng = memory / "made", random.Random(0)
    for step in (10, 20):
        save(made, step)
    for number in range(100):
        folder = memory / f"{number}"
        shutil.copytree(made, folder)
        hurt = damage_one_file(rng, folder / "step_000020", folder / "step_000010")
        reports = []
        assert latest_checkpoint(folder, reports.append) == folder / "step_000010", hurt
        assert len(reports) == 1 and "step_000020" in reports[0]
        assert hurt in reports[0] and "found" in reports[0] and "expected" in reports[0]
        shutil.rmtree(folder)


def test_a_checkpoint_under_another_steps_name_is_found(tmp_path):
    save(tmp_path, 10).rename(tmp_path / "step_000020")
    assert find_damage(tmp_path / "step_000020") == ["manifest.json: found step 10, expected 20"]


def test_when_no_checkpoint_verifies_the_run_stops_instead_of_starting_from_scratch(tmp_path):
    for step in (10, 20):
        (save(tmp_path, step) / "policy.safetensors").unlink()
    with pytest.raises(UserError, match="every checkpoint") as caught:
        latest_checkpoint(tmp_path, lambda _: None)
    assert "step_000010/policy.safetensors" in caught.value.found and "--fresh" in caught.value.next


def test_loading_a_damaged_checkpoint_by_name_is_refused(tmp_path):
    path = save(tmp_path, 1)
    file = path / "policy.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1  # a weight: safetensors itself would load it without a word
    file.write_bytes(data)
    with pytest.raises(UserError, match="damaged") as caught:
        load_checkpoint(path)
    assert "policy.safetensors" in caught.value.found


class FullSoon(Disk):
    """Says there is space, as when another process takes it a moment later."""

    def free_bytes(self, folder):
        return 1 << 40


def big():
    return {"policy": {"w": torch.zeros(1 << 20)}}  # 4 MiB


def test_too_little_space_is_said_before_anything_is_written(tmp_path):
    class Small(Disk):
        def free_bytes(self, folder):
            return 3 << 20

    save(tmp_path, 10)
    with pytest.raises(UserError, match="not enough space") as caught:
        save_checkpoint(tmp_path, 20, big(), {}, 2, disk=Small())
    assert caught.value.found == "3.0 MiB free" and caught.value.expected == "5.0 MiB" and caught.value.next
    assert names(tmp_path) == ["step_000010"]


def test_a_disk_that_fills_up_during_a_save_leaves_the_checkpoint_before_and_a_clear_error(tmp_path):
    with small_disk(tmp_path / "disk", "3m") as mounted:
        if not mounted:
            pytest.skip("only root may mount a small file system")
        folder = tmp_path / "disk" / "checkpoints"
        save(folder, 10)
        with pytest.raises(UserError, match="the disk is full") as caught:
            save_checkpoint(folder, 20, big(), {}, 2, disk=FullSoon())
        assert "No space left" in caught.value.found and "free" in caught.value.found and caught.value.next
        assert names(folder) == ["step_000010"]
        assert_is(latest_checkpoint(folder, fail), 10)
        make_read_only(tmp_path / "disk")
        with pytest.raises(UserError, match="refuses") as caught:
            save(folder, 20)
        assert "Read-only" in caught.value.found
        assert_is(latest_checkpoint(folder, fail), 10)


def test_a_file_size_limit_is_told_like_a_full_disk(tmp_path):
    def limited_save():
        limit_file_size(1 << 16)
        with pytest.raises(UserError, match="the disk is full") as caught:
            save_checkpoint(tmp_path, 20, big(), {}, 2)
        assert "File too large" in caught.value.found

    save(tmp_path, 10)
    assert in_a_fork(limited_save) == 0
    assert names(tmp_path) == ["step_000010"]


def test_a_loaded_checkpoint_survives_its_own_replacement_and_cannot_be_written_through(tmp_path):
    path = save(tmp_path, 10)
    tensors, _ = load_checkpoint(path)
    tensors["policy"]["a.weight"].zero_()
    assert_is(path, 10)
    save(tmp_path, 10)
    assert torch.equal(tensors["optimizer"]["a.weight.exp_avg"], content(10)[0]["optimizer"]["a.weight.exp_avg"])


def test_the_weight_hash_sees_one_bit_a_name_a_shape_and_a_dtype():
    base = {"a": torch.zeros(2, 3), "b": torch.ones(2)}
    others = [
        {"a": torch.zeros(2, 3), "b": torch.tensor([1.0, 1.0000001])},
        {"a": torch.tensor([[-0.0, 0, 0], [0, 0, 0]]), "b": torch.ones(2)},
        {"a": torch.zeros(3, 2), "b": torch.ones(2)},
        {"a": torch.zeros(2, 3, dtype=torch.int32), "b": torch.ones(2)},
        {"a": torch.zeros(2, 3), "c": torch.ones(2)},
        {"a": torch.zeros(2, 3)},
    ]
    hashes = {weight_hash(tensors) for tensors in [base, *others]}
    assert len(hashes) == 1 + len(others)


def test_the_weight_hash_ignores_order_strides_and_whether_a_gradient_is_wanted():
    weight = torch.randn(4, 4)
    same = {"b": torch.zeros(0), "a": weight.T.contiguous().T.requires_grad_()}
    assert weight_hash({"a": weight, "b": torch.zeros(0)}) == weight_hash(same)
    assert tensor_hash(torch.tensor(1.0)) != tensor_hash(torch.tensor([1.0]))


def test_the_weight_hash_is_the_same_in_every_process():
    digest = "163eb82d765c33117466091ec11144869c7f3d493a0d3356d66a67df5b5498b8"
    assert weight_hash({"b": torch.ones(2), "a": torch.arange(7.0)}) == digest


def test_the_manifest_can_be_checked_without_the_program(tmp_path):
    path = save(tmp_path, 1)
    files = json.loads((path / "manifest.json").read_text())["files"]
    lines = "".join(f"{entry['sha256']}  {name}\n" for name, entry in files.items())
    assert len(files) == 3
    subprocess.run(["sha256sum", "-c", "--quiet"], input=lines, cwd=path, text=True, check=True)
