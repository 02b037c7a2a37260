"""A step learned again from the run folder: equal to the last bit, or the first thing that is not,
by name."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from tandem.plugins.audit.replay import replay
from tandem.plugins.audit.rescore import rescore
from tandem.run_folder.episode_files import read_groups
from tandem.run_folder.metrics import read_metrics
from tandem.run_folder.read import open_past
from tandem.runtime.disk import file_hash
from tandem.runtime.errors import UserError
from tests.support.home import invoke, mistake
from tests.support.past_runs import PARTIAL, change_first, copy_of, edit, past_run, rewrite
from tests.support.runs import REWARD

KINDS = ["dapo, narrow", "ema", "ppo, lora", PARTIAL, "sft"]
WITH_EPISODES = set(KINDS) - {"sft"}


def again(run, step):
    return replay(open_past(run), step, lambda text: None)


def first_divergence(run, step):
    found = again(run, step).divergence
    assert found is not None
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_replayed_step_equals_the_run_in_every_number(kind):
    run = past_run(kind)
    rows = {row["step"]: row for row in read_metrics(run)}
    ledger = {row["step"]: row for row in read_metrics(run, "ledger.jsonl")}
    for step in (2, 4):
        report = again(run, step)
        assert report.divergence is None
        assert report.weights == ledger[step]["weights"]
        learned = [k for k in rows[step] if k != "step" and not k.startswith("eval/")]
        assert report.metrics == {name: rows[step][name] for name in learned}
        if kind in WITH_EPISODES:
            groups = read_groups(run / "episodes" / f"train_step_{step:06d}.parquet")
            sampled = [e for g in groups for e in g.episodes]
            trained = [e for g in groups if g.outcome == "train" for e in g.episodes]
            assert report.tokens == sum(e.loss_mask.sum() for e in trained)
            assert report.episodes == sum(e.stop_reason != "paused" for e in sampled)


def test_checkpoint_of_the_step_is_compared_if_it_exists():
    assert again(past_run("ema"), 2).checkpoint == ""
    assert re.fullmatch(r"step_000004, \d+ tensors", again(past_run("ema"), 4).checkpoint)


def test_replay_begins_at_the_newest_whole_checkpoint(tmp_path):
    run = copy_of(past_run("ema"), tmp_path)
    assert again(run, 4).start == "checkpoint step_000003"
    weights = run / "checkpoints" / "step_000003" / "policy.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    report = again(run, 4)
    assert report.start == "the starting weights" and report.divergence is None


def test_replaying_writes_nothing(tmp_path):
    run = copy_of(past_run("sft"), tmp_path)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    again(run, 4)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_other_reward_function_diverges_at_its_first_other_score(tmp_path):
    run = copy_of(past_run("ema"), tmp_path)
    other = tmp_path / "reward.py"
    other.write_text(REWARD.replace("% 2", "% 3"))
    edit(run / "config.toml", f"{past_run('ema').parent}/reward.py", str(other))
    report = again(run, 4)
    assert any(f"reward.function/{other}" in note for note in report.notes)
    episodes = [
        e for g in read_groups(run / "episodes" / "train_step_000004.parquet") for e in g.episodes
    ]
    scores = [(e, float(sum(map(ord, e.text)) % 3)) for e in episodes]
    episode, score = next((e, score) for e, score in scores if score != e.reward)
    assert report.divergence.what == f"reward of episode 4:{episode.uid}:{episode.sample_index}"
    assert (report.divergence.a, report.divergence.b) == (repr(episode.reward), repr(score))


@pytest.mark.parametrize("step", [3, 4])
def test_other_token_in_the_journal_diverges_in_its_logprob(step, tmp_path):
    """Also where it is the file of a step on the way."""
    run = copy_of(past_run("ema"), tmp_path)
    (run / "checkpoints" / "step_000003").rename(tmp_path / "gone")
    places = {}

    def change(row, place, episode):
        if (row, place) != (1, 1):
            return episode
        at = int(np.flatnonzero(episode.loss_mask)[0])
        places["name"], places["at"] = f"{step}:{episode.uid}:{episode.sample_index}", at
        tokens = episode.tokens.copy()
        tokens[at] = tokens[at] + 1 if tokens[at] < 50 else tokens[at] - 1
        return replace(episode, tokens=tokens)

    rewrite(run, step, change)
    found = first_divergence(run, 4)
    assert found.what.startswith(f"log-prob of token {places['at']} ")
    assert f"of episode {places['name']} " in found.what


CHANGES = [  # of a run: kind, file, what stands there, what then; step, and its first difference
    ("ema", "config.toml", "learning_rate = 0.001", "learning_rate = 0.002", 4, "learning_rate of"),
    # the step itself learns with the baseline before it, which is that of the checkpoint
    ("ema", "config.toml", "ema_decay = 0.9", "ema_decay = 0.8", 4, "baseline of the rollouts"),
    ("sft", "ledger.jsonl", 4, 2, 4, "weights after step 4"),
    ("sft", "ledger.jsonl", 0, 1, 1, "starting weights"),
]


@pytest.mark.parametrize(("kind", "name", "old", "new", "step", "what"), CHANGES)
def test_what_was_changed_is_the_first_difference(kind, name, old, new, step, what, tmp_path):
    run = copy_of(past_run(kind), tmp_path)
    if name == "ledger.jsonl":  # the weights of another step
        hashes = [row["weights"] for row in read_metrics(run, name)]
        old, new = hashes[old], hashes[new]
    edit(run / name, old, new)
    found = first_divergence(run, step)
    assert found.what.startswith(what)
    assert name != "ledger.jsonl" or (found.a, found.b) == (new, old)


def test_rewards_with_a_judge_are_read_back():
    past = open_past(past_run("ema"))
    reward = past.config.reward.model_copy(update={"function": ["answer", "judge"]})
    scored = rescore(past.config.model_copy(update={"reward": reward}), [], 4)
    assert scored == (0, ["rewards with a judge's score in them are read back"], None)


def test_failed_scoring_is_read_back_and_a_new_failure_diverges(tmp_path):
    run = copy_of(past_run("ema"), tmp_path)
    change_first(run, 4, reward_error="timeout", reward=7.0)
    groups = read_groups(open_past(run).journal(4))
    config = open_past(run).config
    scored = rescore(config, groups, 4)
    everyone = sum(len(g.episodes) for g in groups)
    assert scored == (everyone - 1, ["episodes whose scoring failed are read back: 1"], None)
    (tmp_path / "reward.py").write_text(
        "def score(problem, completion):\n    raise ValueError('broken')\n"
    )
    reward = config.reward.model_copy(update={"function": f"{tmp_path}/reward.py:score"})
    *_, found = rescore(config.model_copy(update={"reward": reward}), groups, 4)
    assert found.what == f"score of episode 4:{groups[0].problem.uid}:1" and "broken" in found.b


def test_other_data_is_refused(tmp_path):
    run = copy_of(past_run("ema"), tmp_path)
    (tmp_path / "train.jsonl").write_bytes(
        (past_run("ema").parent / "data" / "train.jsonl").read_bytes() + b"\n"
    )
    edit(
        run / "config.toml",
        f"{past_run('ema').parent}/data/train.jsonl",
        str(tmp_path / "train.jsonl"),
    )
    with pytest.raises(UserError, match=r"data\.train \(changed\)"):
        again(run, 4)


def test_a_journal_file_that_is_not_there_or_damaged_is_named(tmp_path):
    run = copy_of(past_run("ema"), tmp_path)
    path = run / "episodes" / "train_step_000004.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match="cannot be read") as caught:
        again(run, 4)
    assert caught.value.where == str(path)
    path.unlink()
    with pytest.raises(UserError, match=r"(?s)cannot be read.*No such file"):
        again(run, 4)


def test_audit_commands_have_their_exit_codes(tmp_path):
    run = past_run("sft")
    other = copy_of(run, tmp_path)
    edit(other / "metrics.jsonl", '"learning_rate": ', '"learning_rate": 1')
    assert invoke("diff", run, run).exit_code == 0
    assert invoke("replay", run, "--step", 4).exit_code == 0
    assert invoke("diff", run, other).exit_code == 1
    assert "no such episode" in mistake("why", run, "--episode", "x")


def test_changed_evaluation_row_diverges_by_its_hash(tmp_path):
    run = copy_of(past_run("ema"), tmp_path)
    value = read_metrics(run)[4]["eval/sampled"]
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    lines[4] = lines[4].replace(f'"eval/sampled": {value}', f'"eval/sampled": {value + 0.5}')
    (run / "metrics.jsonl").write_text("".join(lines))
    assert read_metrics(run)[4]["eval/sampled"] == value + 0.5
    assert first_divergence(run, 4).what == "SHA-256 of the row of step 4 in metrics.jsonl"


def test_altered_files_are_noted_whatever_else_differs(tmp_path):
    run = copy_of(past_run("ema"), tmp_path)
    change_first(run, 3, reward=9.0)
    report = again(run, 4)
    changed = "not as it was written: episodes/train_step_000003.parquet"
    assert any(note.startswith(changed) for note in report.notes)
    path = run / "episodes" / "eval_sampled_step_000004.parquet"
    path.write_bytes(path.read_bytes() + b" ")
    other = copy_of(past_run("ema"), tmp_path / "other")
    (other / "episodes" / path.name).write_bytes(path.read_bytes())
    assert first_divergence(other, 4).what == f"SHA-256 of episodes/{path.name}"


def test_another_processor_is_noted_and_its_other_bits_diverge_in_a_logprob(tmp_path):
    run = copy_of(past_run("ema"), tmp_path)
    edit(
        run / "machine.json",
        json.loads((run / "machine.json").read_text())["processor"],
        "an abacus",
    )
    report = again(run, 2)
    assert report.divergence is None
    assert [note for note in report.notes if "has computed on an abacus, this is " in note]
    written = file_hash(run / "episodes" / "train_step_000001.parquet")
    off = np.float32(1 + 1e-6)
    rewrite(run, 1, lambda row, place, e: replace(e, engine_logprobs=e.engine_logprobs * off))
    edit(run / "ledger.jsonl", written, file_hash(run / "episodes" / "train_step_000001.parquet"))
    report = again(run, 2)
    assert report.divergence is not None and report.divergence.what.startswith("log-prob of token ")
    assert [note for note in report.notes if "has computed on an abacus, this is " in note]
