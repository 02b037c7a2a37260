"""The progress of a run as a person sees it: on a terminal of 80 columns, in a file and in
log.txt."""

import io

import pytest
from rich.console import Console

from tandem.cli.progress import StepProgress

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
    """Return what the console got, the lines of log.txt, the last live line; steps: seconds."""
    clock, log = Clock(), []
    output = Console(
        file=io.StringIO(), width=80, force_terminal=terminal, soft_wrap=True, highlight=False
    )
    live = Console(file=io.StringIO(), width=80)
    given = {"output": output, "clock": clock, "first_error": "KeyError in step {}".format}
    with StepProgress("distill", of, log=log.append, **given) as progress:
        for done, seconds in enumerate(steps, start=resumed + 1):
            clock.now += seconds
            held_out = eval_every and done % eval_every == 0
            timings = {"step_s": seconds, "generated_tokens_per_s": 412.0}
            timings |= {"eval_s": 7.0} if held_out else {}
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


@pytest.mark.parametrize("terminal", [False, True])
def test_evaluation_shows_the_training_reward_too(terminal):
    text, log, _ = shown([1.0] * 3, eval_every=3, terminal=terminal)
    for lines in (text, "\n".join(log)):
        assert "step   3/100  reward 0.512" in lines
        assert "step   3/100  held-out reward: sampled 0.824 ± 0.084, greedy 0.859" in lines


def test_warning_is_printed_once_and_logged():
    _, log, _ = shown([1, 1], row=ROW | {"truncated": 0.9, "bad/[loss]": 1, "reward_errors": 2})
    assert [line for line in log if "warning" in line] == [
        "warning at step 1: an update was skipped, not finite: [loss]; a lower "
        "train.learning_rate or train.max_grad_norm may help",
        "warning at step 1: 2 episodes could not be scored and have the reward 0; tandem show RUN "
        "--worst has their errors; if they took too long, take a larger reward.timeout_s; "
        "the first error: KeyError in step 1",
        "warning at step 1: over half of the completions hit rollout.max_new_tokens; "
        "take a larger one",
    ]
