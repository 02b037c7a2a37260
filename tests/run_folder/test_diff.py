"""The first difference of two runs: the step, and in it the first episode and token, or the first
number of learning."""

from dataclasses import replace

import numpy as np
import pytest

from tandem.plugins.audit.show import diff, difference
from tandem.run_folder.diff import compare_episodes, compare_runs
from tandem.run_folder.episode_files import episode_file, read_note, write_episodes
from tandem.run_folder.metrics import read_metrics
from tandem.run_folder.read import open_past, read_step
from tandem.runtime.disk import file_hash
from tandem.runtime.errors import UserError
from tests.support.attempts import attempt
from tests.support.past_runs import change_first, copy_of, edit, past_run, rewrite


@pytest.fixture
def pair(tmp_path):
    """A past run, and a copy of it that a test may change."""
    return past_run("ema"), copy_of(past_run("ema"), tmp_path)


def first_divergence(a, b):
    found = compare_runs(open_past(a), open_past(b))
    assert found.divergence is not None
    return found.step, found.divergence.what, found.divergence.a, found.divergence.b


def test_a_run_and_its_copy_are_equal_to_the_last_bit(pair, capsys):
    run, copy = pair
    found = compare_runs(open_past(run), open_past(copy))
    assert (found.divergence, found.steps) == (None, 4)
    assert found.config == found.inputs == found.other_bytes == []
    assert diff(run, copy) == 0
    assert capsys.readouterr().out.endswith("equal to the last bit over 4 steps\n")


def test_config_differences_are_listed_and_not_judged(pair):
    run, other = pair
    edit(other / "config.toml", "workers = 0", "workers = 2")
    found = compare_runs(open_past(run), open_past(other))
    assert [(p.what, p.a, p.b) for p in found.config] == [("rollout.workers", "0", "2")]
    assert found.divergence is None


def test_equal_episodes_in_other_bytes_are_equal(pair):
    """The note of a journal file names the settings of its run."""
    run, other = pair
    path = episode_file(other / "episodes", 2)
    note = {**read_note(path), "run": "another"}
    write_episodes(other / "episodes", 2, read_step(path), note=note)
    edit(other / "ledger.jsonl", read_metrics(run, "ledger.jsonl")[2]["episodes"], file_hash(path))
    found = compare_runs(open_past(run), open_past(other))
    assert (found.divergence, found.other_bytes) == (None, [2])
    assert " of 1 step hold equal episodes " in difference(found, "a", "b")[-2]


def test_the_first_token_that_differs_is_named_with_both(pair):
    run, other = pair
    seen = {}

    def change(row, place, e):
        if (row, place) != (1, 1):
            return e
        at = int(np.flatnonzero(e.loss_mask)[-1])
        seen.update(uid=e.uid, at=at, token=int(e.tokens[at]))
        changed = e.tokens.copy()
        changed[at] = 0
        return replace(e, tokens=changed)

    rewrite(other, 3, change)
    edit(other / "ledger.jsonl", read_metrics(run, "ledger.jsonl")[3]["episodes"], "another")
    what = f"episode {seen['uid']}:1, position {seen['at']}: token"
    assert first_divergence(run, other) == (3, what, str(seen["token"]), "0")
    assert diff(run, other) == 1


def test_equal_episodes_with_another_metric_or_other_weights_diverge_there(tmp_path):
    run = past_run("sft")
    other = copy_of(run, tmp_path)
    hashes = [row["weights"] for row in read_metrics(run, "ledger.jsonl")]
    for step, what in ((3, "weights after the step"), (0, "starting weights")):
        edit(other / "ledger.jsonl", hashes[step], hashes[1])
        assert first_divergence(run, other) == (step, what, hashes[step], hashes[1])
    grad_norm = read_metrics(run)[2]["grad_norm"]
    edit(other / "metrics.jsonl", f'"grad_norm": {grad_norm}', '"grad_norm": 0.125')
    edit(other / "ledger.jsonl", hashes[1], hashes[0])
    assert first_divergence(run, other) == (2, "grad_norm", repr(grad_norm), "0.125")


