"""The history of an episode and of each of its tokens: from the journal, and from a replay of the
step that trained it."""

import json
import math

import numpy as np
import pytest

from tandem.plugins.audit.show import why
from tandem.plugins.audit.why import EpisodeRef, find_episodes, tokens, trace_updates, with_history
from tandem.run_folder.episode_files import read_groups
from tandem.run_folder.read import open_past
from tandem.runtime.errors import UserError
from tests.support.past_runs import PARTIAL, change_first, copy_of, edit, past_run


def quiet(text):
    pass


def of(kind, outcome, step=None):
    """(run, an episode of it with that outcome)"""
    past = open_past(past_run(kind))
    for number in past.journaled() if step is None else [step]:
        for row, group in enumerate(read_groups(past.journal(number))):
            if group.outcome == outcome:
                return past, with_history(
                    past, EpisodeRef(step=number, row=row, place=1, group=group)
                )
    raise AssertionError(f"no group of {kind} has the outcome {outcome}")


def learned_rows(past, found):
    return [t for t in tokens(past, found, trace_updates(past, found, quiet)) if t.sampled]


def test_tokens_have_the_journal_s_numbers_and_their_text():
    past, found = of("ema", "train")
    rows, episode = tokens(past, found, None), found.episode
    assert [row.token for row in rows] == episode.tokens.tolist()
    assert [row.sampled for row in rows] == episode.loss_mask.tolist()
    own, mask = [row for row in rows if row.sampled], episode.loss_mask
    assert [row.version for row in own] == episode.weight_versions[mask].tolist()
    assert [row.engine_logprob for row in own] == episode.engine_logprobs[mask].tolist()
    begins = f"<|user|>{found.group.problem.messages[-1]['content']}"
    assert "".join(row.text for row in rows).startswith(begins)
    told = {(row.advantage, row.ratio, row.weight, row.masked) for row in rows}
    assert told == {(None, None, None, "")}


def test_advantages_and_weights_are_those_of_the_step():
    """GRPO without the spread: the advantage is reward - mean, a token weighs 1 / (episodes x
    tokens of its own)."""
    past, found = of("train", "train", 2)
    groups = read_groups(past.journal(2))
    half = len(groups) // 2  # rl.minibatches = 2
    episodes = [e for group in groups[:half] for e in group.episodes]
    rows = learned_rows(past, found)
    advantage = np.float32(found.episode.reward - found.group.rewards.mean())
    assert {row.advantage for row in rows} == {advantage}
    weight = 1 / len(rows) / len(episodes)
    assert [row.weight for row in rows] == pytest.approx([weight] * len(rows))
    # of the first update, on fresh tokens
    assert {(row.ratio, row.clipped, row.masked) for row in rows} == {(1.0, False, "")}


def test_ratios_and_clipping_are_those_of_the_last_update():
    """Groups that a step carried on are trained by newer weights; their log-probs then are the next
    version's, which is in a checkpoint."""
    past, found = of("dapo, narrow", "carry")
    assert [outcome for _, outcome in found.history] == ["carry", "train"]
    assert found.trained_in == found.step + 1
    rows = learned_rows(past, found)
    assert all(row.ratio != 1 for row in rows)
    advantage = rows[0].advantage
    outside = [row.ratio > 1 + 1e-4 if advantage > 0 else row.ratio < 1 - 1e-4 for row in rows]
    assert [row.clipped for row in rows] == outside and True in outside


def test_token_weight_includes_its_off_policy_correction():
    """Token mean: without one all tokens weigh the same."""
    past, found = of(PARTIAL, "train", 4)
    rows = learned_rows(past, found)
    assert len({row.weight for row in rows}) > 1 and {row.masked for row in rows} == {""}


@pytest.mark.parametrize("kind", ["dapo, narrow", PARTIAL])
def test_an_episode_that_no_step_trained_says_why(kind):
    past, found = of(kind, "no_signal")
    assert found.trained_in is None
    assert {row.masked for row in learned_rows(past, found)} == {"no signal"}


