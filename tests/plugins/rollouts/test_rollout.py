"""`tandem rollout`: interrupted = undisturbed byte for byte, one writer, one config, one set of
inputs."""

import json
import os
import shutil
import signal
from functools import partial

import numpy as np
import pyarrow.parquet as pq
import pytest

from tandem.config.schema import Config, Data
from tandem.data.problems import read_problems
from tandem.model.tiny import make_tiny
from tandem.plugins.rollouts.rollout import Output, hashes, open_output, rollout, write_batches
from tandem.run_folder.episode_files import SCHEMA
from tandem.run_folder.status import ROLLOUT
from tandem.runtime.errors import UserError
from tandem.types import Group, Problem
from tests.support import stages
from tests.support.attempts import attempt
from tests.support.datasets import write_algebra
from tests.support.faults import in_a_fork

BATCHES = 4
OUTPUTS = pytest.mark.parametrize("name", ["episodes.jsonl", "episodes"])


# Without a model: what a batch is made of is a function of its number
# -------------------------------------------------


def episode(rng, uid, sample, length):
    said = {"role": "assistant", "content": f'x = {sample}\n\u2028é "数"'}
    return attempt(
        uid,
        sample,
        rng.integers(0, 90, length),
        read=2,
        engine_logprobs=-rng.random(length).astype(np.float32),
        messages=(said,),
        stop_reason="length" if sample else "stop",
        reward=float(rng.random()),
        reward_parts={"answer": 1.0, "overlong": -0.5} if sample else {},
        reward_error="" if sample else "timeout",
    )


def batch(number, clock):
    rng = np.random.default_rng(number)
    with clock("rollout_s"):
        return [
            Group(
                problem=Problem(
                    uid=f"p{number}/{row}",
                    messages=({"role": "user", "content": f"{row}é?"},),
                    answer="3/4",
                    category="linear",
                    metadata={"level": row},
                ),
                episodes=tuple(
                    episode(rng, f"p{number}/{row}", n, 3 + n + number) for n in range(2)
                ),
            )
            for row in range(2)
        ]


def write(out, *, make=batch, fresh=False, seed=0):
    output = Output(out)
    output.check()
    with open_output(output, Config.model_validate({"run": {"seed": seed}}), fresh) as run:
        assert run.path == output.folder
        run.note_start()
        write_batches(output, BATCHES, {"data.train": "0" * 64}, make)
    return output


def until(last, number, clock):
    """Makes batches, and is killed when asked for number last."""
    if number == last:
        os.kill(os.getpid(), signal.SIGKILL)
    return batch(number, clock)


def never(number, clock):
    raise AssertionError(f"batch {number} was made again")


