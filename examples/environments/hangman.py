"""An environment: guess the problem's answer, a word, letter by letter, with at most six misses."""

from tandem.types import Env, Observation


class Hangman(Env):  # env = "examples/environments/hangman.py:Hangman", reward = "env"
    def __init__(self, misses: int = 6):
        self.misses, self.said = misses, set()

    def reset(self, problem):
        self.word = problem.answer
        return [*problem.messages, {"role": "user", "content": "_" * len(self.word)}]

    def step(self, text):
        letter = text.strip()[-1:].lower()
        self.said.add(letter)
        self.misses -= letter not in self.word
        shown = "".join(letter if letter in self.said else "_" for letter in self.word)
        if shown == self.word or self.misses < 0:
            return Observation(done=True, reward=float(shown == self.word))
        return Observation(messages=[{"role": "user", "content": shown}])
