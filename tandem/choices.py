"""What a run chooses by a name, as objects that answer for themselves: base classes and look-up.

    kind         key                  base class       asked by the core
    ----         ---                  ----------       -----------------
    engines      rollout.engine       RolloutBackend   who samples; how exactly
    trainers     train.backend        Trainer          who runs the trained models
    streams      stream.kind          Plane            how a step's groups come to all ranks
    transports   weights.transport    Transport        how weights come to rollout workers
    machines     cluster.nodes        Machine          where workers and ranks run

An instance has no state of a run before `open`. As they stand, the base classes fit with
everything; a choice overrides what it does otherwise. `registry.py` imports the object that was
chosen, and no other. Imports neither torch nor any room: the config asks for contradictions.

    python -c "from tandem.config.schema import Config; from tandem.choices import choices; \
               print(choices(Config()))"
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from tandem.registry import find

if TYPE_CHECKING:
    from pathlib import Path

    from tandem.config.schema import Config
    from tandem.types import ParityCheck


Report = Callable[[str], None]


class Choice:
    """An object that a name of the config stands for."""

    gap = ""  # the setting by which trainer and rollouts compute with other kernels, or ""
    shares_files = True  # all who need the run's files find them where this process writes them

    def where(self, config: "Config") -> str:
        """Return the setting that has chosen it, e.g. "stream.kind = memory"."""
        return type(self).__name__

    def conflicts(self, config: "Config") -> Iterator[str]:
        """Yield "section.key: reason" for settings that do not go with it."""
        yield from ()

    def check(self, config: "Config") -> None:
        """Raise UserError, before a model is loaded, if what it needs is not there."""

    def check_model(self, config: "Config", shape: Any, key: str, head: str) -> None:
        """Raise UserError for a model of this transformers config that it cannot run. key: that
        names the model; head: "tokens" or "value"."""

    def describe(self, config: "Config") -> str:
        """Return its part of a run's first line, "" for none."""
        return ""


class RolloutBackend(Choice):
    """Who samples episodes: jobs/tandem_engine.py, jobs/http_backend.py, plugins/vllm, or of a
    package with an entry point `tandem.engines`."""

    on_nodes = False  # its workers run on the nodes of a cluster
    multiplies_here = True  # no other machine multiplies by the model's weights

    def where(self, config: "Config") -> str:
        return f"rollout.engine = {config.rollout.engine}"

    def rests(self, config: "Config") -> bool:
        """Tell whether rollout workers give memory to the updates."""
        return False

    def agrees(self, config: "Config") -> bool:
        """Tell whether a run holds it to the trainer's log-probs where the probe found them
        equal: not where a correction allows for another machine."""
        return True

    def parity(self, config: "Config", exact: bool, inexact: str) -> "ParityCheck":
        """Choose how trainer and engine are compared. exact: they must agree to the last bit;
        inexact: why the model cannot, or ""."""
        raise NotImplementedError

    def open(self, stage: Any) -> AbstractContextManager[Any]:
        """Open what samples for training, of a jobs.rollouts.RolloutStage; the context has
        jobs.rollouts.Rollouts."""
        raise NotImplementedError

    def load(self, config: "Config", renderer: Any, report: Report) -> Any:
        """Load the engine of a command that only generates; None for Tandem's, over the model."""
        return None


class Trainer(Choice):
    """Who runs the trained models: jobs/tandem_trainer.py or plugins/megatron."""

    runs_alone = True  # one process is no mesh

    def where(self, config: "Config") -> str:
        return f"train.backend = {config.train.backend}"

    def make_ranks(self, mesh: Any, processes: Any) -> Any:
        """Return the train.ranks.Ranks of a train.parallel mesh of joined processes."""
        raise NotImplementedError


class Plane(Choice):
    """How a step's groups come from the rollouts to the ranks: jobs/streams.py or
    plugins/cluster."""

    needs_nodes = False  # it runs on the nodes of a cluster

    def where(self, config: "Config") -> str:
        return f"stream.kind = {config.stream.kind}"

    def open(self, config: "Config", ranks: Any, report: Report) -> AbstractContextManager[Any]:
        """Open rank 0's end, a stream.stream.Stream; have the other ranks join it."""
        raise NotImplementedError

    def join(self, config: "Config", ranks: Any, servers: Mapping[str, Any]) -> Any:
        """Join the stream that rank 0 has opened; the caller closes it."""
        raise NotImplementedError


