"""Two policies that play against each other, and both learn: who writes more digits wins.

    tandem tiny runs/tiny && python examples/self_play.py runs/tiny

The first player moves; the second one reads the move and answers. Each is a session of its own,
with its own weights and optimizer, in this process; REINFORCE trains both on the outcome.
"""

import sys

import tandem

GAMES, MAX_TOKENS = 32, 6


def digits(text):
    return sum(letter.isdigit() for letter in text)


def train(model, steps=20):
    first, second = (
        tandem.Session(model, seed=seed, learning_rate=3e-3, max_new_tokens=MAX_TOKENS)
        for seed in (1, 2)
    )
    for step in range(steps):
        [moves] = first.sample(["Your move."], n=GAMES)
        answers = [one for [one] in second.sample([f"Beat: {move.text}" for move in moves])]
        wins = [digits(a.text) - digits(m.text) for m, a in zip(moves, answers, strict=True)]
        outcomes = [(win > 0) - (win < 0) for win in wins]  # 1: the second player has won
        mean = sum(outcomes) / GAMES
        for player, played, sign in ((first, moves, -1), (second, answers, 1)):
            data = [
                player.datum(one, advantage=sign * (outcome - mean), weight=1 / GAMES)
                for one, outcome in zip(played, outcomes, strict=True)
            ]
            player.forward_backward(data, "reinforce")
            player.optim_step()
        shown = [sum(digits(one.text) for one in played) / GAMES for played in (moves, answers)]
        print(f"step {step + 1}/{steps}  digits {shown[0]:.2f} : {shown[1]:.2f}")
    return first, second


if __name__ == "__main__":
    train(sys.argv[1])
