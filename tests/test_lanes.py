"""Several steps rolled out at once give what step after step gives; errors, ends and the journal
stay in order."""

import threading
from contextlib import closing
from pathlib import Path

import pytest

from tandem.rollout.collect import steps_at_once
from tandem.runtime.errors import UserError
from tandem.step_async import RolloutPrefetcher
from tests.support.ahead import (
    STEPS,
    VersionedEngine,
    journal_of,
    lanes_of,
    ran,
    stages_ahead,
    trained,
    versions,
)
from tests.support.stages import config, weights_of
from tests.support.waiting import WAIT_S, eventually


def lane_is_over(number):
    return f"rollouts {number}" not in {thread.name for thread in threading.enumerate()}


class Moments:
    """Events of the steps; `before(step)` is called before its requests are answered."""

    def __init__(self, count):
        self.asked = [threading.Event() for _ in range(STEPS + count)]
        self.before = lambda step: None
        self.engines = [LaneEngine(self, number, count) for number in range(count)]


class LaneEngine(VersionedEngine):
    """The engine of a lane, which knows the step: each `apply` is for the lane's next one."""

    def __init__(self, moments, number, count):
        super().__init__()
        self.moments, self.at, self.count = moments, number - count, count

    def apply(self, version):
        super().apply(version)
        self.at += self.count

    def generate(self, requests):
        if requests:
            self.moments.asked[self.at].set()
            self.moments.before(self.at)
        return super().generate(requests)


def at_once(folder, count, **changes):
    """Stages with `count` lanes, and the moments of their engines."""
    stages = stages_ahead(folder, count - 1, 1, **changes)
    moments = Moments(count)
    return stages, lanes_of(stages, moments.engines), moments


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("changes", [{}, {"rl__advantage": "ema"}], ids=str)
def test_steps_at_once_give_the_bits_of_step_after_step(count, changes, tmp_path):
    """No step is answered before the next ones have asked."""
    inline, rows = ran(tmp_path / "inline", count - 1, 0, **changes)
    stages, lanes, moments = at_once(tmp_path / "lanes", count, **changes)

    def before(step):
        for later in moments.asked[step + 1 : min(step + count, STEPS)]:
            assert later.wait(WAIT_S)

    moments.before = before
    assert trained(stages, lanes, saves=False) == rows  # a save waits for steps that wait for later
    assert weights_of(stages) == weights_of(inline)
    assert journal_of(tmp_path / "lanes") == journal_of(tmp_path / "inline")
    turns = [{max(0, step - count + 1)} for step in range(STEPS)]
    assert [versions(tmp_path / "lanes", step) for step in range(STEPS)] == turns


def test_a_resumed_run_takes_up_the_journal_and_goes_on_at_once(tmp_path):
    _, rows = ran(tmp_path, 1, 0)
    whole = journal_of(tmp_path)
    for path in sorted(tmp_path.glob("train_step_*"))[4:]:
        path.unlink()
    stages, lanes, _ = at_once(tmp_path, 2)
    assert trained(stages, lanes) == rows and journal_of(tmp_path) == whole


def test_a_step_that_ends_early_is_kept_in_parts_until_its_turn(tmp_path):
    stages, lanes, moments = at_once(tmp_path, 2)
    seen = []

    def before(step):
        if step == 0:
            assert eventually(lambda: list(tmp_path.glob("part_step_000002_*")))
            seen.extend(tmp_path.glob("train_step_*"))

    moments.before = before
    trained(stages, lanes)
    assert seen == []
    assert len(list(tmp_path.glob("train_step_*"))) == STEPS
    assert not list(tmp_path.glob("part_*"))


def test_an_error_is_raised_for_its_step_and_not_before(tmp_path):
    """Step 2 ends after step 3 has failed."""
    stages, lanes, moments = at_once(tmp_path, 2)

    def before(step):
        if step == 2:
            assert moments.asked[3].wait(WAIT_S)
            assert eventually(lambda: lane_is_over(1))
        if step == 3:
            raise RuntimeError("the engine fell over")

    moments.before = before
    with closing(RolloutPrefetcher(stages, STEPS, lanes=lanes)) as prefetcher:
        stages.sync.publish(0)
        prefetcher.start(0)
        for step in range(3):
            assert prefetcher.get(step)[0].step == step
            prefetcher.publish(step + 1)
        with pytest.raises(RuntimeError, match="fell over"):
            prefetcher.get(3)
        with pytest.raises(RuntimeError, match="fell over"):
            prefetcher.wait_until_durable(3)
        assert eventually(lambda: lane_is_over(0))
    names = {path.name for path in tmp_path.glob("train_step_*")}
    assert names == {f"train_step_{step:06d}.parquet" for step in (1, 2, 3)}


def test_a_run_that_is_left_midway_ends_every_lane(tmp_path):
    stages, lanes, moments = at_once(tmp_path, 3)
    over = threading.Event()

    def before(step):
        if step > 0:
            assert over.wait(WAIT_S)
            raise RuntimeError("the rollout workers are closed")

    moments.before = before
    prefetcher = RolloutPrefetcher(stages, STEPS, over.set, lanes)
    stages.sync.publish(0)
    prefetcher.start(0)
    prefetcher.get(0)
    prefetcher.publish(1)
    for step in (1, 2, 3):
        assert moments.asked[step].wait(WAIT_S)
    prefetcher.stop_soon()
    with pytest.raises(UserError, match="rollouts of older weights have not ended"):
        prefetcher.wait_until_durable(1)
    prefetcher.close()
    assert eventually(lambda: all(lane_is_over(number) for number in range(3)))
    assert [path.name for path in Path(tmp_path).glob("train_*")] == ["train_step_000001.parquet"]


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 3),
        ({"rl__advantage": "ema"}, 3),
        ({"rollout__workers": 0}, 1),
        ({"rl__max_gen_batches": 4}, 1),
        ({"rl__curriculum": True}, 1),
        ({"rollout__token_budget": 16}, 1),
    ],
    ids=str,
)
def test_steps_that_need_what_the_last_one_leaves_are_rolled_out_alone(changes, count):
    settings = {"rollout__staleness": 2, "rollout__workers": 2, "rl__correction": "tis"}
    assert steps_at_once(config(**{**settings, **changes})) == count
