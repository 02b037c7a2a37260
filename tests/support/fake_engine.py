"""A hand-written engine for the service and the server: it writes what its script says, byte by
byte, without a model."""

import threading
from collections.abc import Sequence

import numpy as np

from tandem.engine.ending import find_ending
from tandem.engine.scheduler import QueueFull, RunningSequence
from tandem.plugins.serve.requests import Served
from tests.support.scripted import said
from tests.support.waiting import WAIT_S

FAKE = Served(name="fake", context=4096, vocabulary=256, default_max_tokens=16, max_choices=8)


class FakeEngine:
    """Every request gets the bytes of `script`, over and over; one byte a step, and no more than
    `allowed` steps run.

    The first bytes of a prompt are left alone. submit refuses the request after the `room`-th that
    runs; the step number `fails_at` raises.
    """

    def __init__(self, script: str, *, room: int = 64, fails_at: int = -1):
        self.script, self.room, self.fails_at = script.encode(), room, fails_at
        self.weight_version = 7
        self.running: list[RunningSequence] = []
        self.cancelled: list[RunningSequence] = []
        self.go = threading.Event()  # cleared by a test that wants the steps to wait
        self.go.set()
        self.steps = 0
        self.threads: set[int] = set()

    @property
    def has_work(self):
        return bool(self.running)

    def submit(self, request):
        self.threads.add(threading.get_ident())
        if len(self.running) >= self.room:
            raise QueueFull(f"{len(self.running)} requests are waiting")
        self.running.append(RunningSequence(request=request, arrival=0))
        return self.running[-1]

    def cancel(self, sequence):
        if sequence.completion is None:
            self.cancelled.append(sequence)
            self._end(sequence, "", "cancelled")

    def step(self):
        self.threads.add(threading.get_ident())
        self.go.wait(WAIT_S)
        self.steps += 1
        if self.steps == self.fails_at:
            raise ArithmeticError("out of numbers")
        ready = list(self.running)
        for running in ready:
            self._advance(running)
        return ready

    def _advance(self, running):
        running.tokens.append(self.script[len(running.tokens) % len(self.script)])
        running.logprobs.append(-0.5)
        running.weight_versions.append(self.weight_version)
        params = running.request.params
        if params.top_logprobs:
            others = list(range(params.top_logprobs))
            running.top.append((others, [float("-inf")] * len(others)))
        if ending := find_ending(params, running.tokens, 0, FakeTexts().decode):
            self._end(running, *ending)

    def _end(self, running, text, reason):
        self.running.remove(running)
        how = {"logprob": running.logprobs, "version": running.weight_versions}
        running.completion = said(running.tokens, text, reason, **how)

    def stats(self):
        return {"running": len(self.running), "generated_tokens": self.steps}

    def weight_hash(self):
        return "f" * 64


class FakeTexts:
    """Every byte is a token, and byte 0 ends a turn."""

    stop_token_ids = (0,)
    vocabulary = 0
    byte_tokens: frozenset[int] = frozenset()

    def encode(self, text):
        return np.frombuffer(text.encode(), np.uint8).astype(np.int64)

    def render(self, messages, tools, variables):
        shown = "".join(f"tool:{tool['function']['name']}\n" for tool in tools)
        shown += "".join(f"{name}={value}\n" for name, value in variables.items())
        return shown + "".join(f"{m['role']}:{m['content']}\n" for m in messages)

    def encode_chat(self, text):
        return self.encode(text)

    def decode(self, tokens: Sequence[int]):
        return bytes(list(tokens)).decode(errors="replace")

    def token_text(self, token):
        return self.decode([token])
