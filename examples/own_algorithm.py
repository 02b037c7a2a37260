"""An algorithm that Tandem does not have, in one page: best-of-n distilled into the model.

    tandem tiny runs/tiny && python examples/own_algorithm.py runs/tiny

Each step samples n attempts at a prompt and fine-tunes on the best one (rejection sampling, as in
RAFT, arXiv 2304.06767). Killed and started again, it goes on from its last save with the same bits.
"""

import sys
from pathlib import Path

import tandem

PROMPTS = ["1+1=?", "2+3=?", "9-4=?", "5+5=?"]


def score(text):
    """Share of the text that is digits."""
    return sum(letter.isdigit() for letter in text) / max(len(text), 1)


def train(model, folder, steps=10, n=16):
    session = tandem.Session(model, learning_rate=3e-3, max_new_tokens=8)
    saved = sorted(Path(folder).glob("step_*"))
    if saved:
        session.load(saved[-1])
    while session.version < steps:
        attempts = session.sample(PROMPTS, n=n)
        best = [max(group, key=lambda attempt: score(attempt.text)) for group in attempts]
        count = sum(len(attempt.tokens) for attempt in best)
        data = [session.datum(attempt, weight=1 / count) for attempt in best]
        loss = session.forward_backward(data, "cross_entropy")["loss"]
        session.optim_step()
        session.save(folder)
        mean = sum(score(a.text) for group in attempts for a in group) / (len(PROMPTS) * n)
        print(f"step {session.version}/{steps}  loss {loss:.3f}  reward {mean:.3f}")
    return session


if __name__ == "__main__":
    train(sys.argv[1], "runs/own_algorithm")
