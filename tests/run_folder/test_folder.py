"""The run folder: who may open it, with which config, and what happens to what was there."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tandem.config.recipe import load_config, to_toml
from tandem.config.schema import Config
from tandem.model import probe
from tandem.model.probe import Exactness
from tandem.model.schedule import threads_of
from tandem.plugins.commands.show import status
from tandem.run_folder.config_changes import MESH, allowed_changes, toml_values
from tandem.run_folder.folder import identity, open_run, read_matmul, resolved
from tandem.run_folder.read import Notes, read_notes
from tandem.run_folder.status import read_status, write_status
from tandem.runtime import numerics
from tandem.runtime.disk import DISK, whole_folder, write_atomic
from tandem.runtime.errors import UserError
from tests.support.faults import DIED, DyingDisk, in_a_fork, make_read_only, small_disk

ROOT = Path(__file__).parents[2]
HOLDER = """
import os, sys, time
from pathlib import Path
from tandem.config.schema import Config
from tandem.run_folder.folder import open_run
with open_run(Path(sys.argv[1]), Config(), fresh=False, command="train"):
"""


def config(**changes):
    """config(run__seed=1): the defaults but for run.seed, and one thread."""
    tree = Config().model_dump()
    tree["run"]["threads"], tree["model"]["dtype"] = 1, "float32"
    for key, value in changes.items():
        section, field = key.split("__")
        tree[section][field] = value
    return Config.model_validate(tree)


def start(folder, *, fresh=False, command="train", steps=1, **changes):
    """Open, take steps, close."""
    with open_run(folder, config(**changes), fresh=fresh, command=command) as run:
        run.note_start()
        rows = [f'{{"step": {step}}}\n' for step in range(steps + 1)]
        (run.path / "metrics.jsonl").write_text("".join(rows))
        return run


def log_of(folder):
    return (folder / "log.txt").read_text()


def resumed(run):
    """Tell whether the last start found a run in the folder, by log.txt."""
    starts = [line for line in log_of(run.path).splitlines() if " by pid " in line]
    return " resumed by pid " in starts[-1]


def holder(folder, then="time.sleep(3600)"):
    """Another process that has the folder open; returns once it has."""
    code = HOLDER + f"    print('open', flush=True); {then}"
    process = subprocess.Popen(
        [sys.executable, "-c", code, folder], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "open\n"
    return process


def kill(process):
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()


def test_a_start_that_is_refused_or_killed_leaves_config_and_status_as_they_were(tmp_path):
    def ended(end):
        with open_run(tmp_path, changed, fresh=False, command="train") as run:
            assert load_config(run.recipe, []) == changed  # other ranks read it
            assert run.news[-1] == "config changed: run.save_every: 10 -> 7"
            end()

    start(tmp_path)
    write_status(tmp_path, 4, 4, [])
    names, changed = ("config.toml", "status.json"), config(run__save_every=7)
    before = [(tmp_path / name).read_bytes() for name in names]
    in_a_fork(lambda: ended(lambda: os.kill(os.getpid(), signal.SIGKILL)))
    with pytest.raises(ZeroDivisionError):
        ended(lambda: 1 / 0)
    assert [(tmp_path / name).read_bytes() for name in names] == before
    start(tmp_path, run__save_every=7)
    assert load_config(tmp_path / "config.toml", []) == changed
    assert not list(tmp_path.glob(".next-*")) and read_status(tmp_path) is None


def refused(folder, act=lambda run: None, fresh=False, command="train"):
    """A start that acts, and then is refused."""
    with (
        pytest.raises(UserError, match="refused"),
        open_run(folder, config(), fresh=fresh, command=command) as run,
    ):
        act(run)
        raise UserError("refused")


@pytest.mark.parametrize("fresh", [False, True])
def test_a_first_start_that_is_refused_leaves_no_folder(fresh, tmp_path):
    folder = tmp_path / "runs" / "new"
    refused(folder, lambda run: run.note_machine("one", any_threads=True), fresh, "sft")
    assert not folder.exists()


def test_a_folder_that_was_there_and_one_with_more_in_it_stay_after_a_refused_start(tmp_path):
    (tmp_path / "mine").mkdir()
    for name in ("mine", "engine-log"):
        refused(tmp_path / name, lambda run: (run.path / "engine.txt").touch())
        assert "refused" in log_of(tmp_path / name)


def test_a_fresh_start_that_is_refused_leaves_the_run_in_its_place(tmp_path):
    start(tmp_path / "run", run__seed=3)
    refused(tmp_path / "run", fresh=True)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert load_config(tmp_path / "run/config.toml", []).run.seed == 3


def test_second_open_is_refused_and_names_the_holder(tmp_path):
    with open_run(tmp_path / "run", config(), fresh=False, command="train") as run:
        for fresh in (False, True):
            with pytest.raises(UserError, match="in use") as caught:
                start(run.path, fresh=fresh)
            assert f"pid {os.getpid()} on" in caught.value.found and caught.value.next
    assert resumed(start(run.path))


def test_lock_of_a_killed_process_is_taken_over(tmp_path):
    process = holder(tmp_path / "run")
    try:
        with pytest.raises(UserError, match="in use") as caught:
            start(tmp_path / "run")
        assert f"pid {process.pid} on" in caught.value.found
    finally:
        kill(process)
    assert resumed(start(tmp_path / "run"))
    taken = f"took over the lock of a run that was killed: pid {process.pid} on"
    assert taken in log_of(tmp_path / "run")
    start(tmp_path / "run")
    assert log_of(tmp_path / "run").count("took over") == 1


def test_forked_worker_of_a_killed_run_does_not_keep_the_lock(tmp_path):
    process = holder(
        tmp_path / "run", then="os.fork() or print(os.getpid(), flush=True); time.sleep(3600)"
    )
    worker = int(process.stdout.readline())  # it says so itself: it has got past its fork
    kill(process)
    try:
        os.kill(worker, 0)  # the witness: it lives
        assert resumed(start(tmp_path / "run"))
    finally:
        os.kill(worker, signal.SIGKILL)


def test_changed_config_is_refused_with_every_changed_key_once_a_step_has_ended(tmp_path):
    start(tmp_path, run__seed=3, command="sft", steps=0)
    start(tmp_path, run__seed=0, train__learning_rate=1e-5)
    with pytest.raises(UserError, match="config differs") as caught:
        start(tmp_path, run__seed=1, train__learning_rate=2e-5, rollout__workers=2)
    text = str(caught.value)
    assert "run.seed: 0 -> 1" in text
    assert "train.learning_rate: 1e-05 -> 2e-05" in text
    assert "--fresh" in text
    assert "rollout.workers" not in text
    kept = config(run__seed=0, train__learning_rate=1e-5)
    assert load_config(tmp_path / "config.toml", []) == kept


def test_the_thread_count_is_resolved_when_a_run_begins_and_kept(tmp_path, monkeypatch):
    """Also where a resume has another number of cores at hand."""
    for at_hand in (3, 2):
        monkeypatch.setattr(numerics, "prepare", lambda at_hand=at_hand: at_hand)
        assert start(tmp_path, run__threads=0).config.run.threads == 3
    assert load_config(tmp_path / "config.toml", []).run.threads == 3


def test_an_automatic_learning_rate_is_that_number_written_out(tmp_path):
    """The numbers are those of tinker-cookbook's get_lr for Llama-3.1-8B and Qwen3-4B."""

    def begun(kind, size, rank, **changes):
        about = {"model_type": kind, "hidden_size": size}
        (tmp_path / "config.json").write_text(json.dumps(about))
        changes |= {"model__path": str(tmp_path), "lora__rank": rank}
        return start(tmp_path / "runs" / f"{kind}-{rank}", **changes)

    for *model, rate in (("llama", 4096, 8, 2.86e-4), ("qwen3", 2560, 8, 4.91e-4)):
        run = begun(*model, train__learning_rate="auto")
        assert run.news[1:] == (f"train.learning_rate = auto: {rate}",)
        assert run.config == begun(*model, train__learning_rate=rate).config
    assert begun("llama", 4096, 0, sft__learning_rate="auto").config.sft.learning_rate == 2.86e-5
    for kind, rank in (("gemma2", 8), ("qwen3", 0)):
        with pytest.raises(UserError, match="no learning rate is known"):
            begun(kind, 64, rank, train__learning_rate="auto")
        assert not (tmp_path / "runs" / f"{kind}-{rank}").exists()


