"""A run folder, read: rows of steps that are told, the episodes of a step, and what is refused."""

import json

import pytest

from tandem.config.recipe import to_toml
from tandem.config.schema import Config
from tandem.run_folder.episode_files import write_episodes
from tandem.run_folder.metrics import MetricsWriter
from tandem.run_folder.read import altered, open_past, require_step
from tandem.runtime.disk import file_hash
from tandem.runtime.errors import UserError
from tandem.types import Group, Problem
from tests.support.attempts import attempt


def a_group(uid, outcome="train"):
    problem = Problem(
        uid=uid, messages=({"role": "user", "content": uid},), answer="3", metadata={"level": 1}
    )
    episodes = attempt(uid, 0, (5, 9, 7), 2, key=1), attempt(uid, 1, (1, 2, 3, 4), 2, key=2)
    return Group(problem=problem, episodes=episodes, outcome=outcome)


@pytest.fixture
def run(tmp_path):
    """Two steps told and a third that the ledger has already."""
    (tmp_path / "config.toml").write_text(to_toml(Config()))
    (tmp_path / "run.json").write_text('{"command": "train", "created": "", "directory": ""}')
    rows = [{"step": step, "weights": f"w{step}", "episodes": ""} for step in range(4)]
    (tmp_path / "ledger.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 0}\n{"step": 1}\n{"step": 2, "reward": 0.5}\n{"step": 3, "rew'
    )
    return tmp_path


def test_a_step_that_is_not_told_is_refused(run):
    past = open_past(run)
    require_step(past, 2)
    for step in (0, 3, -1):
        with pytest.raises(UserError, match=f"(?s)no such step.*step {step}\n.*1 to 2"):
            require_step(past, step)
    (run / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match="has not ended one yet"):
        require_step(open_past(run), 1)


def test_inputs_are_those_of_the_newest_readable_checkpoint(run):
    assert open_past(run).inputs() is None
    for step, digest in ((3, "old"), (12, "new")):
        folder = run / "checkpoints" / f"step_{step:06d}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(
            json.dumps({"step": step, "data": {"data.train": digest}})
        )
    assert open_past(run).inputs() == {"data.train": "new"}
    (folder / "state.json").write_text("{")
    assert open_past(run).inputs() == {"data.train": "old"}


@pytest.fixture
def kept(tmp_path):
    """Two steps as a run keeps them; the second with an evaluation."""
    with MetricsWriter(tmp_path, 0) as writer:
        for step in (0, 1, 2):
            files = [write_episodes(tmp_path / "episodes", step, [a_group("a")])] if step else []
            ledger = {"weights": "w", "episodes": file_hash(files[0]) if files else ""}
            if step == 2:
                ledger["eval_greedy"] = file_hash(
                    write_episodes(tmp_path / "episodes", 2, [a_group("b")], "eval_greedy")
                )
            writer.write(step, {"reward": 0.5 * step}, {}, ledger)
    return tmp_path


def test_a_folder_that_is_as_it_was_written_has_nothing_altered(kept):
    assert altered(kept, 2) == []


@pytest.mark.parametrize(
    ("name", "step"),
    [("train_step_000001", 1), ("train_step_000002", 2), ("eval_greedy_step_000002", 2)],
)
@pytest.mark.parametrize("gone", [False, True])
def test_a_changed_or_missing_file_of_any_step_is_named(kept, name, step, gone):
    name = f"episodes/{name}.parquet"
    path = kept / name
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    if gone:
        path.unlink()
    [found] = altered(kept, 2)
    assert (found.step, found.what) == (step, name) and (found.found == "") == gone
    assert altered(kept, step - 1) == [] and name in str(found)


def test_changed_or_missing_row_of_metrics_or_ledger_is_named(kept):
    for name, old, new, what in (
        ("metrics.jsonl", '"reward": 0.5', '"reward": 0.6', "the row of step 1 in metrics.jsonl"),
        ("metrics.jsonl", '{"step": 1, "reward": 0.5}\n', "", "the row of step 1 in metrics.jsonl"),
        ("ledger.jsonl", '"step": 1', '"step": 7', "the row of step 1 in ledger.jsonl"),
    ):
        text = (kept / name).read_text()
        assert old in text
        (kept / name).write_text(text.replace(old, new))
        assert [one.what for one in altered(kept, 2)] == [what]
        (kept / name).write_text(text)
