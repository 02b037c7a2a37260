"""`tandem train` and `tandem distill`: jobs whose episodes are sampled on the way."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from tandem.choices import Report, engine_of, stream_of
from tandem.config.schema import Config
from tandem.jobs.engines import make_room
from tandem.jobs.exactness import require_parity
from tandem.jobs.rl_job import RLJob
from tandem.jobs.rollouts import Rollouts, RolloutStage
from tandem.jobs.stage import open_stage
from tandem.registry import find
from tandem.rollout.collect import Collector, RolloutBatch
from tandem.rollout.score import sampling_params
from tandem.run_folder.folder import RunFolder
from tandem.step import Stages

if TYPE_CHECKING:
    from tandem.step_async import RolloutPrefetcher


@contextmanager
def open_rl_job(config: Config, run: RunFolder, report: Report) -> Iterator[RLJob]:
    """Open the job of `tandem train` or `tandem distill`."""
    with open_stage(config, run, report) as stage:
        models = find("models", run.command, key="command")(config, stage.ranks)
        found = stage.probe(models.policy.whole, models.others, config.rollout.workers)
        parity = require_parity(config, found)
        engine, local = stage.open_engine(models.policy.whole)
        rollout_stage = RolloutStage(
            config=config,
            engine=engine,
            local=local,
            folder=run.path,
            exact=parity.exact,
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
