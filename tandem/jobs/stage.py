"""The stage of a command that trains: all that rank 0 opens before the models. In this order inputs
are checked, workers start, then the other ranks (follow.py)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from tandem.choices import Report, choices, machine_of
from tandem.config.schema import Config
from tandem.engine.engine import Engine
from tandem.jobs.engines import (
    build_engine,
    build_runner,
    open_envs_and_rewards,
    prepare_process,
    probe_exactness,
)
from tandem.jobs.here import Here
from tandem.jobs.models import placement
from tandem.jobs.ranks import open_ranks
from tandem.model.load import ExactModel
from tandem.model.probe import Exactness
from tandem.registry import find
from tandem.rewards.pool import ScorePool
from tandem.rollout.env_pool import EnvPool
from tandem.rollout.score import RolloutRunner
from tandem.run_folder.folder import RunFolder, identity
from tandem.run_folder.journal import Journal
from tandem.trainer.ranks import Ranks
from tandem.types import Problem, Row

SAMPLING = ("train", "distill")  # commands whose episodes are sampled on the way


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Everything that is open before a command's models."""

    config: Config
    run: RunFolder
    report: Report
    inputs: Any  # jobs.inputs.Inputs of the command
    data: dict[str, str]  # SHA-256 of the files that the run is a function of, by key
    run_id: str  # of the journal
    machine: Here
    workers: tuple[EnvPool, ScorePool[Any]] | None  # None: nothing is sampled
    ranks: Ranks

    def probe(
        self, model: ExactModel, others: Sequence[ExactModel] = (), workers: int = 0
    ) -> Exactness:
        """Find out whether engine and trainer agree on this machine, and note the machine."""
        found = probe_exactness(
            self.config, model, self.report, workers=workers, others=others, folder=self.run.path
        )
        place, same_bits = placement(self.config), not found.thread_dependent
        if news := self.run.note_machine(place.processor(), same_bits, found.matmul):
            self.report(news)
        if model.device.type == "cpu":
            self.ranks.order("use_kernels", kernels=found.matmul)
        return found

    def open_engine(self, model: ExactModel) -> tuple[Engine, RolloutRunner]:
        """Build an engine over the model, and what plays and scores episodes with it."""
        assert self.workers is not None
        engine = build_engine(self.config, model, self.inputs.renderer)
        return engine, build_runner(self.config, engine, self.inputs.renderer, *self.workers)

    def journal(self, problems: Sequence[Problem]) -> Journal:
        return Journal(self.run.episodes, self.run_id, problems, self.config.parallel.mesh)

    def evaluation(self, runner: RolloutRunner) -> Callable[[int], Row]:
        """Return what evaluates on eval.data after a step, and without eval.data does nothing."""
        from tandem.rollout.evaluate import Evaluator

        return Evaluator(
            config=self.config,
            problems=self.inputs.held_out,
            runner=runner,
            journal=self.journal(self.inputs.held_out),
        )


@contextmanager
def open_stage(config: Config, run: RunFolder, report: Report) -> Iterator[Stage]:
    """Open the stage of a command. One that learns from fixed data samples here, to evaluate."""
    samples = run.command in SAMPLING
    for choice in choices(config) if samples else ():
        choice.check(config)
    prepare_process(config)
    inputs = read_inputs(config, run.command)
    data = inputs.hashes(config)
    run_id = identity(config, data)
    with machine_of(config).open(config, run.path, only_ranks=not samples) as machine:
        place, needed = machine if samples else None, samples or inputs.held_out
        opening = open_envs_and_rewards(config, place, report) if needed else nullcontext()
        with opening as workers, open_ranks(config, run, report, machine, run_id) as ranks:
            yield Stage(
                config=config,
                run=run,
                report=report,
                inputs=inputs,
                data=data,
                run_id=run_id,
                machine=machine,
                workers=workers,
                ranks=ranks,
            )


def read_inputs(config: Config, command: str) -> Any:
    """Read and check a command's inputs, on any rank."""
    return find("inputs", command, key="command")(config)
