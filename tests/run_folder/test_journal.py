"""The journal: a run reads back what it wrote, and nobody else does; a resumed step plays only what
is missing."""

from dataclasses import replace

import pytest

from tandem.rollout.evaluate import Evaluator
from tandem.run_folder.episode_files import episode_file, read_groups, write_episodes
from tandem.run_folder.journal import Journal
from tandem.runtime.errors import UserError
from tandem.step import train_step
from tests.support.stages import (
    BY_UID,
    PROBLEMS,
    AddressedEngine,
    KeyReward,
    config,
    stages_in,
    weights_of,
)
from tests.support.waiting import eventually

SIZE = {"rl__prompts_per_step": 3, "rl__group_size": 2}


def stages(folder, run="run", **changes):
    settings = config(**SIZE | changes)
    return stages_in(folder, settings, engine=AddressedEngine(), reward=KeyReward(), run=run)


@pytest.fixture
def whole(tmp_path):
    """The stages of a run that has made a step, and its groups."""
    made = stages(tmp_path / "whole")
    train_step(made, 0)
    return made, read_groups(episode_file(tmp_path / "whole", 1), BY_UID)


def test_step_rolled_out_before_a_kill_is_read_from_the_journal(tmp_path):
    for changes in ({}, {"rl__max_gen_batches": 50}, {"rl__curriculum": True}):
        folder = tmp_path / str(sorted(changes))
        first, again = stages(folder, **changes), stages(folder, **changes)
        rows = [train_step(first, step) for step in range(4)]
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        for step, first_time in enumerate(rows):
            result = train_step(again, step)
            assert (result.metrics, result.state) == (first_time.metrics, first_time.state)
        assert weights_of(first) == weights_of(again) and not again.collector.runner.engine.requests
        assert not again.collector.runner.rewards.items
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == files


def test_the_files_of_another_run_do_not_count_and_are_replaced(tmp_path):
    first = stages(tmp_path)
    train_step(first, 0)
    path = episode_file(tmp_path, 1)
    before = path.read_bytes()
    other = stages(tmp_path, "another run", run__seed=1)
    train_step(other, 0)
    assert len(other.collector.runner.engine.requests) == 6 and path.read_bytes() != before


@pytest.mark.parametrize("keep", [1, 4, 6])
def test_step_under_way_plays_only_the_missing_episodes(keep, whole, tmp_path):
    made, groups = whole
    kept = [e.key for group in groups for e in group.episodes][-keep:]
    some = [replace(g, episodes=tuple(e for e in g.episodes if e.key in kept)) for g in groups]
    write_episodes(tmp_path / "again", 1, some, "part", note={"run": "run"}, part="_0_0")
    write_episodes(tmp_path / "again", 1, groups, "part", note={"run": "another run"}, part="_0_1")
    again = stages(tmp_path / "again")
    train_step(again, 0)
    missing = [e.key for g in groups for e in g.episodes if e.key not in kept]
    assert sorted(r.key for r in again.collector.runner.engine.requests) == sorted(missing)
    assert len(again.collector.runner.rewards.items) == 6 - keep
    assert weights_of(again) == weights_of(made)
    # the parts are gone
    assert [path.name for path in (tmp_path / "again").iterdir()] == ["train_step_000001.parquet"]
    files = [episode_file(tmp_path / name, 1).read_bytes() for name in ("again", "whole")]
    assert files[0] == files[1]


def test_an_episode_is_durable_soon_after_it_was_scored(whole, tmp_path):
    _, groups = whole
    journal = Journal(tmp_path / "run", "run", PROBLEMS)
    with journal.parts(1, 0, [g.problem for g in groups], True) as parts:
        assert parts.ended == {}
        parts.add(2, groups[2].episodes[1])
        assert eventually(lambda: list((tmp_path / "run").glob("part_step_000001_0_0.parquet")))
        parts.add(0, groups[0].episodes[0])
        assert eventually(lambda: list((tmp_path / "run").glob("part_step_000001_0_1.parquet")))
    with journal.parts(1, 0, [g.problem for g in groups], True) as parts:
        expected = {e.key: e for e in (groups[2].episodes[1], groups[0].episodes[0])}
        assert repr(sorted(parts.ended.items())) == repr(sorted(expected.items()))
    with journal.parts(1, 1, [g.problem for g in groups], True) as parts:
        assert parts.ended == {}  # another tick of the step


