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
from importlib import import_module
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

PRELOADED = (
    "tandem.engine.inexact_engine",
    "tandem.engine.sync_check",
    "tandem.model.kernels",
    "tandem.model.lean",
    "tandem.model.load",
    "tandem.model.tokenizer",
    "tandem.weights.delta",
    "tandem.weights.transports",
)


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


class Server:
    """Service of a channel with an engine until the channel ends. receive: gets the weights; rests:
    after a check the engine gives memory to the trainer's update."""

    def __init__(
        self,
        channel: Channel,
        engine: ServedEngine,
        receive: Receive,
        beat_s: float,
        rests: bool = False,
    ):
        self._channel, self._engine, self._receive, self._beat_s = channel, engine, receive, beat_s
        self._rests = rests
        self._numbers: dict[Running, int] = {}  # of the requests that run
        self._sync_gap: float | None = None  # of the weights in use to their probe, if they had one

    def serve(self) -> None:
        """Serve. Raises EOFError when the pool is gone."""
        while True:
            self._channel.wait(0.0 if self._engine.has_work else self._beat_s)
            for message in self._channel.receive():
                self._handle(message)
            if self._engine.has_work:
                for running in self._engine.step():
                    self._answer(running)
            if time.monotonic() - self._channel.last_sent >= self._beat_s:
                self._channel.send({"alive": self._engine.has_work})

    def _handle(self, message: Message) -> None:
        match message:
            case {"request": int(number)}:
                self._numbers[self._engine.submit(read_request(message))] = number
            case {"cancel": int(number)}:
                for running in [one for one, its in self._numbers.items() if its == number]:
                    del self._numbers[running]
                    self._engine.cancel(running)
                    self._channel.send({"cancelled": number})
                # none found: its completion is on the way
            case {"check": int(version)}:
                with signs_of_life(self._channel, self._beat_s):
                    gap = self._sync_gap
                    gap = self._engine.logprob_gap() if gap is None else gap
                    if self._rests and not self._engine.has_work:
                        self._engine.rest()
                self._channel.send({"checked": version, "gap": gap})
            case {"apply": int(version), "from": dict(source)}:
                self._apply(version, source)
            case _:
                raise RuntimeError(f"no such message: {message}")

    def _answer(self, running: Running) -> None:
        if running.completion is not None:
            # the identity of the request as the engine had it
            identity = identity_of(running.request)
            number = self._numbers.pop(running)
            self._channel.send(completion_message(number, identity, running.completion))

    def _apply(self, version: int, source: Message) -> None:
        from tandem.engine.sync_check import check_probe
        from tandem.weights.delta import decode
        from tandem.weights.hashing import DIGESTS, combine

        if self._numbers:
            raise RuntimeError(
                f"weights of version {version} came while {len(self._numbers)} requests run"
            )
        try:
            with signs_of_life(self._channel, self._beat_s):
                weights = self._receive(source, self._channel.descriptors)
                if "parts" in source:  # differences from the weights that run
                    base = self._engine.model.named_weights()
                    weights = {name: decode(base[name], part) for name, part in weights.items()}
        except RuntimeError as error:  # the weights in use are whole as before
            self._channel.send({"applied": version, "failed": f"{error}"})
            return
        with signs_of_life(self._channel, self._beat_s):
            self._engine.apply(version, lambda: self._engine.model.load_weights(weights))
            found = self._engine.weight_digests(DIGESTS[source["digest"]])
            expected = source["digests"]
            names = {**expected, **found}
            differ = [name for name in names if found.get(name) != expected.get(name)]
            probe = None if differ else source["probe"]  # a late worker may load what is gone
            self._sync_gap = probe and check_probe(self._engine.score, probe, version)
        self._channel.send({"applied": version, "hash": combine(found), "differ": differ[:3]})


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
    for module in PRELOADED:
        import_module(module)
    find("kernels", "cpu", key="model.device")
    from tandem.model.stock import import_stock

    import_stock(model_path)


if __name__ == "__main__":
    start(lambda channel, _: run(channel), preload)
