"""Every number of [rl] that a loss is made of does something: a step with another value has another
gradient. Of a setting that several losses have, one is tried; test_learn.py has the formulas."""

import pytest
import torch

from tandem.config.schema import RL
from tests.support.episodes import learn_once, perturbed, recorded, sampled_groups, settings
from tests.support.tiny import exact_model, value_twins

IN_REWARD = {"kl_in": "reward", "kl_estimator": "k1", "kl_coef": 0.1}
CHANGES = [  # key, another value, the choice that it belongs to
    ("k", 3, {"advantage": "max_at_k", "k": 2}),
    ("gamma", 0.5, {"algorithm": "reinforce_pp"}),
    ("gae_lambda", 0.5, {"algorithm": "ppo"}),
    ("clip_low", 0.01, {"loss": "ppo_clip"}),
    ("clip_high", 0.01, {"loss": "cispo"}),
    ("dual_clip", 1.05, {}),
    ("entropy_coef", 0.1, {"loss": "gspo"}),
    ("kl_coef", 0.2, {"kl_coef": 0.1}),
    *[("kl_coef", 0.2, IN_REWARD | {"algorithm": name}) for name in ("grpo", "ppo")],
    ("correction_cap", 1.01, {"correction": "tis"}),
    ("correction_floor", 0.99, {"correction": "icepop"}),
    ("max_logprob_error", 1.2, {}),
    ("off_policy_mask", 0.01, {}),
]
# How much is sampled and trained, when a run stops, and what a step's rewards are compared with.
OTHERS = {"prompts_per_step", "group_size", "minibatches", "epochs", "max_gen_batches"}
OTHERS |= {"max_truncated", "max_flat_steps", "ema_decay"}


@pytest.fixture(scope="module")
def gradients_of():
    policy, reference = exact_model("qwen3"), exact_model("qwen3", seed=5)
    critic, groups = recorded(value_twins("qwen3")[0]), perturbed(sampled_groups(policy), 0.3)

    def gradients(rl):
        models = {"reference": reference} if rl.get("kl_coef") else {}
        models |= {"critic": critic} if rl.get("algorithm") == "ppo" else {}
        return learn_once(policy, groups, settings(**rl), **models)[1]

    return gradients


@pytest.mark.parametrize(("key", "value", "choice"), CHANGES, ids=str)
def test_another_value_of_a_coefficient_makes_another_gradient(key, value, choice, gradients_of):
    before, after = (gradients_of(rl) for rl in (choice, {**choice, key: value}))
    assert not all(torch.equal(before[name], after[name]) for name in before)


def test_every_number_of_the_section_is_among_those_tried():
    numbers = {name for name, field in RL.model_fields.items() if field.annotation in (int, float)}
    assert numbers == {key for key, _, _ in CHANGES} | OTHERS