def test_an_automatic_type_is_bfloat16_where_it_is_exact_and_faster(tmp_path, monkeypatch):
    """The unit for bfloat16 is pretended, then times are. A run keeps its type."""
    shape = {"model_type": "llama", "hidden_size": 512, "intermediate_size": 64, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    own = {"model__path": str(tmp_path), "model__dtype": "auto", "steps": 0}

    def begun(name, unit="pairs", **changes):
        probe.auto_dtype.cache_clear()
        monkeypatch.setattr("tandem.run_folder.folder.bfloat16_unit", lambda: unit)
        run = start(tmp_path / name, **own, **changes)
        return run.config.model.dtype, *run.news[1:]

    def pretend(gain=1.3, width=512, **found):
        odd = Exactness(**{"parity": [], "thread_dependent": [], **found})
        trial = {torch.bfloat16: (odd, 1.0), torch.float32: (None, gain)}
        monkeypatch.setattr(probe, "probe", lambda model: trial[model.dtype][0])
        monkeypatch.setattr(probe, "_seconds", lambda model: trial[model.dtype][1])
        monkeypatch.setattr(probe, "WIDTHS", [width])

    with threads_of(3):
        begun("timed")
        assert torch.get_num_threads() == 3
    pretend()
    assert begun("exact") == ("bfloat16", "model.dtype = auto: bfloat16")
    for engine, workers in (("vllm", 1), ("http://127.0.0.1:1/v1", 0)):  # which compute otherwise
        assert begun(engine[:4], rollout__engine=engine, rollout__workers=workers) == ("float32",)
    assert begun("no unit", "") == ("float32",) and begun("exact")[0] == "bfloat16"
    start(tmp_path / "exact", **{**own, "steps": 1})
    moved = config(model__path="moved", model__dtype="auto")
    assert resolved(moved, tmp_path / "exact").model.dtype == "bfloat16"
    no = {"gain": 1.1}, {"parity": ["top-p"]}, {"thread_dependent": ["norm"]}, {"width": 513}
    for changes in no:
        pretend(**changes)
        assert begun(*changes) == ("float32",)


def test_other_thread_count_is_taken_only_if_it_changes_no_bit(tmp_path):
    run = start(tmp_path, run__threads=1)
    with pytest.raises(UserError, match=r"run\.threads: 1 -> 2"):
        start(tmp_path, run__threads=2)
    run.note_machine("a processor", any_threads=False)
    with pytest.raises(UserError, match=r"run\.threads: 1 -> 2"):
        start(tmp_path, run__threads=2)
    run.note_machine("a processor", any_threads=True)
    assert "config changed: run.threads: 1 -> 2" in start(tmp_path, run__threads=2).news


def test_changed_thread_count_is_refused_if_bits_depend_on_it(tmp_path):
    """The probe comes after the config is taken; it may say otherwise than in the start before."""
    start(tmp_path, run__threads=1).note_machine("one", any_threads=True)
    run = start(tmp_path, run__threads=2)
    with pytest.raises(UserError, match=r"(?s)depend on the thread count.*next: +run\.threads=1"):
        run.note_machine("one", any_threads=False)
    run.note_machine("another", any_threads=False)  # whose bits are its own from here on


def test_a_run_keeps_its_matmul_kernel_on_the_gpu_that_chose_it_and_says_if_that_changes(tmp_path):
    assert read_matmul(tmp_path, "one") == ""
    run = start(tmp_path)
    assert run.note_machine("one", any_threads=True) == ""
    assert read_matmul(run.path, "one") == "plain"
    assert run.note_machine("one", any_threads=True, matmul="tma") == ""
    assert read_matmul(run.path, "one") == "tma" and read_matmul(run.path, "another") == ""
    assert "has computed on one, now on another" in run.note_machine("another", any_threads=True)


def free_keys():
    """The keys of which any other value is taken, though a smaller number is."""
    values = toml_values(to_toml(config()))
    for key, value in values.items():
        another = value - 1 if isinstance(value, int | float) else f"{value}, or another"
        with suppress(UserError):
            allowed_changes(values, {**values, key: another}, any_threads=False, path=Path())
            yield key


def test_the_page_on_determinism_lists_the_keys_that_may_change():
    free, text = set(free_keys()), (ROOT / "docs/concepts/durability.md").read_text()
    listed, others = re.search(r"(?s)These may change: (.*?); (.*?)\n\n", text).groups()
    mesh = {key for key in free if key.startswith("parallel.") and key != "parallel.timeout_s"}
    named = re.findall(r"`(\w+\.\w+)`", listed)
    assert named == sorted(free - mesh)
    assert mesh == MESH and "the mesh (`parallel.*`)" in others


def test_a_folder_of_another_command_is_refused(tmp_path):
    start(tmp_path, command="sft")
    with pytest.raises(UserError, match="another command") as caught:
        start(tmp_path, command="train")
    assert "tandem sft" in caught.value.found


def test_fresh_moves_the_old_run_aside_and_deletes_nothing(tmp_path):
    folder = tmp_path / "run"
    for number in range(3):
        run = start(folder, fresh=True, command="sft" if number else "train", run__seed=number)
        assert not resumed(run)
        (folder / "mine.txt").write_text(str(number))
    for number, name in enumerate(("run.old-1", "run.old-2", "run")):
        assert (tmp_path / name / "mine.txt").read_text() == str(number)
    assert tomllib.loads((tmp_path / "run.old-1" / "config.toml").read_text())["run"]["seed"] == 0
    assert resumed(start(folder, command="sft", run__seed=2))


@pytest.mark.parametrize("fresh", [False, True])
def test_a_folder_that_is_not_a_run_is_left_alone(tmp_path, fresh):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match="something else") as caught:
        start(tmp_path, fresh=fresh)
    assert "thesis.tex" in caught.value.found
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    "damage",
    ["config.toml: [1", "config.toml: run = 3", *("run.json: " + c for c in ("[1", "{}", "3"))],
)
def test_a_damaged_file_of_the_folder_is_named(tmp_path, damage):
    name, text = damage.split(": ")
    start(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match="cannot be read") as caught:
        start(tmp_path)
    assert caught.value.where == str(tmp_path / name) and "--fresh" in caught.value.next


