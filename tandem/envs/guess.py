"""The built-in environment `guess`: find a number between `low` and `high` (the problem's metadata)
by higher and lower.

    env = "guess"           reward = "env"           python -m tandem.tasks.guess writes the problems

The number is the problem's answer. Knows no chat templates: it talks in the user's role.
"""

import re
from collections.abc import Sequence

from tandem.runtime.errors import UserError
from tandem.types import Env, Message, Observation, Problem

_INTEGER = re.compile(r"(?<![\d.])-?\d{1,18}(?!\d|\.\d)")


class GuessTheNumber(Env):
    """A turn's guess is the last whole number that it names; a turn without one is told so, and
    counts as a turn.

    Parts: `turns`, and `bad_guesses` of them without a number.
    """

    def __init__(
        self, limit: int = 0, *, turn_cost: float = 0.0, invalid_guess_penalty: float = 0.0
    ):
        """limit: most guesses; 0: as many as halving needs for the range.
        turn_cost: what every guess after the first takes from the reward of 1, which stays above 0.
        invalid_guess_penalty: of a turn without a number.
        """
        if limit < 0:
            raise UserError(
                "a limit of guesses below 0", where="env.options.limit", found=str(limit)
            )
        self.limit, self.turn_cost, self.invalid_guess_penalty = (
            limit,
            turn_cost,
            invalid_guess_penalty,
        )
        self.turns = self.bad_guesses = 0

    async def reset(self, problem: Problem) -> Sequence[Message]:
        low, high, self.number = (int(value) for value in (*self._range(problem), problem.answer))
        self.limit = self.limit or (high - low + 1).bit_length()
        return problem.messages

    @staticmethod
    def _range(problem: Problem) -> tuple[int, int]:
        match problem.metadata:
            case {"low": int() as low, "high": int() as high}:
                return low, high
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
