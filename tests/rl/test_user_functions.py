"""A user's loss, advantage, filter and metric: a built-in under its own name gives the same bits;
mistakes are named."""

from functools import partial

import numpy as np
import pytest
import torch

from tandem.config.recipe import load_config
from tandem.config.schema import Config
from tandem.rl.algorithms import estimator, policy_loss
from tandem.rl.user_functions import (
    try_functions,
    try_user_metric,
    user_advantage,
    user_filter,
    user_loss,
    user_metric,
)
from tandem.runtime.errors import UserError
from tandem.trainer.batch import Models
from tests.support.episodes import bits, learn, sampled_groups, settings, trained
from tests.support.tiny import exact_model

EXAMPLE = "examples/own_functions.py"
REWARDS, LENGTHS = np.array([[0.0, 1.0], [1.0, 1.0]]), np.array([[3, 5], [2, 2]])
TOKENS = {
    "policy_logprobs": torch.tensor([-1.0, -2.0, -0.5], requires_grad=True),
    "proximal_logprobs": torch.tensor([-1.0, -2.0, -0.5]),
    "advantages": torch.tensor([1.0, 1.0, -1.0]),
}


def module(folder, text):
    """A file of its own for each text: a file is loaded once in a process."""
    file = folder / f"own_{abs(hash(text))}.py"
    file.write_text("import numpy as np, torch\n" + text)
    return f"{file}:f"


def try_out(loss="ppo_clip", advantage="grpo", keep=""):
    try_functions(policy_loss(loss), estimator(advantage), keep)


def learned(**rl):
    """Weights, moments and metrics after two steps of three updates each."""
    policy = trained(exact_model("qwen3"))
    rows = []
    for step in range(2):
        groups = sampled_groups(policy.model, seed=step, version=step)
        config = settings(minibatches=3, **rl)
        rows.append(learn(Models(policy=policy), groups, config, version=step))
    return bits(policy), [
        {key: row[key] for key in ("policy_loss", "grad_norm", "logprob_gap") if key in row}
        for row in rows
    ]


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "cispo"])
def test_a_built_in_loss_as_a_users_function_trains_the_same_weights(loss):
    assert learned(loss=f"tandem.rl.losses:{loss}") == learned(loss=loss)


def test_functions_of_the_example_are_what_they_say():
    try_out(f"{EXAMPLE}:loss", f"{EXAMPLE}:advantage", f"{EXAMPLE}:keep")
    try_user_metric(f"{EXAMPLE}:answers")
    losses, metrics = user_loss(name=f"{EXAMPLE}:loss", **TOKENS)
    assert losses.tolist() == [-1.0, -1.0, 1.0]
    assert metrics == {"policy_loss": -1.0, "loss/ratio": 3.0}
    offered = {"rewards": REWARDS, "lengths": LENGTHS, "k": 1, "baseline": 0.0}
    table = user_advantage(name=f"{EXAMPLE}:advantage", **offered)
    np.testing.assert_allclose(table, [[-0.499, 0.499], [0.0, 0.0]])
    kept = [user_filter(f"{EXAMPLE}:keep", r, n) for r, n in zip(REWARDS, LENGTHS, strict=True)]
    assert kept == [True, False]
    given = {"rewards": REWARDS, "lengths": LENGTHS, "completions": [["a", "b"], ["c", "c"]]}
    assert user_metric(f"{EXAMPLE}:answers", given) == {
        "answers/different": 1.5,
        "answers/longest": 5.0,
    }


@pytest.mark.parametrize(
    ("text", "found", "expected"),
    [
        ("def f(policy_logprobs): return policy_logprobs.sum()", "Tensor tensor(-12", "[12]"),
        ("def f(policy_logprobs): return 3", "int 3", "a tensor of the tokens"),
        ("def f(advantages): return advantages", "without a gradient", "policy_logprobs"),
        ("def f(policy_logprobs): return policy_logprobs / 0", "-inf at [0], and 11", "finite"),
        (
            "def f(policy_logprobs): return policy_logprobs, {'x': policy_logprobs.detach()}",
            "'x': Tensor [12]",
            "a finite number",
        ),
        ("def f(policy_logprobs): return policy_logprobs, [1]", "list [1]", "a dict of metrics"),
        (
            "def f(policy_logprobs): return policy_logprobs, {'x': 1.0, 'y': np.nan}",
            "'loss/y': float nan",
            "a finite number",
        ),
        ("def f(logprobs): return logprobs", "missing 1 required positional", "policy_logprobs, "),
        ("f = 3", "not a callable object", "of some of policy_logprobs, "),
    ],
)
def test_a_loss_that_cannot_be_used_is_named(tmp_path, text, found, expected):
    name = module(tmp_path, text)
    with pytest.raises(UserError) as error:
        try_out(loss=name)
    assert error.value.where.startswith(f"rl.loss = {name}")
    assert found in error.value.found and expected in error.value.expected


def test_an_exception_in_a_function_names_its_line(tmp_path):
    name = module(tmp_path, "def f(rewards):\n    return rewards['x']")
    with pytest.raises(UserError, match="a function of yours raised") as error:
        try_out(keep=name)
    assert error.value.where.endswith(".py:3)") and "IndexError" in error.value.found


def test_a_step_whose_own_loss_is_not_finite_changes_no_weight_and_is_counted(tmp_path):
    name = module(  # it is tried on twelve tokens
        tmp_path,
        "def f(policy_logprobs):\n"
        "    losses = policy_logprobs * (1.0 if len(policy_logprobs) == 12 else float('nan'))\n"
        "    return losses, {'total': losses.detach().sum()}\n",
    )
    try_out(loss=name)
    policy = trained(exact_model("qwen3"))
    before = bits(policy)
    row = learn(Models(policy=policy), sampled_groups(policy.model), settings(loss=name), version=0)
    assert row["bad/loss"] == 1.0 and bits(policy) == before


def test_config_takes_a_function_where_it_takes_a_name(tmp_path):
    read = partial(load_config, None)
    rl = read(["rl.loss=my.py:loss", "rl.advantage=my.py:a"]).rl
    assert (rl.loss, rl.advantage) == ("my.py:loss", "my.py:a")
    with pytest.raises(UserError, match=r"cispo, reinforce, or my\.py:NAME; did you mean ppo_clip"):
        read(["rl.loss=ppo_clipp"])
    with pytest.raises(ValueError, match=r"rl\.filter: has no effect without"):
        Config.model_validate({"rl": {"filter": "my.py:keep"}})