def test_a_read_only_or_full_disk_refuses_a_run_in_words(tmp_path):
    with small_disk(tmp_path / "disk", "64k") as mounted:
        if not mounted:
            pytest.skip("only root may mount a small file system")
        (tmp_path / "disk" / "ballast").write_bytes(bytes(60 << 10))
        with pytest.raises(UserError, match="the disk is full"):
            start(tmp_path / "disk" / "run")
        make_read_only(tmp_path / "disk")
        with pytest.raises(UserError, match="refuses") as caught:
            start(tmp_path / "disk" / "other")
        assert "Read-only" in caught.value.found


@pytest.mark.parametrize("mode", ["before", "midway", "power"])
def test_atomic_write_killed_anywhere_leaves_old_or_new(tmp_path, mode):
    path, codes, contents = tmp_path / "file", [], []
    for n in range(6):
        write_atomic(path, b"old", DISK)
        codes.append(in_a_fork(lambda n=n: write_atomic(path, b"new content", DyingDisk(n, mode))))
        contents.append(path.read_bytes())
    assert codes == [DIED] * 4 + [0, 0]
    assert contents == [b"old"] * 3 + [b"new content"] * 3


def test_a_killed_swap_of_folders_leaves_a_whole_copy_until_the_next_one_stands(tmp_path):
    def fill(text, failure=None):
        with whole_folder(tmp_path / "model") as unfinished:
            (unfinished / "weights").write_text(text)
            if failure:
                raise failure

    fill("old")
    (tmp_path / "model").rename(tmp_path / ".old-model")  # killed between its two renames
    with pytest.raises(UserError, match="the disk is full"):
        fill("half", OSError(errno.ENOSPC, "No space left on device"))
    assert [path.read_text() for path in tmp_path.glob("*/weights")] == ["old"]
    fill("new")
    (tmp_path / ".old-model").mkdir()  # killed before the old one was removed
    fill("newer")
    assert [path.read_text() for path in tmp_path.glob("*/weights")] == ["newer"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("key", "less", "more"),
    [("run.steps", 10, 20), ("rl.max_gen_batches", 2, 5), ("train.max_bad_steps", 0, 4)],
)
def test_what_ended_or_stopped_a_run_may_grow_and_not_shrink(key, less, more):
    values = toml_values(to_toml(config()))
    smaller, larger = {**values, key: less}, {**values, key: more}
    given = {"any_threads": False, "path": Path()}
    assert allowed_changes(smaller, larger, **given) == [f"{key}: {less} -> {more}"]
    with pytest.raises(UserError, match=rf"{re.escape(key)}: {more} -> {less}"):
        allowed_changes(larger, smaller, **given)


