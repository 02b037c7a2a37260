"""A rollout worker without a model, for tests of Workers: the real process, socket and loop around
an engine that hashes.

What it samples depends on request, weights and version only, and any bits may be a log-prob. The
text of a completion is the number of the process that made it. It may have a fault: in every
process, or in the one that finds and removes a file.

    python tests/support/odd_worker.py FAULT FILE PARENT < SOCKET
"""

import hashlib
import os
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from tandem.engine.dispatch import identity_of
from tandem.rollout_workers.protocol import completion_message
from tandem.rollout_workers.worker import Server, run
from tandem.runtime.errors import UserError
from tandem.types import Completion
from tandem.workers.fork_server import start

PASS_S = 0.003  # what a token takes
POISON = 666


def odd_command(fault="none", file=""):
    """The fault of every worker; with a file, of the one that comes first."""
    return (sys.executable, str(Path(__file__)), fault, str(file))


class LightWeights:
    """Versions of nothing but bytes. In place of SharedWeights."""

    layout = SimpleNamespace(parts=())

    def __init__(self):
        self.files, self.hashes = {}, {}

    def publish(self, version, data):
        self.files[version] = tempfile.TemporaryFile()  # noqa: SIM115
        self.files[version].write(data)
        self.files[version].flush()
        self.hashes[version] = hashlib.sha256(data).hexdigest()

    def offer(self, version, workers):
        return [({}, os.dup(self.files[version].fileno())) for _ in workers]

    def hash_of(self, version):
        return self.hashes[version]

    def loaded(self, version, seconds):
        pass


@dataclass(eq=False)
class LightRunning:
    request: object
    tokens: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    completion: Completion | None = None


class LightEngine:
    """Engine, as far as a worker uses it."""

    def __init__(self, fault="none"):
        self.fault, self.running, self.weights, self.version = fault, [], "", -1

    @property
    def has_work(self):
        return bool(self.running)

    def submit(self, request):
        self.running.append(LightRunning(request))
        return self.running[-1]

    def cancel(self, running):
        self.running.remove(running)

    def step(self):
        if self.fault == "spin":
            spin()
        if self.fault == "crash":
            raise RuntimeError("the engine fell over")
        prompts = [running.request.prompt for running in self.running]
        if self.fault == "poison" and any(POISON in prompt for prompt in prompts):
            raise RuntimeError("it was poison")
        time.sleep(PASS_S)
        before = list(self.running)
        for running in before:
            self.sample(running)
        return before

    def logprob_gap(self):
        return {"gap": 1e-6, "no number": float("nan")}.get(self.fault, 0.0)

    def sample(self, running):
        request, at = running.request, len(running.tokens)
        place = f"{self.weights} {request.key} {request.num_sampled + at} {request.prompt.tolist()}"
        bits = hashlib.sha256(place.encode()).digest()
        running.tokens.append(int.from_bytes(bits[:2], "little"))
        running.logprobs.append(bits[2:6])
        if at + 1 == request.params.max_new_tokens:
            self.running.remove(running)
            running.completion = Completion(
                tokens=np.array(running.tokens, np.int64),
                logprobs=np.frombuffer(b"".join(running.logprobs), np.float32),
                weight_versions=np.full(at + 1, self.version, np.int32),
                text=str(os.getpid()),
                stop_reason="length",
            )


def spin():
    while True:
        pass


class LightServer(Server):
    def _apply(self, version, source):
        time.sleep(0.05)
        descriptor = self.channel.descriptors.popleft()
        data = os.pread(descriptor, 1 << 20, 0)
        os.close(descriptor)
        fault = self.engine.fault
        if fault == "lost weights":
            self.channel.send({"applied": version, "failed": "the line is down"})
            return
        if fault == "other weights":
            data = b"other"
        self.engine.weights = hashlib.sha256(data).hexdigest()
        if fault != "stale" or self.engine.version < 0:
            self.engine.version = version
        self.channel.send({"applied": version, "hash": self.engine.weights, "differ": []})

    def _answer(self, running):
        fault = "none" if running.completion is None else self.engine.fault
        if fault == "garbage":
            os.write(self.channel.socket.fileno(), b"\x00\xff not a message\n")
        if fault == "swap" and len(self._numbers) > 1:
            number = next(n for other, n in self._numbers.items() if other is not running)
            identity = identity_of(running.request)
            self.channel.send(completion_message(number, identity, running.completion))
            return
        super()._answer(running)


def refuse(start):
    raise UserError("the model cannot be loaded", where="model.path", found="nothing")


def main(channel, fault, file):
    if file:
        try:
            os.unlink(file)
        except FileNotFoundError:
            fault = "none"
    if fault == "refuse":
        run(channel, refuse)
        return
    channel.wait(600.0)
    [message] = channel.receive()
    channel.send({"ready": True})
    try:
        LightServer(channel, LightEngine(fault), None, message["start"]["beat_s"]).serve()
    except EOFError:
        return


def preload(model_path):
    if sys.argv[1] == "slow import":
        time.sleep(3.0)
    if sys.argv[1] == "thread":
        threading.Thread(target=time.sleep, args=(600.0,), daemon=True).start()


if __name__ == "__main__":
    start(lambda channel, _: main(channel, *sys.argv[1:3]), preload)
