"""A rollout worker: a process with a model, an engine and one torch thread, which serves the pool
that started it.

    channel --> "start" --> load model and tokenizer --> "ready" --> +--> "apply": receive, load,
                                                                     |             hash
                                                                     |    "request": Engine.submit
                                                                     |    Engine.step: "completion"
                                                                     +--- a sign of life; receive

Standard input is the channel (protocol.py has the messages), standard output the standard error of
the pool's process, and standard error a file that is quoted after a crash. One thread does all of
it, so a sign of life says that the engine itself goes on. Only while the process starts or loads
weights, one long call, a second thread gives it, for a bounded time. The worker ends when the
channel does, and on Linux with its parent (fork_server.py has how it begins). It knows no problem,
no reward, and no other worker.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from tandem.engine.dispatch import identity_of
from tandem.registry import find
from tandem.rollout_workers.protocol import completion_message, read_request
from tandem.runtime import numerics
from tandem.types import Array, Completion, Request
from tandem.workers.channel import Channel, Message
from tandem.workers.fork_server import start
from tandem.workers.serve import serve_from_start, signs_of_life

if TYPE_CHECKING:  # torch is imported when there are signs of life already
    from torch import Tensor

    from tandem.engine.engine import Engine
    from tandem.weights.hashing import Digest
    from tandem.weights.shared import Layout

# Gets the weights of an offer (SharedWeights.offer); descriptors: those that came beside messages.
Receive = Callable[[Message, deque[int]], "dict[str, Tensor]"]


class Running(Protocol):
    """A request that an engine runs."""

    request: Request
    completion: Completion | None  # once it has ended


class ServedEngine(Protocol):
    """An engine as a worker serves it: engine/engine.py, or vLLM's (plugins/vllm/engine.py)."""

    # load_weights takes the published weights, tensors by name; named_weights has those that run
    model: Any

    @property
    def has_work(self) -> bool: ...

    def submit(self, request: Request) -> Any: ...

    def step(self) -> Sequence[Any]: ...

    def cancel(self, running: Any, /) -> None: ...

    def apply(self, version: int, load: Callable[[], None]) -> None: ...

    def weight_digests(self, digest: "Digest", /) -> dict[str, str]: ...

    def logprob_gap(self) -> float: ...

    def rest(self) -> None: ...

    def score(self, tokens: Array, /) -> Array: ...


