"""The progress of a run as a person sees it: on a terminal of 80 columns, in a file and in
log.txt."""

import io

import pytest
from rich.console import Console

from tandem.cli.progress import StepProgress, duration, trend

ROW = {
    "reward": 0.5123,
    "entropy": 1.2,
    "logprob_gap": 0.0,
    "groups_without_signal": 0.0,
    "truncated": 0.0,
    "reward_errors": 0.0,
}
HELD_OUT = {"eval/sampled": 0.8241, "eval/sampled_interval": 0.0842, "eval/greedy": 0.859}


class Clock:
    """Seconds that a test lets pass."""

    now = 100.0

    def __call__(self):
        return self.now


def shown(steps, *, of=100, terminal=False, eval_every=0, resumed=0, row=ROW):
    """(what the console got, the lines of log.txt, the last live line) of a run whose step n took
    steps[n] seconds."""
    clock, log = Clock(), []
    output = Console(
        file=io.StringIO(), width=80, force_terminal=terminal, soft_wrap=True, highlight=False
    )
    live = Console(file=io.StringIO(), width=80)
    with StepProgress("distill", of, log=log.append, output=output, clock=clock) as progress:
        for done, seconds in enumerate(steps, start=resumed + 1):
            clock.now += seconds
            held_out = eval_every and done % eval_every == 0
            timings = {"step_s": seconds, "generated_tokens_per_s": 412.0} | (
                {"eval_s": 7.0} if held_out else {}
            )
            progress(done, {**row, **(HELD_OUT if held_out else {})}, timings)
        live.print(progress.bar.get_renderable())
    return output.file.getvalue(), log, live.file.getvalue()


def test_line_has_step_reward_speed_and_time_left():
    text, log, _ = shown([3.1] * 12)
    assert text.splitlines() == log
    figures = "reward 0.512 →  3.10 s/step  entropy 1.20  gap 0"
    assert log[-1] == f"step  10/100  {figures}  left 4 min 39 s"
    assert log[0] == f"step   1/100  {figures.replace(' →', '')}  left 5 min 7 s"
    assert max(map(len, log)) <= 80


@pytest.mark.parametrize("seconds", [0.5, 31.0, 95.0, 4000.0])
def test_live_line_of_80_columns_has_the_time_left(seconds):
    _, _, line = shown([seconds] * 40, terminal=True)
    assert f"40/100 left {duration(60 * seconds)} reward 0.512" in line
    assert [len(row.rstrip()) <= 80 for row in line.rstrip("\n").split("\n")] == [True]


def test_time_left_counts_median_steps():
    _, log, _ = shown([500.0] * 5 + [2.0, 2.0, 90.0, 2.0, 2.0, 2.0, 1.0, 3.0, 2.0, 2.0], of=20)
    assert log[-1].endswith("→  2.00 s/step  entropy 1.20  gap 0  left 10 s")


def test_slow_steps_get_a_line_each_and_fast_runs_twenty():
    assert len(shown([30.0] * 15, of=1000)[1]) == 15
    assert len(shown([0.01] * 1000, of=1000)[1]) == 21  # the first one too


def test_resumed_run_shows_time_left_after_its_first_step():
    assert shown([40.0], resumed=30, of=50)[1][0].endswith("left 12 min 40 s")


@pytest.mark.parametrize("terminal", [False, True])
def test_evaluation_shows_the_training_reward_too(terminal):
    text, log, _ = shown([1.0] * 3, eval_every=3, terminal=terminal)
    for lines in (text, "\n".join(log)):
        assert "step   3/100  reward 0.512" in lines
        assert "step   3/100  held-out reward: sampled 0.824 ± 0.084, greedy 0.859" in lines


def test_step_0_without_an_eval_set_prints_no_line():
    progress = StepProgress(
        "train", 10, output=Console(file=io.StringIO()), log=lambda line: pytest.fail(line)
    )
    progress(0, {}, {"ledger_s": 0.1})
    assert progress.output.file.getvalue() == ""


def test_warning_is_printed_once_and_logged():
    _, log, _ = shown([1.0] * 3, row=ROW | {"truncated": 0.9, "bad/[loss]": 1.0})
    assert [line for line in log if "warning" in line] == [
        "warning at step 1: an update was skipped, not finite: [loss]; a lower "
        "train.learning_rate or train.max_grad_norm may help",
        "warning at step 1: over half of the completions hit rollout.max_new_tokens; "
        "take a larger one",
    ]


@pytest.mark.parametrize(
    ("rewards", "arrow"),
    [
        ([0.1] * 9, ""),
        ([0.1] * 5 + [0.2] * 5, " ↑"),
        ([0.2] * 5 + [0.1] * 5, " ↓"),
        ([0.2] * 9 + [0.21], " →"),
    ],
)
def test_trend_compares_the_last_steps_with_those_before(rewards, arrow):
    assert trend(rewards) == arrow


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.6, "1 min 0 s"),
        (271.4, "4 min 31 s"),
        (11_520, "3 h 12 min"),
        (200_000, "2 d 7 h"),
    ],
)
def test_a_time_has_its_two_largest_units(seconds, text):
    assert duration(seconds) == text
