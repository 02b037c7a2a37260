"""The journal: what is written is what is read, to the bit, by Tandem and by pyarrow alone."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tandem.plugins.rollouts.rollout import cut_episodes
from tandem.run_folder.episode_files import read_episodes, read_groups, write_episodes
from tandem.runtime.errors import UserError
from tandem.types import Episode, Group, Problem


def random_floats(rng, count):
    """Any 32 bits: NaNs of every kind, infinities, denormals, both zeros."""
    return rng.integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32)


def episode(rng, uid, sample_index, length):
    return Episode(
        uid=uid,
        sample_index=sample_index,
        tokens=rng.integers(0, 1 << 40, length),
        loss_mask=rng.random(length) < 0.5,
        engine_logprobs=random_floats(rng, length),
        weight_versions=rng.integers(-1, 1 << 20, length, dtype=np.int32),
        num_prompt_tokens=min(2, length),
        penalties=rng.random(length, np.float32),
        messages=(
            {"role": "assistant", "content": f"x = {sample_index} é 数\n\0" * (sample_index % 3)},
        )
        * (1 + sample_index),
        stop_reason="length" if sample_index % 2 else "stop",
        opening=({"role": "user", "content": "Hé"},) * (sample_index % 2),
        tools=({"type": "function", "function": {"name": "f"}},) * (sample_index % 3),
        env_rewards={"env": -0.5, "moves": 3.0} if sample_index else {},
        env_error="it fell over" if sample_index % 2 else "",
        masked=bool(sample_index % 2),
        reward=float(rng.random()) * -1,
        reward_parts={"b": float(rng.random()), "a": -0.0} if sample_index else {},
        reward_error="" if sample_index else "timeout",
    )


def group(rng, uid, lengths):
    problem = Problem(
        uid=uid,
        messages=(
            {"role": "system", "content": "Sei kurz."},
            {"role": "user", "content": f'"{uid}" é?'},
        ),
        answer="3/4",
        category="linear",
        metadata={"level": 2, "tags": ["a"]},
    )
    return Group(
        problem=problem,
        episodes=tuple(episode(rng, uid, i, length) for i, length in enumerate(lengths)),
    )


def some_groups(seed=0):
    rng = np.random.default_rng(seed)
    return [group(rng, "algebra/1", [5, 0, 300]), group(rng, "algebra/0", [1, 7, 2])]


def bits(value):
    return (
        (value.dtype, value.tobytes())
        if isinstance(value, np.ndarray)
        else (type(value), repr(value))
    )


def assert_same(found, wanted):
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert {n: bits(getattr(a, n)) for n in Episode.__slots__} == {
            n: bits(getattr(b, n)) for n in Episode.__slots__
        }


def test_groups_are_read_back_to_the_bit_and_in_order(tmp_path):
    rng = np.random.default_rng(0)
    outcomes = ["train", "carry", "no_signal", "train", "carry", "carry"]
    lengths = [[3, 1], [2], [5, 5, 5], [4], [1, 2, 3], [7]]
    groups = [
        # p0 and p1 come twice, once in each outcome
        replace(group(rng, f"p{n % 4}", sizes), outcome=outcome)
        for n, (outcome, sizes) in enumerate(zip(outcomes, lengths, strict=True))
    ]
    problems = {g.problem.uid: g.problem for g in groups}
    path = write_episodes(tmp_path / "episodes", 3, groups)
    assert path == tmp_path / "episodes" / "train_step_000003.parquet"
    found = read_groups(path, problems)
    assert [(g.problem, g.outcome) for g in found] == [(g.problem, g.outcome) for g in groups]
    for one, other in zip(found, groups, strict=True):
        assert_same(one.episodes, other.episodes)


def test_pyarrow_alone_reads_every_column(tmp_path):
    groups = some_groups()
    table = pq.read_table(write_episodes(tmp_path, 7, groups))
    row = table.slice(3, 1).to_pylist()[0]
    problem, wanted = groups[1].problem, groups[1].episodes[0]
    assert row["step"] == 7
    assert row["group"] == 1
    assert row["uid"] == "algebra/0"
    assert row["sample_index"] == 0
    assert row["category"] == "linear"
    assert row["answer"] == "3/4"
    assert json.loads(row["metadata"]) == problem.metadata
    assert tuple(json.loads(row["messages"])) == problem.messages
    assert row["tokens"] == wanted.tokens.tolist() and row["loss_mask"] == wanted.loss_mask.tolist()
    assert set(Episode.__slots__) - {"experts", "starts"} <= set(table.column_names)
    assert not any(pa.types.is_binary(f.type) for f in table.schema)


def test_the_same_episodes_give_the_same_bytes(tmp_path):
    first, second = (write_episodes(tmp_path / name, 3, some_groups()) for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes() != write_episodes(tmp_path / "c", 3, some_groups(seed=1)).read_bytes()


def test_cutting_removes_later_steps_and_unfinished_files(tmp_path):
    for step in (1, 2, 10):
        write_episodes(tmp_path, step, [])
    write_episodes(tmp_path, 2, [], kind="eval")
    for name in (".tmp-train_step_000011.parquet", "notes.parquet"):
        (tmp_path / name).write_bytes(b"")
    removed = cut_episodes(tmp_path, after_step=1)
    assert [p.name for p in removed] == [
        "eval_step_000002.parquet",
        "train_step_000002.parquet",
        "train_step_000010.parquet",
    ]
    left = sorted(p.name for p in tmp_path.iterdir())
    assert left == ["notes.parquet", "train_step_000001.parquet"]
    assert cut_episodes(tmp_path / "absent", 0) == []


def test_a_flipped_byte_in_the_data_is_found(tmp_path):
    path = write_episodes(tmp_path, 1, some_groups())
    good = path.read_bytes()
    footer = int.from_bytes(good[-8:-4], "little") + 8
    for place in range(4, len(good) - footer, 97):
        data = bytearray(good)
        data[place] ^= 16
        path.write_bytes(data)
        try:
            found = read_episodes(path)
        except UserError as error:
            assert error.where == str(path) and error.next
        else:
            # a byte that means nothing
            assert_same(found, [e for g in some_groups() for e in g.episodes])


@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"PAR1" * 9]
)
def test_a_file_that_is_not_whole_is_an_error_for_the_user(tmp_path, damage):
    path = write_episodes(tmp_path, 1, some_groups())
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match="cannot be read"):
        read_episodes(path)


def test_experts_of_episodes_are_a_column_only_where_there_are_some(tmp_path):
    """An episode that never got a token has none."""
    rng = np.random.default_rng(0)
    groups = [group(rng, "a", [3, 5]), group(rng, "b", [4])]
    path = write_episodes(tmp_path, 1, groups)
    assert "experts" not in pq.read_schema(path).names
    assert {e.experts.shape for e in read_episodes(path)} == {(0, 0, 0)}

    def routed(episode):
        rows = len(episode.tokens) - 1
        experts = rng.integers(0, 1 << 15, (rows, 3, 2), dtype=np.int16)
        return replace(episode, experts=experts) if rows > 2 else episode

    groups = [replace(g, episodes=tuple(map(routed, g.episodes))) for g in groups]
    path = write_episodes(tmp_path, 2, groups)
    written = [e.experts for g in groups for e in g.episodes]
    read = [e.experts for e in read_episodes(path)]
    assert [e.tobytes() for e in read] == [e.tobytes() for e in written]
    assert [(e.shape, e.dtype) for e in read] == [(e.shape, e.dtype) for e in written]
    assert [e.shape for e in read] == [(0, 0, 0), (4, 3, 2), (3, 3, 2)]
    assert [e.experts.tobytes() for g in read_groups(path) for e in g.episodes] == [
        e.tobytes() for e in written
    ]