@dataclass(eq=False)
class Server:
    """Service of a channel with an engine until the channel ends. receive: gets the weights; rests:
    after a check the engine gives memory to the trainer's update."""

    channel: Channel
    engine: ServedEngine
    receive: Receive
    beat_s: float
    rests: bool = False
    _numbers: dict[Running, int] = field(init=False, default_factory=dict)  # of running requests
    _sync_gap: float | None = field(init=False, default=None)  # of the weights in use

    def serve(self) -> None:
        """Serve. Raises EOFError when the pool is gone."""
        while True:
            self.channel.wait(0.0 if self.engine.has_work else self.beat_s)
            for message in self.channel.receive():
                self._handle(message)
            if self.engine.has_work:
                for running in self.engine.step():
                    self._answer(running)
            if time.monotonic() - self.channel.last_sent >= self.beat_s:
                self.channel.send({"alive": self.engine.has_work})

    def _handle(self, message: Message) -> None:
        match message:
            case {"request": int(number)}:
                self._numbers[self.engine.submit(read_request(message))] = number
            case {"cancel": int(number)}:
                for running in [one for one, its in self._numbers.items() if its == number]:
                    del self._numbers[running]
                    self.engine.cancel(running)
                    self.channel.send({"cancelled": number})
                # none found: its completion is on the way
            case {"check": int(version)}:
                with signs_of_life(self.channel, self.beat_s):
                    gap = self._sync_gap
                    gap = self.engine.logprob_gap() if gap is None else gap
                    if self.rests and not self.engine.has_work:
                        self.engine.rest()
                self.channel.send({"checked": version, "gap": gap})
            case {"apply": int(version), "from": dict(source)}:
                self._apply(version, source)
            case _:
                raise RuntimeError(f"no such message: {message}")

    def _answer(self, running: Running) -> None:
        if running.completion is not None:
            # the identity of the request as the engine had it
            identity = identity_of(running.request)
            number = self._numbers.pop(running)
            self.channel.send(completion_message(number, identity, running.completion))

    def _apply(self, version: int, source: Message) -> None:
        from tandem.engine.sync_check import check_probe
        from tandem.weights.delta import decode
        from tandem.weights.hashing import DIGESTS, combine

        if self._numbers:
            raise RuntimeError(
                f"weights of version {version} came while {len(self._numbers)} requests run"
            )
        try:
            with signs_of_life(self.channel, self.beat_s):
                weights = self.receive(source, self.channel.descriptors)
                if "parts" in source:  # differences from the weights that run
                    base = self.engine.model.named_weights()
                    weights = {name: decode(base[name], part) for name, part in weights.items()}
        except RuntimeError as error:  # the weights in use are whole as before
            self.channel.send({"applied": version, "failed": f"{error}"})
            return
        with signs_of_life(self.channel, self.beat_s):
            self.engine.apply(version, lambda: self.engine.model.load_weights(weights))
            found = self.engine.weight_digests(DIGESTS[source["digest"]])
            expected = source["digests"]
            names = {**expected, **found}
            differ = [name for name in names if found.get(name) != expected.get(name)]
            probe = None if differ else source["probe"]  # a late worker may load what is gone
            self._sync_gap = probe and check_probe(self.engine.score, probe, version)
        self.channel.send({"applied": version, "hash": combine(found), "differ": differ[:3]})


def load_engine(start: dict[str, Any]) -> "Engine":
    """Load the engine of a model directory, without an adapter: published weights are merged."""
    numerics.prepare(min(start["threads"], numerics.cores()))
    from torch import cuda

    from tandem.engine.engine import make_engine
    from tandem.model import custom_code
    from tandem.model.load import load_model
    from tandem.model.placement import place_models
    from tandem.model.tokenizer import decode_text, load_tokenizer

    custom_code.allow(start["trust_remote_code"])
    place = place_models(start["device"], start["dtype"])
    if place.device.type == "cuda":
        cuda.set_device(place.device)  # what weights/transports.py receives into
    model = load_model(start["model_path"], place=place)
    model.split(start["splits"])
    model.kernels.use_matmul(start["matmul"])
    tokenizer, size = load_tokenizer(start["model_path"]), start["max_batch"]
    return make_engine(
        model,
        lambda tokens: decode_text(tokenizer, tokens),
        cache_bytes=start["cache_bytes"],
        max_batch=size,
        max_queue=size,
        record_experts=start["record_experts"],
    )


def run(
    channel: Channel,
    load: Callable[[dict[str, Any]], ServedEngine] = load_engine,
    receiver: "Callable[[Layout], Receive] | None" = None,
) -> None:
    """Serve an engine to the pool of a channel. receiver: makes, of the layout of the weights, what
    gets them; by default by any transport between processes."""

    def load_all(start: Message) -> Callable[[], None]:
        engine = load(start)
        from tandem.weights.shared import Layout
        from tandem.weights.transports import receive_offers

        receive = (receiver or receive_offers)(Layout.from_json(start["layout"]))
        return Server(channel, engine, receive, start["beat_s"], start["release_cache"]).serve

    serve_from_start(channel, load_all)


def preload(model_path: str) -> None:
    """Import what `load_engine` and a first sync need for a model; compute nothing."""
    from tandem.engine import inexact_engine, sync_check  # noqa: F401
    from tandem.model import kernels, lean, load, stock, tokenizer  # noqa: F401
    from tandem.weights import delta, transports  # noqa: F401

    find("kernels", "cpu", key="model.device")
    stock.import_stock(model_path)


if __name__ == "__main__":
    start(lambda channel, _: run(channel), preload)