class Transport(Choice):
    """How weights come to rollout workers: weights/transports.py or plugins/cluster."""

    crosses_machines = False
    stages = False  # a worker receives all of a version into a copy of its own

    def open(self, tensors: Any, delta: Any) -> Any:
        """Open the publisher, a weights.shared.SharedWeights for these tensors."""
        raise NotImplementedError

    def reader(self) -> Callable[..., Any]:
        """Return the worker's end: it reads an offer, as weights.transports.Receiver says."""
        raise NotImplementedError


class Machine(Choice):
    """Where the workers and ranks of a run are: jobs/here.py or plugins/cluster."""

    usual_transport: str  # of weights, that weights.transport = auto stands for

    def own_place(self, config: "Config", place: Any) -> Any:
        """Return this process's runtime.place.Place among those that see the same GPUs."""
        return place

    def check_ranks(self, config: "Config") -> None:
        """Raise UserError if the processes of the mesh cannot run where they would be started."""

    def open(self, config: "Config", folder: "Path", *, only_ranks: bool = False) -> Any:
        """Open it for a run, as a context whose value has the methods below. folder: of the run;
        only_ranks: the run has no workers."""
        raise NotImplementedError

    def worker_device(self, device: str) -> str:
        """Return the device of a rollout worker. device: the trainer's, e.g. "cuda:3"."""
        return device

    def open_weights(self, config: "Config", tensors: Any) -> AbstractContextManager[Any]:
        """Open the transport of weights to rollout workers; the context has the publisher, and what
        spawns a worker elsewhere, or None. tensors: of a version of the weights."""
        raise NotImplementedError

    def open_envs(
        self, config: "Config", local: Any, report: Report
    ) -> AbstractContextManager[Any]:
        """Open what runs environments, a rollout.env_pool.EnvPool. local: that of this process,
        which has found out that they can be made."""
        raise NotImplementedError

    def open_rewards(
        self, config: "Config", local: Any, report: Report
    ) -> AbstractContextManager[Any]:
        """Open what scores episodes. local: the pool of this machine, which has found out that the
        functions can be loaded."""
        raise NotImplementedError

    def start_ranks(
        self, config: "Config", command: Sequence[str], place: Any, report: Report
    ) -> AbstractContextManager[Any]:
        """Open what starts the ranks after 0; the context has a function that starts them, and the
        place where they meet. command: of a rank, behind the interpreter."""
        raise NotImplementedError


def engine_name(engine: str) -> str:
    """Return the registry's name of a rollout.engine, which may be addresses of servers."""
    return "http" if engine.startswith(("http://", "https://")) else engine


def engine_of(config: "Config") -> RolloutBackend:
    name = engine_name(config.rollout.engine)
    found: RolloutBackend = find("engines", name, key="rollout.engine")()
    return found


def trainer_of(config: "Config") -> Trainer:
    found: Trainer = find("trainers", config.train.backend, key="train.backend")()
    return found


def plane_of(config: "Config") -> Plane:
    found: Plane = find("streams", config.stream.kind, key="stream.kind")()
    return found


def transport_of(config: "Config") -> Transport:
    name = config.weights.transport
    if name == "auto":
        name = machine_of(config).usual_transport
    found: Transport = find("transports", name, key="weights.transport")()
    return found


def machine_of(config: "Config") -> Machine:
    name = "ray" if config.cluster.nodes else "here"
    found: Machine = find("machines", name, key="cluster.nodes")()
    return found


def choices(config: "Config") -> list[Choice]:
    """Return every choice of a run."""
    return [
        trainer_of(config),
        engine_of(config),
        plane_of(config),
        transport_of(config),
        machine_of(config),
    ]


def why_gap(config: "Config", inexact: str) -> str:
    """Say why trainer and rollouts do not agree to the last bit: the kernels of a choice, or a
    model that cannot be exact, which is `inexact`; or ""."""
    return next((choice.gap for choice in choices(config) if choice.gap), inexact)
