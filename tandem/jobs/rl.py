"""`tandem train` and `tandem distill`: jobs whose episodes are sampled on the way."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from tandem.config.schema import Config
from tandem.jobs.engines import (
    Report,
    build_engine,
    load_reward_model,
    make_room,
    open_envs_and_rewards,
    open_rollouts,
    prepare_process,
    probe_exactness,
    require_parity,
)
from tandem.jobs.inputs import KEYS, distill_inputs, input_hashes, training_inputs
from tandem.jobs.models import build_distill_models, build_rl_models, placement
from tandem.model.probe import Exactness
from tandem.rollout.collect import Collector
from tandem.rollout.evaluate import Evaluator, sampling_params
from tandem.rollout.score import RolloutRunner
from tandem.run_folder.folder import RunFolder, identity
from tandem.run_folder.journal import Journal
from tandem.runtime.errors import UserError
from tandem.step import Stages, StepResult, train_step
from tandem.step_async import RolloutPrefetcher, train_step_async


class RLJob:
    """A job for train_loop.py that repeats `train_step`."""

    def __init__(self, stages: Stages, evaluate: Evaluator, data: dict[str, str]):
        config, models = stages.config, stages.models
        self.stages, self.evaluate, self.data = stages, evaluate, data
        self.learners = {"policy": models.policy}
        if models.critic is not None:
            self.learners["critic"] = models.critic
        self.steps, self.eval_every = config.run.steps, config.eval.every

    def start(self, done: int) -> None:
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
    ):
        super().__init__(stages, evaluate, data)
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
    prepare_process(config)
    inputs = distill_inputs(config) if distills else training_inputs(config)
    data, stop_token_ids = input_hashes(config, *KEYS[run.command]), inputs.renderer.stop_token_ids
    run_id = identity(config, data)
    journal = Journal(run.episodes, run_id, inputs.problems)
    with open_envs_and_rewards(config) as (envs, rewards):
        models = build_distill_models(config) if distills else build_rl_models(config)
        policy = models.policy.model
        workers = config.rollout.workers
        found = probe_exactness(config, policy, report, workers=workers, others=models.others)
        exact = require_parity(config, found)
        note_machine(run, found, report)
        engine = build_engine(config, policy, inputs.renderer)
        local = RolloutRunner(
            engine=engine,
            renderer=inputs.renderer,
            envs=envs,
            rewards=rewards,
            reward_model=load_reward_model(config),
        )
        evaluate = Evaluator(
            config=config,
            problems=inputs.held_out,
            runner=local,
            stop_token_ids=stop_token_ids,
            journal=Journal(run.episodes, run_id, inputs.held_out),
        )
        with open_rollouts(config, engine, local, report) as (runner, sync, stop_workers):
            sampling = sampling_params(config.rollout, stop_token_ids)
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
                sync=sync,
                make_room=make_room(config, engine),
            )
            journal.clean()
            if not config.rollout.staleness:
                yield RLJob(stages, evaluate, data)
                return
            prefetcher = RolloutPrefetcher(stages, config.run.steps, stop_workers)
            with closing(prefetcher):
                yield AsyncRLJob(stages, evaluate, data, prefetcher)


def note_machine(run: RunFolder, found: Exactness, report: Report) -> None:
    """Write the processor to machine.json; report it if it has changed."""
    processor = placement(run.config).processor()
    if news := run.note_machine(processor, not found.thread_dependent):
        report(news)


def _not_in_journal(journal: Journal, done: int) -> UserError:
    return UserError(
        "the journal does not have what the checkpoint's step left to the next",
        where=str(journal.folder),
        found=f"no file of this run for step {done}",
        expected=f"train_step_{done:06d}.parquet",
        next="restore it from a copy, or start over with --fresh (the old run is kept beside it)",
    )
