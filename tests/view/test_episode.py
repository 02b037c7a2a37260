"""One episode: the advantage is shown where the rewards of its group alone decide it."""

import numpy as np
import pytest

from tandem.view.episode import read_episode
from tandem.view.runs import Run
from tests.support.viewing import add_step, group, make_run

PENALIZED = {"penalties": np.float32([0, 0, 0, 0, 0.5])}


@pytest.mark.parametrize(
    ("rl", "command", "fields", "shown"),
    [
        ({"advantage": "grpo_no_std"}, "train", {}, 0.5),
        ({"advantage": "rloo"}, "train", {}, 1.0),
        ({"advantage": "rloo", "kl_in": "reward", "kl_coef": 0.0}, "train", {}, 1.0),
        ({"advantage": "rloo", "kl_in": "loss", "kl_coef": 0.1}, "train", {}, 1.0),
        (
            {"advantage": "rloo", "kl_in": "reward", "kl_coef": 0.1, "kl_estimator": "k1"},
            "train",
            {},
            None,
        ),
        ({"algorithm": "reinforce_pp_baseline"}, "train", {}, None),  # whitened over the step
        ({"advantage": "gdpo"}, "train", {}, None),
        ({"advantage": "ema"}, "train", {}, None),
        ({"advantage": "my.py:mine"}, "train", {}, None),
        ({"advantage": "rloo"}, "distill", {}, None),
        ({"advantage": "rloo"}, "train", PENALIZED, None),
        ({"advantage": "rloo"}, "train", {"outcome": "unfinished"}, None),
    ],
)
def test_an_advantage_is_shown_where_rewards_alone_decide_it(tmp_path, rl, command, fields, shown):
    reward = {"function": ["boxed", "format"]} if rl.get("advantage") == "gdpo" else {}
    folder = make_run(tmp_path / "run", command=command, rl=rl, reward=reward)
    add_step(folder, 1, [group("a", ["x", "y"], [1.0, 0.0], **fields)])
    assert read_episode(Run(folder, "run"), "train", 1, 0)["advantage"] == shown
