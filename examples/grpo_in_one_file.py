"""Dr. GRPO (arXiv 2503.20783) from its four calls: groups, advantages, weights, loss.

    tandem tiny runs/tiny && python examples/grpo_in_one_file.py runs/tiny

It ends with the very weights of `tandem train` with algorithm="dr_grpo" and these settings, as a
test shows: the session's engine and trainer are the same.
"""

import sys

import numpy as np

import tandem

STEPS, PROBLEMS, GROUP, MAX_TOKENS = 20, 8, 8, 8
SEED, LEARNING_RATE, CLIP = 0, 1e-3, 0.2


def score(problem, completion):
    """Share of the completion's characters that are digits."""
    return sum(letter.isdigit() for letter in completion) / max(len(completion), 1)


def clipped(policy_logprobs, engine_logprobs, advantages):
    """PPO's clipped objective, with what the engine sampled by as the old policy."""
    ratio = (policy_logprobs - engine_logprobs).exp()
    bounded = ratio.clamp(1 - CLIP, 1 + CLIP)
    terms = -(ratio * advantages).minimum(bounded * advantages)
    return terms, {"ratio": float(ratio.detach().sum())}


def train(model, rows, steps=STEPS):
    session = tandem.Session(
        model, seed=SEED, learning_rate=LEARNING_RATE, max_new_tokens=MAX_TOKENS
    )
    for step in range(steps):
        # a batch of problems, and a group of attempts at each
        batch = [rows[(step * PROBLEMS + i) % len(rows)] for i in range(PROBLEMS)]
        groups = session.sample(
            [row["prompt"] for row in batch],
            n=GROUP,
            place=("rollout", step),
            uids=[row["uid"] for row in batch],
        )
        # a reward for each attempt; its advantage is over the mean of its group
        rewards = np.array([[score(None, attempt.text) for attempt in group] for group in groups])
        advantages = rewards - rewards.mean(1, keepdims=True)
        # every attempt counts by its tokens, over a fixed length
        weight = 1.0 / (PROBLEMS * GROUP * MAX_TOKENS)
        data = [
            session.datum(attempt, advantage=advantages[i, j], weight=weight)
            for i, group in enumerate(groups)
            for j, attempt in enumerate(group)
        ]
        # one update; nothing is as exact as this gap
        gap = max(
            np.abs(again - datum.logprobs[datum.weights != 0]).max()
            for again, datum in zip(session.logprobs(data), data, strict=True)
        )
        session.forward_backward(data, clipped)
        session.optim_step()
        print(f"step {step + 1}/{steps}  reward {rewards.mean():.3f}  gap {gap:g}")
    return session


if __name__ == "__main__":
    train(sys.argv[1], tandem.generate("arithmetic", 64)).export("runs/grpo_in_one_file")