def contents(out):
    """The bytes of the output: of the JSONL file, or by name of the Parquet files."""
    return (
        out.read_bytes()
        if out.is_file()
        else {file.name: file.read_bytes() for file in out.glob("*.parquet")}
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    return {name: write(folder / name) for name in ("episodes.jsonl", "episodes")}


@OUTPUTS
@pytest.mark.parametrize("last", range(BATCHES))
def test_killed_rollout_goes_on_and_leaves_the_same_bytes(name, last, undisturbed, tmp_path):
    assert in_a_fork(partial(write, tmp_path / name, make=partial(until, last))) == -signal.SIGKILL
    made = []
    output = write(
        tmp_path / name, make=lambda number, clock: made.append(number) or batch(number, clock)
    )
    assert made == list(range(last, BATCHES))
    assert contents(output.path) == contents(undisturbed[name].path)
    rows = [(one.folder / "metrics.jsonl").read_bytes() for one in (output, undisturbed[name])]
    assert rows[0] == rows[1]


def copied(output, folder):
    """The output and its run folder, in another place."""
    for place in {output.path, output.folder}:
        (shutil.copytree if place.is_dir() else shutil.copy)(place, folder / place.name)
    return Output(folder / output.path.name)


@pytest.mark.parametrize("offset", [*np.random.default_rng(0).random(8).tolist(), 0.0, 0.25, 1.0])
def test_jsonl_cut_at_any_byte_is_written_again(offset, undisturbed, tmp_path):
    output = copied(undisturbed["episodes.jsonl"], tmp_path)
    os.truncate(output.path, int(offset * output.path.stat().st_size))
    write(output.path, make=never)
    assert contents(output.path) == contents(undisturbed["episodes.jsonl"].path)


@pytest.mark.parametrize("lost", range(BATCHES))
@OUTPUTS
def test_a_missing_file_and_those_behind_it_are_made_again(name, lost, undisturbed, tmp_path):
    output = copied(undisturbed[name], tmp_path)
    torn = output.folder / f"rollout_step_{lost:06d}.parquet"
    torn.rename(temporary := output.folder / f".tmp-{torn.name}")
    os.truncate(temporary, temporary.stat().st_size // 2)

    def make(number, clock):
        names = [file.name for file in sorted(output.folder.glob("*.parquet"))]
        # what is not trusted is gone
        assert names == [f"rollout_step_{n:06d}.parquet" for n in range(number)]
        return batch(number, clock)

    write(output.path, make=make)
    assert not temporary.exists()
    assert contents(output.path) == contents(undisturbed[name].path)


def test_jsonl_has_the_columns_of_the_journal_with_native_values(undisturbed):
    lines = undisturbed["episodes.jsonl"].path.read_bytes().split(b"\n")
    assert lines.pop() == b""
    rows = [json.loads(line) for line in lines]
    files = sorted(undisturbed["episodes"].path.glob("*.parquet"))
    wanted = [row for file in files for row in pq.read_table(file).to_pylist()]
    assert len(rows) == len(wanted) == 4 * BATCHES
    for row, other in zip(rows, wanted, strict=True):
        names = ("messages", "metadata", "opening", "tools", "transcript")
        texts = {name: json.loads(other[name]) for name in names}
        numbers = {name: dict(other[name]) for name in ("reward_parts", "env_rewards")}
        assert row == {**other, **texts, **numbers}
        assert list(row) == SCHEMA.names
    assert rows[1]["reward_parts"] == {"answer": 1.0, "overlong": -0.5}
    assert rows[1]["loss_mask"][:3] == [False, False, True]


@OUTPUTS
def test_other_config_is_refused_and_fresh_keeps_the_old_output(name, undisturbed, tmp_path):
    output = copied(undisturbed[name], tmp_path)
    with pytest.raises(UserError, match="config differs") as caught:
        write(output.path, seed=1, make=never)
    assert "--out PATH" in caught.value.next and "run.folder" not in str(caught.value)
    assert contents(output.path) == contents(undisturbed[name].path)
    write(output.path, seed=1, fresh=True, make=lambda number, clock: batch(number + 7, clock))
    assert contents(tmp_path / f"{name}.old-1") == contents(undisturbed[name].path)
    assert contents(output.path) != contents(undisturbed[name].path)


# With a model
# ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with data, a tiny model and a recipe: 7 problems, 2 in a batch."""
    folder = tmp_path_factory.mktemp("home")
    write_algebra(folder / "data", num_train=7, num_test=2, num_warm=2)
    make_tiny(folder / "model", hidden=32, layers=2, intermediate=64)
    (folder / "recipe.toml").write_text(
        "[data]\ntrain = 'data/train.jsonl'\n[model]\npath = 'model'\n"
    )
    return folder


def config(home):
    inputs = {"data__train": str(home / "data/train.jsonl"), "model__path": str(home / "model")}
    return stages.config(run__threads=1, rollout__max_new_tokens=6, rl__group_size=2, **inputs)


def private(home, folder):
    """A copy of home that a test may damage."""
    return shutil.copytree(home, folder / "home")


@pytest.fixture(scope="module")
def outputs(home, tmp_path_factory):
    folder = tmp_path_factory.mktemp("outputs") / "new"
    for name in ("episodes.jsonl", "episodes"):
        rollout(config(home), folder / name)
    return {name: Output(folder / name) for name in ("episodes.jsonl", "episodes")}


def test_every_problem_comes_once_in_order(home, outputs):
    data = str(home / "data/train.jsonl")
    uids = [problem.uid for problem in read_problems(data, Data(), key="data.train")]
    rows = [json.loads(line) for line in outputs["episodes.jsonl"].path.read_bytes().splitlines()]
    found = [(row["uid"], row["sample_index"]) for row in rows]
    assert found == [(uid, n) for uid in uids for n in range(2)]
    files = sorted(outputs["episodes"].path.glob("*.parquet"))
    assert [file.name for file in files] == [f"rollout_step_{n:06d}.parquet" for n in range(4)]
    written = [row["uid"] for file in files for row in pq.read_table(file).to_pylist()]
    assert written == [uid for uid, _ in found]


@OUTPUTS
def test_a_complete_rollout_says_so_and_loads_no_model(name, home, tmp_path, capsys):
    home, output = private(home, tmp_path), Output(tmp_path / name)
    rollout(config(home), output.path)
    before = contents(output.path)
    (home / "model/model.safetensors").write_bytes(b"no weights")
    about = json.loads((output.folder / ROLLOUT).read_text())
    (output.folder / ROLLOUT).write_text(json.dumps(about | {"inputs": hashes(config(home))}))
    capsys.readouterr()
    rollout(config(home), output.path)
    printed = capsys.readouterr().out
    assert printed.startswith("complete, nothing to do: 14 episodes, mean reward ")
    assert printed.count("\n") == 1
    assert contents(output.path) == before
    # the witness: a rollout that is not complete does
    with pytest.raises(UserError, match="model cannot be loaded"):
        rollout(config(home), tmp_path / "other")


def damage_weights(home):
    with (home / "model/model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")


def longer(name):
    """A function that appends a line to a file of home."""
    return lambda home: (home / name).write_text((home / name).read_text() + "\n")


CHANGES = {
    "data.train": longer("data/train.jsonl"),
    "model.path/model.safetensors": damage_weights,
    "model.path/tokenizer.json": longer("model/tokenizer.json"),
}


def test_other_inputs_are_refused_by_name_and_taken_with_fresh(home, tmp_path):
    home, out = private(home, tmp_path), tmp_path / "e.jsonl"
    rollout(config(home), out)
    before = out.read_bytes()
    for key, damage in CHANGES.items():
        kept = {file: file.read_bytes() for file in home.rglob("*") if file.is_file()}
        damage(home)
        with pytest.raises(UserError, match="has changed since the run began") as caught:
            rollout(config(home), out)
        error = caught.value
        assert error.where == key and error.expected and "--out PATH, or" in error.next
        for file, data in kept.items():
            file.write_bytes(data)
    assert out.read_bytes() == before
    damage_weights(home)
    rollout(config(home), out, fresh=True)
    assert (tmp_path / "e.jsonl.old-1").read_bytes() == before
    assert len(out.read_bytes().splitlines()) == 14


# Mistakes, before any work
# ------------------------------------------------------------------------------


def test_impossible_output_is_refused_before_any_work(home, tmp_path):
    (tmp_path / "mine.jsonl").write_text("{}\n")
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    for name, word in {
        "mine.jsonl": "something else",
        "folder.jsonl": "a folder",
        "other/notes.txt": "a file",
        "other": "holds something else",
    }.items():
        for fresh in (False, True):
            with pytest.raises(UserError, match=r".") as caught:
                rollout(config(home), tmp_path / name, fresh=fresh)
            assert word in str(caught.value)
            assert "--out" in caught.value.next + "--out" * ("none" in name)
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "mine.jsonl").read_text() == "{}\n"
