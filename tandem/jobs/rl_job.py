"""The job of `tandem train` and `tandem distill`, as train_loop.py repeats it."""

from collections.abc import Callable, Sequence
from typing import Any

from tandem.jobs.rollouts import RolloutPool
from tandem.runtime.errors import UserError
from tandem.step import Stages, train_step
from tandem.types import Row, StepResult


class RLJob:
    """A job for train_loop.py that repeats `train_step`."""

    def __init__(
        self,
        stages: Stages,
        evaluate: Callable[[int], Row],
        data: dict[str, str],
        pools: Sequence[RolloutPool] = (),
    ):
        config, self.pools, self.learners = stages.config, pools, stages.models.learners
        self.stages, self.evaluate, self.data = stages, evaluate, data
        self.steps, self.eval_every = config.run.steps, config.eval.every

    def start(self, done: int) -> None:
        staleness = self.stages.config.rollout.staleness
        self.stages.journal.drop_other_meshes(done, staleness)
        self.stages.models.policy.publish()
        self.stages.sync.publish(done)

    def step(self, done: int) -> StepResult:
        return train_step(self.stages, done)

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
                    next="restore it from a copy, or start over with --fresh (the old run is kept "
                    "beside it)",
                )
            groups = recorded[0]
        self.stages.collector.progress.restore(state, groups)

    def wait_until_durable(self, done: int) -> None:
        """Return at once: the episodes of a step are in the journal before it is trained."""

    def workers(self) -> list[dict[str, Any]]:
        return [row for pool in self.pools for row in pool.status()]

    def stop_soon(self) -> None:
        """Do nothing: no thread waits."""
