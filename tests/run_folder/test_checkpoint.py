"""Checkpoints: kill a save at every operation, damage a saved one in every way, fill the disk.

The larger numbers of the same functions are in `make chaos only=checkpoints`.
"""

import errno
import hashlib
import json
import stat
import subprocess

import pytest
import torch

from chaos.checkpoints import (
    DAMAGED,
    ONLY,
    at_once,
    content,
    contents,
    damages,
    full_disks,
    kills,
    names,
    refusals,
)
from chaos.results import tally
from tandem.run_folder.checkpoint import (
    find_damage,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from tandem.runtime.disk import DISK, Disk, make_folder
from tandem.runtime.errors import UserError
from tandem.weights.hashing import weight_hash
from tests.support.faults import MODES, RefusingDisk, memory_folder


@pytest.fixture
def memory():
    with memory_folder() as folder:
        yield folder


def save(folder, step, keep=2, disk=DISK):
    return at_once(folder, step, disk, keep=keep)


def fail(text):
    raise AssertionError(text)


def assert_is(path, step):
    tensors, state = load_checkpoint(path)
    wanted, wanted_state = content(step)
    assert state == wanted_state and set(tensors) == set(wanted)
    for stem, named in wanted.items():
        assert weight_hash(tensors[stem].items()) == weight_hash(named.items())


def test_checkpoint_is_as_readable_as_its_folder(tmp_path):
    tmp_path.chmod(0o755)
    files = list(save(tmp_path, 1).iterdir())
    assert len(files) == 4 and all(stat.S_IMODE(file.stat().st_mode) == 0o644 for file in files)


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


def test_damaged_later_step_is_replaced_by_the_resumed_run(tmp_path):
    for step in (10, 20):
        save(tmp_path, step)
    (tmp_path / "step_000020" / "state.json").write_text("{}")
    reports = []
    assert latest_checkpoint(tmp_path, reports.append).name == "step_000010"
    save(tmp_path, 15)
    save(tmp_path, 20)
    assert_is(latest_checkpoint(tmp_path, fail), 20)
    assert names(tmp_path) == ["step_000015", "step_000020"]


def test_damaged_later_steps_do_not_prune_earlier_ones(tmp_path):
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
            save_checkpoint(tmp_path, contents(1, {}, state))
    with pytest.raises(ValueError, match="JSON"):
        save_checkpoint(tmp_path, contents(1, {}, {"a": float("nan")}))


def assert_met(result):
    assert result.met, result


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scenario", ["the first save", "a save that prunes", DAMAGED, ONLY])
def test_save_killed_at_any_operation_leaves_old_or_new(memory, scenario, mode):
    # 4 writes, 4 + 2 fsyncs, a rename
    assert_met(tally("", kills(memory, scenario, mode, at_once), at_least=11))


def test_ninety_damages_are_found_and_the_one_before_is_taken(memory):
    assert_met(tally("", damages(memory, 90), at_least=90))


def test_a_checkpoint_under_another_steps_name_is_found(tmp_path):
    save(tmp_path, 10).rename(tmp_path / "step_000020")
    assert find_damage(tmp_path / "step_000020") == ["manifest.json: found step 10, expected 20"]


def test_run_stops_if_no_checkpoint_verifies(tmp_path):
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


def test_disk_full_at_any_page_leaves_the_one_before(memory):
    assert_met(tally("", full_disks(memory, at_once), at_least=8))


def test_disk_error_at_any_operation_leaves_a_whole_checkpoint(memory):
    assert_met(tally("", refusals(memory, at_once), at_least=60))


def test_loaded_checkpoint_is_private_and_survives_replacement(tmp_path):
    path = save(tmp_path, 10)
    tensors, _ = load_checkpoint(path)
    tensors["policy"]["a.weight"].zero_()
    assert_is(path, 10)
    save(tmp_path, 10)
    assert torch.equal(
        tensors["optimizer"]["a.weight.exp_avg"], content(10)[0]["optimizer"]["a.weight.exp_avg"]
    )


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
    assert len({weight_hash(tensors.items()) for tensors in [base, *others]}) == 1 + len(others)


def test_the_weight_hash_is_the_same_in_every_process():
    digest = "163eb82d765c33117466091ec11144869c7f3d493a0d3356d66a67df5b5498b8"
    assert weight_hash({"b": torch.ones(2), "a": torch.arange(7.0)}.items()) == digest


def test_manifest_has_library_versions_and_the_config_hash(tmp_path):
    path = save_checkpoint(tmp_path, contents(1, *content(1)))
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["config_sha256"] == hashlib.sha256(b"[run]\n").hexdigest()
    assert {"tandem", "python", "torch", "transformers", "safetensors", "numpy"} == set(
        manifest["versions"]
    )
    assert manifest["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]


def test_a_file_that_the_manifest_does_not_know_is_not_loaded(tmp_path):
    path = save(tmp_path, 1)
    (path / "more.safetensors").write_bytes((path / "policy.safetensors").read_bytes())
    assert set(load_checkpoint(path)[0]) == {"policy", "optimizer"}


def test_parent_folders_of_a_checkpoint_are_durable(tmp_path):
    synced = []

    class Recorder(Disk):
        def fsync(self, path):
            synced.append(path)
            super().fsync(path)

    make_folder(tmp_path / "run" / "checkpoints", Recorder())
    make_folder(tmp_path / "run" / "checkpoints", Recorder())
    assert synced == [tmp_path, tmp_path / "run"]


def test_before_write_returns_before_the_checkpoint_is_visible(tmp_path):
    save(tmp_path, 10)
    seen = []

    def before_write():
        seen.append(names(tmp_path))
        seen.append(names(tmp_path / ".tmp-step_000020"))
        seen.append(latest_checkpoint(tmp_path, fail))

    save_checkpoint(tmp_path, contents(20, *content(20), before_write=before_write))
    written = ["optimizer.safetensors", "policy.safetensors", "state.json"]
    assert seen == [[".tmp-step_000020", "step_000010"], written, tmp_path / "step_000010"]
    assert names(tmp_path) == ["step_000010", "step_000020"]


def test_checkpoint_set_aside_returns_if_its_successor_is_bad(tmp_path):
    save(tmp_path, 30).rename(tmp_path / ".aside-step_000030")
    (save(tmp_path / "other", 30) / "state.json").unlink()
    (tmp_path / "other" / "step_000030").rename(tmp_path / "step_000030")
    (tmp_path / "other").rmdir()
    with pytest.raises(UserError, match="the disk is full"):
        save(tmp_path, 40, disk=RefusingDisk(3, errno.ENOSPC))  # after what is tidied up
    assert names(tmp_path) == ["step_000030"]
    assert_is(latest_checkpoint(tmp_path, fail), 30)


def test_the_manifest_can_be_checked_without_the_program(tmp_path):
    path = save(tmp_path, 1)
    files = json.loads((path / "manifest.json").read_text())["files"]
    lines = "".join(f"{entry['sha256']}  {name}\n" for name, entry in files.items())
    assert len(files) == 3
    subprocess.run(["sha256sum", "-c", "--quiet"], input=lines, cwd=path, text=True, check=True)