def test_shorter_run_is_compared_up_to_its_last_whole_row(pair, capsys):
    run, other = pair
    for name in ("metrics.jsonl", "ledger.jsonl"):
        lines = (other / name).read_bytes().splitlines(keepends=True)
        (other / name).write_bytes(b"".join(lines[:3]) + lines[3][:-5])
    found = compare_runs(open_past(run), open_past(other))
    assert (found.divergence, found.steps, found.last) == (None, 2, (4, 2))
    assert diff(run, other) == 0
    assert "equal to the last bit over 2 steps, all that both have" in capsys.readouterr().out


def test_other_evaluation_diverges_after_everything_else(pair):
    run, other = pair
    row = read_metrics(run)[0]
    edit(other / "metrics.jsonl", f'"eval/sampled": {row["eval/sampled"]}', '"eval/sampled": 0.125')
    assert first_divergence(run, other) == (0, "eval/sampled", repr(row["eval/sampled"]), "0.125")
    edit(
        other / "metrics.jsonl",
        f'"grad_norm": {read_metrics(run)[3]["grad_norm"]}',
        '"grad_norm": 0.125',
    )
    assert first_divergence(run, other)[:2] == (3, "grad_norm")


def test_runs_without_a_common_step_are_refused(pair):
    run, other = pair
    (other / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match="nothing to compare yet"):
        compare_runs(open_past(run), open_past(other))


@pytest.mark.parametrize(
    ("change", "what", "a", "b"),
    [
        ({"tokens": np.array([5, 9, 2, 7, 3])}, "position 4: token", "1", "3"),
        ({"tokens": np.array([5, 9, 2, 7])}, "position 4: token", "1", "its end"),
        (
            {"weight_versions": np.array([-1, -1, -1, 3, 4], np.int32)},
            "position 3: weight version",
            "4",
            "3",
        ),
        (
            {"penalties": np.array([0, 0, 0, 0, -0.0], np.float32)},
            "position 4: penalty",
            "0.0",
            "-0.0",
        ),
        (
            {
                "tokens": np.array([5, 9, 2, 7, 3]),
                "weight_versions": np.array([-1, -1, -1, 3, 4], np.int32),
            },
            "position 3: weight version",
            "4",
            "3",
        ),
        ({"stop_reason": "stop"}, "stop_reason", "'length'", "'stop'"),
        ({"reward_parts": {"x": 1.0}}, "reward_parts", "{}", "{'x': 1.0}"),
    ],
)
def test_first_divergence_of_two_episodes_is_named(change, what, a, b):
    one = attempt(stop_reason="length", messages=())
    found = next(compare_episodes(one, replace(one, **change)))
    assert found.what.endswith(what) and (found.a, found.b) == (a, b)
    assert list(compare_episodes(one, replace(one))) == []


def test_a_run_whose_files_were_changed_is_never_equal(tmp_path, capsys):
    """Also where the ledger says what it said before."""
    run = past_run("ema")
    for name, place in (
        ("episodes", tmp_path / "a"),
        ("metrics", tmp_path / "b"),
        ("evaluation", tmp_path / "c"),
    ):
        place.mkdir()
        copy = copy_of(run, place)
        if name == "episodes":
            change_first(copy, 2, reward=9.0)
        elif name == "metrics":
            edit(copy / "metrics.jsonl", '"step": 3', '"step": 3, "else": 1')
        else:
            path = next((copy / "episodes").glob("eval_sampled_step_000004.parquet"))
            path.write_bytes(path.read_bytes() + b" ")
        for two in ((run, copy), (copy, run), (copy, copy)):
            assert diff(*two) == 1
            told = capsys.readouterr().out
            assert "is not as it was written: " in told and "equal to the last bit" not in told