def test_a_damaged_part_costs_its_episodes_only(whole, tmp_path):
    _, groups = whole
    (tmp_path / "again").mkdir()
    (tmp_path / "again/part_step_000001_0_0.parquet").write_bytes(b"no parquet")
    again = stages(tmp_path / "again")
    train_step(again, 0)
    assert len(again.collector.runner.engine.requests) == sum(len(g.episodes) for g in groups)


def test_a_disk_that_takes_no_part_stops_the_step(whole, tmp_path):
    _, groups = whole
    journal = Journal(tmp_path / "a file", "run", PROBLEMS)
    (tmp_path / "a file").write_text("in the way")
    with (
        pytest.raises(UserError, match="cannot be written"),
        journal.parts(1, 0, [g.problem for g in groups], True) as parts,
    ):
        parts.add(0, groups[0].episodes[0])
        assert eventually(lambda: parts._error)


def test_start_removes_half_files_and_parts_of_complete_steps(tmp_path):
    first = stages(tmp_path)
    train_step(first, 0)
    groups = read_groups(episode_file(tmp_path, 1), BY_UID)
    for step in (1, 2):
        write_episodes(tmp_path, step, groups, "part", note={"run": "run"}, part="_0_0")
    (tmp_path / ".tmp-train_step_000002.parquet").write_bytes(b"half")
    first.journal.clean()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "part_step_000002_0_0.parquet",
        "train_step_000001.parquet",
    ]


def test_an_evaluation_that_was_made_is_not_made_again(tmp_path):
    made = stages(tmp_path, eval__samples=2, rollout__max_new_tokens=6)
    requests = made.collector.runner.engine.requests
    evaluate = Evaluator(
        config=made.config, problems=PROBLEMS, runner=made.collector.runner, journal=made.journal
    )
    metrics, count = evaluate(3), len(requests)
    assert evaluate(3) == metrics and len(requests) == count == 3 * len(PROBLEMS)
    episode_file(tmp_path, 3, "eval_sampled").unlink()
    assert evaluate(3) == metrics and len(requests) == count + 2 * len(PROBLEMS)


def test_groups_of_unknown_problems_are_refused(tmp_path):
    train_step(stages(tmp_path), 0)
    with pytest.raises(UserError, match="problems that the data does not have"):
        read_groups(episode_file(tmp_path, 1), {"p9": PROBLEMS[0]})


def test_another_mesh_drops_the_episodes_of_weights_that_it_makes_anew(tmp_path):
    one = Journal(tmp_path, "run", PROBLEMS)
    two = Journal(tmp_path, "run", PROBLEMS, "data=2")
    for step in (1, 2, 3, 4):
        for kind in ("train", "eval_greedy"):
            (two if step < 4 else one).write(step, [], kind)
    two.drop_other_meshes(2, staleness=0)
    kept = {path.name for path in tmp_path.iterdir()}
    assert episode_file(tmp_path, 3).name in kept and episode_file(tmp_path, 4).name not in kept
    one.drop_other_meshes(1, staleness=0)
    steps = {kind: [s for s in range(6) if one.read(s, kind)] for kind in ("train", "eval_greedy")}
    # the rollouts of step 2 are by the weights of step 1, which are those of the checkpoint
    assert steps == {"train": [1, 2], "eval_greedy": [1]}


def test_rollouts_ahead_by_weights_of_before_the_checkpoint_stay(tmp_path):
    two = Journal(tmp_path, "run", PROBLEMS, "data=2")
    for step in (1, 2, 3, 4):
        two.write(step, [])
    one = Journal(tmp_path, "run", PROBLEMS)
    one.drop_other_meshes(1, staleness=1)
    assert [step for step in range(6) if one.read(step)] == [1, 2, 3]
