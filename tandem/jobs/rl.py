"""`tandem train` and `tandem distill`: jobs whose episodes are sampled on the way."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from tandem.choices import Report, engine_of, stream_of
from tandem.config.schema import Config
from tandem.jobs.engines import make_room
from tandem.jobs.exactness import require_parity
from tandem.jobs.rollouts import Rollouts, RolloutStage
from tandem.jobs.stage import open_stage
from tandem.registry import find
from tandem.rollout.collect import Collector, RolloutBatch
from tandem.rollout.score import sampling_params
from tandem.run_folder.files import RESTORE_OR_FRESH
from tandem.run_folder.folder import RunFolder
from tandem.runtime.errors import UserError
from tandem.step import Stages, train_step
from tandem.train_loop import TrainJob
from tandem.types import Row, StepResult

if TYPE_CHECKING:
    from tandem.step_async import RolloutPrefetcher


class RLJob(TrainJob):
    """A job for train_loop.py that repeats `train_step`, or `train_step_async` with rollouts ahead
    of the training."""

    def __init__(
        self,
        stages: Stages,
        evaluate: Callable[[int], Row],
        data: dict[str, str],
        pools: Sequence[Any] = (),
        ahead: "RolloutPrefetcher | None" = None,
    ):
        config, self.pools, self.learners = stages.config, pools, stages.models.learners
        self.stages, self.evaluate, self.data, self.ahead = stages, evaluate, data, ahead
        self.steps, self.eval_every = config.run.steps, config.eval.every

    def start(self, done: int) -> None:
        self.stages.journal.drop_other_meshes(done, self.stages.config.rollout.staleness)
        self.stages.models.policy.publish()
        self.stages.sync.publish(done)
        if self.ahead is not None:
            self.ahead.start(done)

    def step(self, done: int) -> StepResult:
        if self.ahead is None:
            return train_step(self.stages, done)
        from tandem.step_async import train_step_async

        return train_step_async(self.ahead, done)

    def restore(self, done: int, state: dict[str, Any]) -> None:
        """Take up the state that step `done` has left; groups that it left are in the journal."""
        config, journal, groups = self.stages.config, self.stages.journal, []
        if done and (config.rl.max_gen_batches or config.rollout.token_budget):
            if (recorded := journal.read(done)) is None:
                raise UserError(
                    "the journal does not have what the checkpoint's step left to the next",
                    where=str(journal.folder),
                    found=f"no file of this run for step {done}",
                    expected=f"train_step_{done:06d}.parquet",
                    next=RESTORE_OR_FRESH,
                )
            groups = recorded[0]
        self.stages.collector.progress.restore(state, groups)

    def wait_until_durable(self, done: int) -> None:
        """Wait for episodes ahead; those of a step are in the journal before it is trained."""
        if self.ahead is not None:
            self.ahead.wait_until_durable(done)

    def workers(self) -> list[dict[str, Any]]:
        return [row for pool in self.pools for row in pool.status()]

    def stop_soon(self) -> None:
        if self.ahead is not None:
            self.ahead.stop_soon()


@contextmanager
def open_rl_job(config: Config, run: RunFolder, report: Report) -> Iterator[RLJob]:
    """Open the job of `tandem train` or `tandem distill`."""
    with open_stage(config, run, report) as stage:
        models = find("models", run.command, key="command")(config, stage.ranks)
        workers, stale = config.rollout.workers, config.rollout.staleness > 0
        busy = workers > 1 or stale  # a worker is not the only one that computes
        found = stage.probe(models.policy.whole, models.others, workers * stale)
        parity = require_parity(config, found)
        engine, local = stage.open_engine(models.policy.whole)
        rollout_stage = RolloutStage(
            config=config,
            engine=engine,
            local=local,
            folder=run.path,
            exact=parity.exact,
            worker_threads=1 if busy or found.thread_dependent else torch.get_num_threads(),
            machine=stage.machine,
            report=report,
        )
        with (
            engine_of(config).open(rollout_stage) as rollouts,
            stream_of(config).open(config, stage.ranks, report) as stream,
        ):
            sampling = sampling_params(config.rollout, stage.inputs.renderer)
            runner, sync = rollouts.lanes[0]
            leave_memory = make_room(config, engine)

            def before_updates(rollouts: RolloutBatch) -> None:
                """Make room on the device; order the other ranks to learn from the same."""
                leave_memory()
                stage.ranks.order(
                    "learn",
                    step=rollouts.step,
                    num_carried=rollouts.num_carried,
                    baseline=rollouts.baseline,
                    exact=parity.exact,
                )

            stages = Stages(
                config=config,
                models=models,
                sampling=sampling,
                parity=parity,
                collector=Collector(
                    config=config,
                    problems=stage.inputs.problems,
                    runner=runner,
                    sampling=sampling,
                    journal=stage.journal(stage.inputs.problems),
                ),
                sync=sync,
                stream=stream,
                before_updates=before_updates,
            )
            stages.journal.clean()
            pools = [pool for pool in (rollouts.pool, *(stage.workers or ())) if pool is not None]
            with _open_ahead(stages, rollouts) as ahead:
                yield RLJob(stages, stage.evaluation(local), stage.data, pools, ahead)


@contextmanager
def _open_ahead(stages: Stages, rollouts: Rollouts) -> Iterator["RolloutPrefetcher | None"]:
    """Open the rollouts of coming steps, with rollout.staleness. Their lanes share progress,
    journal and rewards."""
    if not stages.config.rollout.staleness:
        yield None
        return
    from tandem import step_async

    lanes = [
        replace(stages, sync=sync, collector=replace(stages.collector, runner=runner))
        for runner, sync in rollouts.lanes
    ]
    steps = stages.config.run.steps
    with closing(step_async.RolloutPrefetcher(stages, steps, rollouts.stop, lanes)) as ahead:
        yield ahead
