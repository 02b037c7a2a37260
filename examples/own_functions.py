"""Functions of your own in place of Tandem's; docs/guide/algorithms.md tells what each is given.

    tandem train recipes/demo.toml rl.loss=examples/own_functions.py:loss \
        rl.advantage=examples/own_functions.py:advantage \
        eval.metric=examples/own_functions.py:answers
    tandem train recipes/demo.toml rl.filter=examples/own_functions.py:keep rl.max_gen_batches=8
"""

from tandem.rl.losses import total


def loss(policy_logprobs, proximal_logprobs, advantages):
    """PPO's ratio without any clip, as the losses of the tokens [N] and a metric."""
    ratio = (policy_logprobs - proximal_logprobs).exp()
    return -ratio * advantages, {"ratio": total(ratio)}


def advantage(rewards, lengths):
    """Rewards [P, G] against the group's mean, less for longer attempts."""
    gains = rewards - rewards.mean(1, keepdims=True)
    return gains - 0.001 * (lengths - lengths.mean(1, keepdims=True))


def keep(rewards):
    """Train on groups [G] that some attempt has solved and some has not."""
    return bool(rewards.min() < 1.0 <= rewards.max())


def answers(completions, lengths):
    """Count the different answers of the attempts at a problem, and the tokens of the longest."""
    different = [len(set(texts)) for texts in completions]
    return {"different": sum(different) / len(different), "longest": lengths.max()}
