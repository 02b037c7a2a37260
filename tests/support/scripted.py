"""Fakes of the engine, the renderer and the reward, that do what a test tells them."""

from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from tandem.runtime.errors import UserError
from tandem.types import Completion, Problem

PROBLEMS = [
    Problem(uid=f"p{n}", messages=({"role": "user", "content": str(n)},), answer=str(n))
    for n in range(5)
]


def said(tokens, text, stop_reason="stop", *, logprob=0.0, version=0):
    """A completion of these tokens; logprob, version: of all, or of each."""
    return Completion(
        tokens=np.array(tokens),
        logprobs=np.full(len(tokens), logprob, np.float32),
        weight_versions=np.full(len(tokens), version, np.int32),
        text=text,
        stop_reason=stop_reason,
    )


@dataclass(eq=False)
class ScriptedTicket:
    request: object
    completion: object = None


class ScriptedEngine:
    """Answers whatever was submitted before a step in one call of generate(requests), which a
    test's engine has."""

    longest = 512

    def __init__(self):
        self.weight_version, self.requests, self.cancelled, self._tickets = 0, [], [], []

    def apply(self, version):
        self.weight_version = version

    def submit(self, request):
        self._tickets.append(ScriptedTicket(request))
        return self._tickets[-1]

    def step(self):
        tickets, self._tickets = self._tickets, []
        requests = [ticket.request for ticket in tickets]
        self.requests += requests
        for ticket, completion in zip(tickets, self.generate(requests), strict=True):
            ticket.completion = completion
        return tickets

    def cancel(self, ticket):
        self.cancelled.append(ticket)

    def logprob_gap(self):
        return 0.0  # as if it were a model's


class DigitRenderer:
    """A chat is its digits, each a token, after token 90 for every message; 91 ends an assistant's
    turn."""

    stop_token_ids = (91,)
    vocabulary = 0

    def prompts(self, chats, tools=()):
        if not all(m["content"].isdigit() or not m["content"] for chat in chats for m in chat):
            raise UserError("no digits")
        return [
            np.array([t for m in chat for t in (90, *map(int, m["content"]))], np.int64)
            for chat in chats
        ]

    def turn(self, messages):
        return np.concatenate([np.array([91], np.int64), *self.prompts([messages])])


class ScriptedReward:
    """Scores at once, by score(problem, attempt), which a test's reward has; keeps what it was
    given."""

    def __init__(self):
        self.items = []

    def submit(self, problem, attempt):
        self.items.append((problem, attempt.text))
        future = Future()
        future.set_result(self.score(problem, attempt))
        return future