def test_a_paused_episode_is_followed_from_step_to_step():
    past, found = of(PARTIAL, "unfinished")
    assert len(found.history) > 1
    steps = [step for step, _ in found.history]
    assert steps == list(range(found.step, found.step + len(steps)))
    groups = [group for step in steps for group in read_groups(past.journal(step))]
    seen = [e for group in groups for e in group.episodes if e.key == found.episode.key]
    lengths = [len(e.tokens) for e in seen]
    assert len(lengths) == len(steps) and lengths == sorted(lengths)
    last = find_episodes(past, str(found.episode.key))[0]
    assert with_history(past, last).history == found.history


def test_setting_that_masks_an_episode_is_named(tmp_path):
    run = copy_of(past_run("train"), tmp_path)
    change_first(run, 2, masked=True, env_error="it broke")
    past, found = of("train", "train", 2)
    past = open_past(run)
    found = with_history(past, find_episodes(past, f"2:{found.episode.uid}:0")[0])
    assert {row.masked for row in learned_rows(past, found)} == {"env.on_error=mask"}
    edit(run / "config.toml", "mask_truncated = false", "mask_truncated = true")
    past = open_past(run)
    cut = next(
        EpisodeRef(step=2, row=row, place=place, group=group)
        for row, group in enumerate(read_groups(past.journal(2)))
        for place, e in enumerate(group.episodes)
        if e.stop_reason == "length" and not e.masked
    )
    rows = learned_rows(past, with_history(past, cut))
    assert {row.masked for row in rows} == {"rl.mask_truncated"}


def test_a_step_that_trains_the_critic_only_is_named():
    past, found = of("ppo, lora", "train", 1)
    assert {row.masked for row in learned_rows(past, found)} == {"critic.warmup_steps"}


def test_episode_is_found_by_step_uid_sample_or_key():
    past, found = of("ema", "train", 3)
    uid = found.episode.uid
    assert [f.name for f in find_episodes(past, f"3:{uid}:0")] == [f"3:{uid}:0"]
    assert {f.episode.sample_index for f in find_episodes(past, f"3:{uid}")} == {0, 1}
    assert f"3:{uid}:1" in {f.name for f in find_episodes(past, f"{uid}:1")}
    assert {f"3:{uid}:0", f"3:{uid}:1"} <= {f.name for f in find_episodes(past, uid)}
    key = found.episode.key
    assert [f.episode.key for f in find_episodes(past, str(key))] == [key]


@pytest.mark.parametrize("name", ["9:nobody:0", "nobody", "", "12"])
def test_unknown_episode_is_refused_with_a_valid_example(name):
    past = open_past(past_run("ema"))
    last = read_groups(past.journal(4))[0].episodes[0]
    with pytest.raises(UserError, match="no such episode") as caught:
        find_episodes(past, name)
    assert caught.value.expected.endswith(f"e.g. 4:{last.uid}:0")


def test_a_list_of_a_step_has_texts_no_keys_and_as_many_lines_as_asked_for(capsys):
    past = open_past(past_run("ema"))
    why(past.folder, "3", 2, learning=False, out=None)
    head, *lines, rest = capsys.readouterr().out.splitlines()
    number = int(head.partition(" ")[0])
    assert len(lines) == 2 and rest == f"  and {number - 2} more: --count {number}"
    episode = find_episodes(past, lines[0].split()[0])[0].episode
    assert f"{episode.text!r:.40}" in lines[0] and str(episode.key) not in lines[0]


def test_json_has_all_of_it(tmp_path, capsys):
    past, found = of("train", "train", 2)
    why(past.folder, found.name, 40, learning=True, out=tmp_path / "why.json")
    told = json.loads((tmp_path / "why.json").read_text())
    assert told["episode"] == found.name
    assert told["history"] == [[2, "train"]]
    assert told["replay_is_equal"] is True
    assert [row["token"] for row in told["tokens"]] == found.episode.tokens.tolist()
    assert all(math.isfinite(row["weight"]) for row in told["tokens"] if row["sampled"])
    assert f"episode {found.name} of" in capsys.readouterr().out
