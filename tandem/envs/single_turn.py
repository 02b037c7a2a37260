"""The single-turn environment: the problem's chat is the prompt, and the first completion ends the episode."""

from collections.abc import Sequence

from tandem.types import Message, Problem


class SingleTurn:
    def reset(self, problem: Problem) -> Sequence[Message]:
        return problem.messages
