"""`tandem train` and `tandem distill`: jobs whose episodes are sampled on the way."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from tandem.config.schema import Config
from tandem.engine.worker_pool.client import PoolThread
from tandem.engine.worker_pool.pool import Workers
from tandem.jobs.engines import (
    Report,
    build_engine,
    build_runner,
    make_room,
    open_envs_and_rewards,
    open_rollouts,
    prepare_process,
    probe_exactness,
)
from tandem.jobs.exactness import require_parity
from tandem.jobs.input_hashes import KEYS, input_hashes
from tandem.jobs.inputs import distill_inputs, training_inputs
from tandem.jobs.models import build_distill_models, build_rl_models, placement
from tandem.jobs.ranks import open_ranks
from tandem.jobs.streams import open_stream
from tandem.model.probe import Exactness
from tandem.plugins.cluster.job import ScaleOnRequest, check_cluster, open_cluster
from tandem.rewards.pool.pool import TaskPool
from tandem.rollout.collect import Collector, RolloutBatch
from tandem.rollout.env_pool import EnvPool
from tandem.rollout.evaluate import Evaluator, sampling_params
from tandem.rollout.score import RolloutRunner
from tandem.run_folder.folder import RunFolder, identity
from tandem.run_folder.journal import Journal
from tandem.runtime.errors import UserError
from tandem.step import Stages, StepResult, train_step
from tandem.step_async import RolloutPrefetcher, train_step_async
from tandem.train.learner import Learner
from tandem.train.ranks import Ranks
from tandem.types import Problem, Sync

Pool = Workers | PoolThread | TaskPool | EnvPool


class RLJob:
    """A job for train_loop.py that repeats `train_step`."""

    def __init__(
        self,
        stages: Stages,
        evaluate: Evaluator,
        data: dict[str, str],
        pools: Sequence[Pool | None] = (),
    ):
        config, models, self.pools = stages.config, stages.models, pools
        self.stages, self.evaluate, self.data = stages, evaluate, data
        self.learners = {"policy": models.policy}
        if models.critic is not None:
            self.learners["critic"] = models.critic
        self.steps, self.eval_every = config.run.steps, config.eval.every

    def start(self, done: int) -> None:
        staleness = self.stages.config.rollout.staleness
        self.stages.journal.drop_other_meshes(done, staleness)
        self.stages.sync.publish(done)

    def step(self, done: int) -> StepResult:
        return train_step(self.stages, done)

    def restore(self, done: int, state: dict[str, Any]) -> None:
        """Take up the state that step `done` has left; groups that it left are in the journal."""
        config, journal, groups = self.stages.config, self.stages.journal, []
        if done and (config.rl.max_gen_batches or config.rollout.token_budget):
            if (recorded := journal.read(done)) is None:
                raise _not_in_journal(journal, done)
            groups = recorded[0]
        self.stages.collector.progress.restore(state, groups)

    def wait_until_durable(self, done: int) -> None:
        """Return at once: the episodes of a step are in the journal before it is trained."""

    def workers(self) -> list[dict[str, Any]]:
        return [row for pool in self.pools if pool is not None for row in pool.status()]

    def stop_soon(self) -> None:
        """Do nothing: no thread waits."""


class AsyncRLJob(RLJob):
    """An RLJob with rollouts ahead of the training."""

    def __init__(
        self,
        stages: Stages,
        evaluate: Evaluator,
        data: dict[str, str],
        prefetcher: RolloutPrefetcher,
        pools: Sequence[Pool | None] = (),
    ):
        super().__init__(stages, evaluate, data, pools)
        self.prefetcher = prefetcher

    def start(self, done: int) -> None:
        super().start(done)
        self.prefetcher.start(done)

    def step(self, done: int) -> StepResult:
        return train_step_async(self.prefetcher, done)

    def wait_until_durable(self, done: int) -> None:
        self.prefetcher.wait_until_durable(done)

    def stop_soon(self) -> None:
        self.prefetcher.stop_soon()


@contextmanager
def open_rl_job(config: Config, run: RunFolder, report: Report) -> Iterator[RLJob]:
    """Open the job of `tandem train` or `tandem distill`: inputs are checked first, then models are
    loaded, then workers start."""
    distills = run.command == "distill"
    check_cluster(config)
    prepare_process(config)
    inputs = (distill_inputs if distills else training_inputs)(config, exact=False)
    data = input_hashes(config, *KEYS[run.command]) | inputs.images
    stop_token_ids = inputs.renderer.stop_token_ids
    run_id = identity(config, data)
    mesh = config.parallel.mesh
    journal = Journal(run.episodes, run_id, inputs.problems, mesh)
    with (
        open_cluster(config, run.path) as cluster,
        open_envs_and_rewards(config, cluster, report) as (envs, rewards),
        open_ranks(config, run, report, run_id, cluster) as ranks,
    ):
        models = (build_distill_models if distills else build_rl_models)(config, ranks)
        policy = models.policy.whole
        workers = config.rollout.workers
        found = probe_exactness(
            config, policy, report, workers=workers, others=models.others, folder=run.path
        )
        exact = require_parity(config, found)
        note_machine(run, found, report)
        engine = build_engine(config, policy, inputs.renderer)
        local = build_runner(config, engine, inputs.renderer, envs, rewards)
        held_out = Journal(run.episodes, run_id, inputs.held_out, mesh)
        evaluate = _evaluator(config, local, stop_token_ids, held_out, inputs.held_out)
        rollouts = open_rollouts(config, engine, local, report, run.path, exact, cluster)
        with rollouts as (lanes, pool, stop_workers), open_stream(config, ranks, report) as stream:
            sampling = sampling_params(config.rollout, stop_token_ids)
            if pool is not None:
                lanes = [(r, ScaleOnRequest(sync, pool, run.path, report)) for r, sync in lanes]
            runner, sync = lanes[0]
            stages = Stages(
                config=config,
                models=models,
                sampling=sampling,
                exact=exact,
                collector=Collector(
                    config=config,
                    problems=inputs.problems,
                    runner=runner,
                    sampling=sampling,
                    journal=journal,
                ),
                sync=PublishFirst(sync, models.policy),
                stream=stream,
                before_updates=partial(_before_updates, ranks, exact, make_room(config, engine)),
            )
            journal.clean()
            pools = (pool, envs, rewards)
            if not config.rollout.staleness:
                yield RLJob(stages, evaluate, data, pools)
                return
            of_lanes = [_in_lane(stages, *lane) for lane in lanes]
            prefetcher = RolloutPrefetcher(stages, config.run.steps, stop_workers, of_lanes)
            with closing(prefetcher):
                yield AsyncRLJob(stages, evaluate, data, prefetcher, pools)


def _evaluator(
    config: Config,
    runner: RolloutRunner,
    stop_token_ids: tuple[int, ...],
    journal: Journal,
    problems: Sequence[Problem],
) -> Evaluator:
    return Evaluator(
        config=config,
        problems=problems,
        runner=runner,
        stop_token_ids=stop_token_ids,
        journal=journal,
    )


def _in_lane(stages: Stages, runner: RolloutRunner, sync: Sync) -> Stages:
    """Return the stages of a lane. All share the progress, the journal and the rewards."""
    return replace(stages, sync=sync, collector=replace(stages.collector, runner=runner))


class PublishFirst:
    """A Sync that first brings the whole model up to date."""

    def __init__(self, sync: Sync, policy: Learner):
        self.sync, self.policy = sync, policy
        self.sync_to, self.traffic = sync.sync_to, sync.traffic
        self.logprob_gap = sync.logprob_gap

    def publish(self, version: int) -> None:
        self.policy.publish()
        self.sync.publish(version)


def _before_updates(
    ranks: Ranks, exact: bool, make_room: Callable[[], None], rollouts: RolloutBatch
) -> None:
    """Make room on the device, and order the other ranks to learn from the same rollouts."""
    make_room()
    ranks.order(
        "learn",
        step=rollouts.step,
        num_carried=rollouts.num_carried,
        baseline=rollouts.baseline,
        exact=exact,
    )


def note_machine(run: RunFolder, found: Exactness, report: Report) -> None:
    """Write the processor and its kernel to machine.json; report it if the processor changed."""
    place = placement(run.config)
    if news := run.note_machine(place.processor(), not found.thread_dependent, found.matmul):
        report(news)


def _not_in_journal(journal: Journal, done: int) -> UserError:
    return UserError(
        "the journal does not have what the checkpoint's step left to the next",
        where=str(journal.folder),
        found=f"no file of this run for step {done}",
        expected=f"train_step_{done:06d}.parquet",
        next="restore it from a copy, or start over with --fresh (the old run is kept beside it)",
    )
