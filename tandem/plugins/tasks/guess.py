"""Guess the number, a game of several turns. The difficulty: how many numbers there are, 8, 16, ...

    tandem generate guess --difficulty 2 --count 400 --out train.jsonl
    env = "guess"           reward = "env"

A row holds the range and the secret; the environment answers "higher" and "lower". Knows ranges and
chats. Does not know chat templates, files or models.
"""

import re
from collections.abc import Sequence

from tandem.plugins.tasks.generate import Generator, TaskProblem, drawn, randint
from tandem.runtime.errors import UserError
from tandem.types import Env, Message, Observation, Problem

WIDTHS = {1: 8, 2: 16, 3: 32, 4: 64, 5: 128, 6: 256}
_INTEGER = re.compile(r"(?<![\d.])-?\d{1,18}(?!\d|\.\d)")


def _problem(rng: Generator, difficulty: int) -> TaskProblem:
    """Draw a range and a secret. Difficulty 1 has about 580 games for training and 150 for testing;
    no game is in both splits, ranges are."""
    width = WIDTHS[difficulty]
    low = randint(rng, 1, (99 if width < 99 else 999) - width + 1)
    high = low + width - 1
    secret = randint(rng, low, high)
    return TaskProblem(
        prompt=f"Guess my number, {low} to {high}. I say higher or lower.",
        answer=str(secret),
        dedup_key=f"{secret} in {low} to {high}",
        columns={"low": low, "high": high},
    )


class GuessTheNumber(Env):
    """The environment `guess`: find the problem's answer between its `low` and `high`.

    It talks in the user's role. A turn's guess is the last whole number in it; a turn without one
    is answered "a number?", and counts. Parts: `turns`, and `bad_guesses` without a number.
    """

    def __init__(
        self, limit: int = 0, *, turn_cost: float = 0.0, invalid_guess_penalty: float = 0.0
    ):
        """Take the options.

        limit: most guesses; 0: as many as halving needs for the range.
        turn_cost: taken for every guess after the first from the reward of 1, which stays above 0.
        invalid_guess_penalty: of a turn without a number.
        """
        if limit < 0:
            raise UserError(
                "a limit of guesses below 0", where="env.options.limit", found=str(limit)
            )
        self.limit, self.turn_cost = limit, turn_cost
        self.invalid_guess_penalty = invalid_guess_penalty
        self.turns = self.bad_guesses = 0

    async def reset(self, problem: Problem) -> Sequence[Message]:
        match problem.metadata:
            case {"low": int() as low, "high": int() as high}:
                self.number = int(problem.answer)
                self.limit = self.limit or (high - low + 1).bit_length()
                return problem.messages
        raise ValueError(
            f"problem {problem.uid!r} has no whole numbers `low` and `high`: {problem.metadata}"
        )

    async def step(self, text: str) -> Observation:
        self.turns += 1
        numbers = _INTEGER.findall(text)
        guess = int(numbers[-1]) if numbers else None
        self.bad_guesses += guess is None
        parts = {"turns": float(self.turns), "bad_guesses": float(self.bad_guesses)}
        penalty = self.invalid_guess_penalty if guess is None else 0.0
        if guess == self.number:
            reward = max(0.0, 1.0 - self.turn_cost * (self.turns - 1))
            return Observation(done=True, reward=reward, parts=parts)
        if self.turns >= self.limit:
            return Observation(done=True, parts=parts, penalty=penalty)
        answer = "a number?" if guess is None else "higher" if guess < self.number else "lower"
        return Observation(
            messages=({"role": "user", "content": answer},), parts=parts, penalty=penalty
        )


TASK = drawn("guess", _problem, WIDTHS)
