"""Choices of a run as objects that answer for themselves: base classes, and how they are found.

    kind         key                  base class        what it decides
    ----         ---                  ----------        ---------------
    engines      rollout.engine       RolloutBackend    who samples, and how exactly
    trainers     train.backend        Trainer           who runs the trained models
    streams      stream.kind          StreamBackend     how a step's groups come to all ranks
    transports   weights.transport    Transport         how weights come to rollout workers
    machines     cluster.nodes        jobs/here.py      where workers and ranks run

As they stand, the base classes fit with everything; a choice overrides what it does otherwise.
`registry.py` imports the object that was chosen, and no other. Imports neither torch nor any room:
the config asks for contradictions.

    python -c "from tandem.config.schema import Config; from tandem.choices import choices; \
               print(choices(Config()))"
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from tandem.registry import find

Config = Any  # config.schema.Config, which imports this file
Report = Callable[[str], None]
ENGINE = "rollout.engine"  # the key, in messages


class Choice(ABC):
    """An object that a name of the config stands for."""

    gap = ""  # the setting by which trainer and rollouts compute with other kernels, or ""
    shares_files = True  # all who need the run's files find them where this process writes them

    @abstractmethod
    def where(self, config: Config) -> str:
        """Return the setting that has chosen it, e.g. "stream.kind = memory"."""

    def conflicts(self, config: Config) -> Iterator[str]:
        """Yield "section.key: reason" for settings that do not go with it."""
        yield from ()

    def check(self, config: Config) -> None:
        """Raise UserError, before a model is loaded, if what it needs is not there."""
        return  # it needs nothing

    def check_model(self, config: Config, shape: Any, key: str, head: str) -> None:
        """Raise UserError for a model of this transformers config that it cannot run. key: that
        names the model; head: "tokens" or "value"."""
        return  # it runs every model

    def describe(self, config: Config) -> str:
        """Return its part of a run's first line, "" for none."""
        return ""


class RolloutBackend(Choice):
    """Sampler of episodes: jobs/own_choices.py, plugins/servers, plugins/vllm, or of a
    package with an entry point `tandem.engines`."""

    on_nodes = False  # its workers run on the nodes of a cluster
    multiplies_here = True  # no other machine multiplies by the model's weights

    def where(self, config: Config) -> str:
        return f"{ENGINE} = {config.rollout.engine}"

    def describe(self, config: Config) -> str:
        workers, engine = config.rollout.workers, config.rollout.engine
        return f"{workers} rollout workers ({engine})" if workers else ""

    def rests(self, config: Config) -> bool:
        """Tell whether rollout workers give memory to the updates."""
        return False

    def agrees(self, config: Config) -> bool:
        """Tell whether a run holds it to the trainer's log-probs where the probe found them
        equal: not where a correction allows for another machine."""
        return True

    @abstractmethod
    def parity(self, config: Config, exact: bool, inexact: str) -> Any:
        """Choose how trainer and engine are compared, a types.ParityCheck. exact: they must agree
        to the last bit; inexact: why the model cannot, or ""."""

    @abstractmethod
    def open(self, stage: Any) -> Any:
        """Open what samples for training, of a jobs.rollouts.RolloutStage, as a context of
        jobs.rollouts.Rollouts."""

    def load(self, config: Config, renderer: Any, report: Report) -> Any:
        """Load the engine of a command that only generates, a types.Generate; None for Tandem's."""
        return None


class Trainer(Choice):
    """Runner of the trained models: jobs/own_choices.py, plugins/megatron, or of a package with
    an entry point `tandem.trainers`."""

    runs_alone = True  # one process is no mesh

    def where(self, config: Config) -> str:
        return f"train.backend = {config.train.backend}"

    @abstractmethod
    def make_ranks(self, mesh: Any, processes: Any) -> Any:
        """Return the trainer.ranks.Ranks of a trainer.parallel mesh of joined processes."""


class StreamBackend(Choice):
    """The way of a step's groups from the rollouts to the ranks: jobs/own_choices.py,
    plugins/cluster, or of a package with an entry point `tandem.streams`."""

    needs_nodes = False  # it runs on the nodes of a cluster

    def where(self, config: Config) -> str:
        return f"stream.kind = {config.stream.kind}"

    @abstractmethod
    def open(self, config: Config, ranks: Any, report: Report) -> Any:
        """Open rank 0's end as a context of a stream.stream.Stream; have the other ranks join."""

    def join(self, config: Config, ranks: Any, servers: Any) -> Any:
        """Join the stream that rank 0 has opened; the caller closes it. Asked of those alone whose
        `open` has had the ranks join."""
        raise NotImplementedError


class Transport(Choice):
    """The way of weights to rollout workers: weights/transports.py, plugins/cluster, or of a
    package with an entry point `tandem.transports`."""

    crosses_machines = False
    stages = False  # a worker receives all of a version into a copy of its own
    memory = "shared memory"  # where published versions are

    def where(self, config: Config) -> str:
        return f"weights.transport = {config.weights.transport}"

    def open(self, tensors: Any, delta: Any) -> Any:
        """Open the publisher, a weights.shared.SharedWeights for these tensors."""
        raise NotImplementedError

    def open_on(self, cluster: Any, tensors: Any, delta: Any) -> Any:
        """Open it for workers on the nodes of a cluster, if it crosses machines."""
        raise NotImplementedError

    def reader(self) -> Callable[..., Any]:
        """Return the worker's end: it reads an offer, as weights.transports.receive_offers says."""
        raise NotImplementedError


def engine_name(engine: str) -> str:
    """Return the registry's name of an engine, which may be addresses of servers."""
    return "http" if engine.startswith(("http://", "https://")) else engine


def engine_of(config: Config) -> RolloutBackend:
    return find("engines", engine_name(config.rollout.engine), key=ENGINE)()


def trainer_of(config: Config) -> Trainer:
    return find("trainers", config.train.backend, key="train.backend")()


def stream_of(config: Config) -> StreamBackend:
    return find("streams", config.stream.kind, key="stream.kind")()


def transport_of(config: Config) -> Transport:
    name = config.weights.transport
    name = machine_of(config).usual_transport if name == "auto" else name
    return find("transports", name, key="weights.transport")()


def machine_of(config: Config) -> Any:
    """Return the jobs.here.Here of a run."""
    return find("machines", "ray" if config.cluster.nodes else "here", key="cluster.nodes")()


def choices(config: Config) -> list[Choice]:
    """Return every choice of a run."""
    finders = trainer_of, engine_of, transport_of, machine_of, stream_of
    return [choice_of(config) for choice_of in finders]


def is_here(config: Config) -> bool:
    """Tell whether one trainer and workers on this machine compute a run, by the same kernels."""
    is_own = all(choice.shares_files and not choice.gap for choice in choices(config))
    return is_own and config.parallel.processes == 1


def why_gap(config: Config, inexact: str) -> str:
    """Say why trainer and rollouts do not agree to the last bit: the kernels of a choice, or a
    model that cannot be exact, which is `inexact`; or ""."""
    return next((choice.gap for choice in choices(config) if choice.gap), inexact)
