"""What a run wrote to its journal it reads back, and nobody else; a resumed step plays only what is
missing."""

from dataclasses import replace

import pytest

from tandem.config.schema import Eval, Rollout
from tandem.rollout.evaluate import evaluate
from tandem.run_folder.episode_files import episode_file, read_groups, write_episodes
from tandem.run_folder.journal import Journal
from tandem.runtime.errors import UserError
from tandem.step import train_step, update
from tests.support.waiting import eventually
from tests.test_step import (
    BY_UID,
    PROBLEMS,
    AddressedEngine,
    KeyReward,
    config,
    stages_in,
    weights_of,
)

HOW = {"rl__prompts_per_step": 3, "rl__group_size": 2}


def stages(folder, **changes):
    return stages_in(folder, config(**HOW | changes), engine=AddressedEngine(), reward=KeyReward())


def test_a_step_that_was_rolled_out_before_a_kill_is_learned_from_the_journal_alone(tmp_path):
    for changes in ({}, {"rl__max_gen_batches": 50}, {"rl__curriculum": True}):
        folder = tmp_path / str(sorted(changes))
        first, again = stages(folder, **changes), stages(folder, **changes)
        rows = [train_step(first, step, update) for step in range(4)]
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        for step, (metrics, _, state) in enumerate(rows):
            found, _, progress = train_step(again, step, update)
            assert (found, progress) == (metrics, state)
        assert weights_of(first) == weights_of(again) and not again.player.engine.requests
        assert not again.player.reward.items
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == files


def test_the_files_of_another_run_do_not_count_and_are_replaced(tmp_path):
    first = stages(tmp_path)
    train_step(first, 0, update)
    path = episode_file(tmp_path, 1)
    before = path.read_bytes()
    other = stages(tmp_path, run__seed=1)
    other = replace(other, journal=Journal(tmp_path, "another run", PROBLEMS))
    train_step(other, 0, update)
    assert len(other.player.engine.requests) == 6 and path.read_bytes() != before


@pytest.mark.parametrize("keep", [1, 4, 6])
def test_a_step_under_way_plays_only_the_episodes_that_no_part_has(keep, tmp_path):
    whole = stages(tmp_path / "whole")
    train_step(whole, 0, update)
    groups = read_groups(episode_file(tmp_path / "whole", 1), BY_UID)
    kept = [e.key for group in groups for e in group.episodes][-keep:]
    some = [replace(g, episodes=tuple(e for e in g.episodes if e.key in kept)) for g in groups]
    write_episodes(tmp_path / "again", 1, some, "part", note={"run": "run"}, part="_0_0")
    write_episodes(tmp_path / "again", 1, groups, "part", note={"run": "another run"}, part="_0_1")
    again = stages(tmp_path / "again")
    train_step(again, 0, update)
    assert sorted(r.key for r in again.player.engine.requests) == sorted(
        e.key for g in groups for e in g.episodes if e.key not in kept
    )
    assert len(again.player.reward.items) == 6 - keep
    assert weights_of(again) == weights_of(whole)
    # the parts are gone
    assert [path.name for path in (tmp_path / "again").iterdir()] == ["train_step_000001.parquet"]
    assert (
        episode_file(tmp_path / "again", 1).read_bytes()
        == episode_file(tmp_path / "whole", 1).read_bytes()
    )


def test_an_episode_is_durable_soon_after_it_was_scored(tmp_path):
    whole = stages(tmp_path / "whole")
    train_step(whole, 0, update)
    groups = read_groups(episode_file(tmp_path / "whole", 1), BY_UID)
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


def test_what_is_left_of_a_step_that_is_not_over_is_written_at_its_end(tmp_path):
    train_step(stages(tmp_path / "whole"), 0, update)
    groups = read_groups(episode_file(tmp_path / "whole", 1), BY_UID)
    journal = Journal(tmp_path / "run", "run", PROBLEMS)
    for last in (True, False):
        with journal.parts(1, 0, [g.problem for g in groups], last) as parts:
            parts.add(1, groups[1].episodes[0])
        with journal.parts(1, 0, [g.problem for g in groups], True) as parts:
            assert list(parts.ended) == ([] if last else [groups[1].episodes[0].key])


def test_a_damaged_part_costs_its_episodes_only(tmp_path):
    train_step(stages(tmp_path / "whole"), 0, update)
    groups = read_groups(episode_file(tmp_path / "whole", 1), BY_UID)
    (tmp_path / "again").mkdir()
    (tmp_path / "again/part_step_000001_0_0.parquet").write_bytes(b"no parquet")
    again = stages(tmp_path / "again")
    train_step(again, 0, update)
    assert len(again.player.engine.requests) == sum(len(g.episodes) for g in groups)


def test_a_disk_that_takes_no_part_stops_the_step(tmp_path):
    journal = Journal(tmp_path / "a file", "run", PROBLEMS)
    (tmp_path / "a file").write_text("in the way")
    whole = stages(tmp_path / "whole")
    train_step(whole, 0, update)
    groups = read_groups(episode_file(tmp_path / "whole", 1), BY_UID)
    with (
        pytest.raises(UserError, match="cannot be written"),
        journal.parts(1, 0, [g.problem for g in groups], True) as parts,
    ):
        parts.add(0, groups[0].episodes[0])
        assert eventually(lambda: parts._error)


def test_a_start_removes_half_files_and_parts_of_steps_that_are_complete(tmp_path):
    first = stages(tmp_path)
    train_step(first, 0, update)
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
    player = stages(tmp_path).player
    how = {
        "seed": 0,
        "how": Eval(samples=2),
        "rollout": Rollout(max_new_tokens=6),
        "stop_token_ids": (),
    }
    metrics, groups = evaluate(player, PROBLEMS, **how)
    made = len(player.engine.requests)
    assert (
        evaluate(player, PROBLEMS, known=groups, **how) == (metrics, groups)
        and len(player.engine.requests) == made
    )
    half = evaluate(player, PROBLEMS, known={"greedy": groups["greedy"]}, **how)
    assert half[0] == metrics and len(player.engine.requests) == made + 2 * len(PROBLEMS)


def test_groups_of_problems_that_the_data_does_not_have_are_refused(tmp_path):
    train_step(stages(tmp_path), 0, update)
    with pytest.raises(UserError, match="problems that the data does not have"):
        read_groups(episode_file(tmp_path, 1), {"p9": PROBLEMS[0]})