def test_another_mesh_may_go_on_and_is_told_that_its_bits_are_its_own(tmp_path):
    start(tmp_path)
    [_, mesh] = start(tmp_path, parallel__data=2).news
    assert "parallel.data: 1 -> 2" in mesh and "from here on the bits are this mesh's" in mesh


def test_runs_of_any_mesh_are_one_run(tmp_path):
    """Its journal is read back under another one."""
    assert identity(config(), {}) == identity(config(parallel__data=2), {})
    assert identity(config(), {}) != identity(config(run__seed=2), {})


# ---- an error

BROKEN = UserError("the engine cannot be reached", where="rollout.engine", next="start it")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (BROKEN, "the engine cannot be reached"),
        (ValueError("first\nsecond"), "ValueError: first"),
        (RuntimeError(), "RuntimeError"),
    ],
    ids=str,
)
def test_an_error_that_ends_a_run_is_in_its_log_and_its_status(error, reason, tmp_path, capsys):
    folder = tmp_path / "run"
    with pytest.raises(type(error)), open_run(folder, config(), fresh=False, command="train"):
        write_status(folder, 3, 9, [])
        raise error
    assert log_of(folder).splitlines()[-1].endswith(f" failed: {reason}")
    assert read_notes(folder).failed == reason and read_status(folder)["step"] == 3
    status(folder)
    assert f"its last start failed: {reason}\n" in capsys.readouterr().out
    start(folder)
    assert read_notes(folder).failed == ""


def test_notes_of_a_log_are_its_newest_warnings_each_once(tmp_path):
    assert read_notes(tmp_path) == Notes()
    lines = [f"T warning at step {n}: w" for n in range(60)] * 2
    (tmp_path / "log.txt").write_bytes("\n".join(["T step 1", *lines]).encode() + b"\n\xff\n")
    found = read_notes(tmp_path)
    assert found.warnings == tuple(f"warning at step {n}: w" for n in range(10, 60))
