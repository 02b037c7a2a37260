"""Samples can be seen: while a run goes on, in TensorBoard, and afterwards by `tandem show` and
`tandem why`."""

from dataclasses import replace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tandem.run_folder.episode_files import read_groups
from tandem.run_folder.read import open_past
from tandem.run_folder.samples import brief, page, read_samples, sample_file
from tandem.runtime.errors import UserError
from tests.support.home import invoke, output_of
from tests.support.past_runs import copy_of, past_run, rewrite


def trained(home, folder, *overrides):
    """Return what a run printed."""
    return output_of("train", home / "recipe.toml", f"run.folder={folder}", *overrides)


def texts(folder):
    """TensorBoard's samples by step."""
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert events.PluginTagToContent("text").keys() == {"samples"}
    return {
        event.step: event.tensor_proto.string_val[0].decode() for event in events.Tensors("samples")
    }


def test_evaluation_shows_the_same_problem_each_time_and_changes_no_byte(home, tmp_path):
    nothing = trained(home, tmp_path / "0", "run.show_samples=0")
    printed = trained(home, tmp_path / "run")
    assert "held-out problem" not in nothing
    lines = [line for line in printed.splitlines() if ", held-out problem " in line]
    first, _, last, _ = lines  # two of each evaluation
    assert first.startswith("step 0, ") and last.startswith("step 2, ") and ": reward " in first
    assert first.split(":")[0].split(", ")[1:] == last.split(":")[0].split(", ")[1:]
    assert ", ended by " in first and first in (tmp_path / "run/log.txt").read_text()
    shown = texts(tmp_path / "run")
    assert shown.keys() == {0, 2}
    assert all(line.startswith("    ") for text in shown.values() for line in text.splitlines())
    assert "    user: " in shown[2] and "    assistant: " in shown[2]
    files = ["metrics.jsonl", "ledger.jsonl"]
    files += [f"episodes/{path.name}" for path in (tmp_path / "0/episodes").iterdir()]
    assert len(files) == 8
    for name in files:
        assert (tmp_path / "0" / name).read_bytes() == (tmp_path / "run" / name).read_bytes()


def test_training_episodes_are_shown_without_an_eval_set(home, tmp_path):
    printed = trained(home, tmp_path / "run", 'eval.data=""', "eval.every=0", "run.show_samples=2")
    steps = [line[:7] for line in printed.splitlines() if ", sample " in line]
    assert steps == ["step 1,"] * 2 + ["step 2,"] * 2
    assert texts(tmp_path / "run").keys() == {1, 2}


# ---- tandem show


def shown_names(*arguments):
    text = output_of("show", *arguments)
    return [line.split(": reward ")[0] for line in text.splitlines() if ": reward " in line], text


def test_show_prints_different_problems_of_the_newest_step():
    names, text = shown_names(past_run("train"))
    assert len({name.rpartition(":")[0] for name in names}) == 4
    assert all(name.startswith("4:") for name in names)
    assert "user: " in text
    assert "assistant: " in text
    assert "expected answer: " in text
    assert "16 episodes, mean reward" in text


def test_best_and_worst_come_first():
    groups = read_groups(open_past(past_run("train")).journal(2))
    rewards = {f"2:{e.uid}:{e.sample_index}": e.reward for group in groups for e in group.episodes}
    best, _ = shown_names(past_run("train"), "--step", 2, "--best", "--count", 16)
    worst, _ = shown_names(past_run("train"), "--step", 2, "--worst", "--count", 5)
    assert [rewards[name] for name in best] == sorted(rewards.values(), reverse=True)
    assert [rewards[name] for name in worst] == sorted(rewards.values())[:5]


def test_held_out_episodes_are_shown_on_request_or_if_alone():
    names, text = shown_names(past_run("train"), "--eval", "--count", 1)
    assert "eval_sampled_step_000004" in text and len(names) == 1
    assert "eval_sampled_step_000000" in shown_names(past_run("train"), "--step", 0)[1]
    assert "eval_sampled_step_000004" in shown_names(past_run("sft"))[1]


def test_a_page_shows_tools_and_text_of_a_model_cannot_command_the_terminal(tmp_path):
    run = copy_of(past_run("train"), tmp_path)
    said = ({"role": "assistant", "content": "\x1b[2Jgone\r\n[bold]" + 200 * "x" + "end"},)
    rewrite(
        run,
        2,
        lambda row, place, episode: replace(
            episode,
            messages=(*said, {"role": "tool", "name": "add", "content": "7"}),
            tools=({"type": "function", "function": {"name": "add"}},),
            env_error="it broke\x07",
        ),
    )
    samples = read_samples(sample_file(run / "episodes", 2, held_out=False))
    assert "\\x1b[2Jgone\\r\n[bold]x" in page(samples[0])
    assert "error: it broke\\x07" in page(samples[0])
    one = replace(samples[0].episode, loss_mask=samples[0].episode.loss_mask[-1:])
    group = replace(samples[0].group, episodes=(one,))
    assert replace(samples[0], group=group).summary.endswith(", 1 token")
    assert {"tools: add", "tool: 7"} <= set(page(samples[0]).splitlines())
    _, asked, said = brief(samples[0]).splitlines()
    assert max(len(asked), len(said)) <= 80
    assert said.startswith("  said    '\\x1b[2Jgone\\r\\n[bold]xx") and said.endswith("xxend'")
    assert "\x1b" not in invoke("show", run, "--step", 2).output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--step", "9"], "steps 1 to 4"),
        (["--best", "--worst"], "--best and --worst"),
        (["--eval", "--step", "1"], ""),
    ],
)
def test_what_cannot_be_shown_is_a_users_error(arguments, said):
    result = invoke("show", past_run("train"), *arguments)
    assert isinstance(result.exception, UserError) and said in str(result.exception)
