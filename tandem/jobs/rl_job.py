"""The job of `tandem train` and `tandem distill`, as train_loop.py repeats it."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tandem.jobs.rollouts import RolloutPool
from tandem.runtime.errors import UserError
from tandem.step import Stages, train_step
from tandem.types import Row, StepResult

if TYPE_CHECKING:
    from tandem.step_async import RolloutPrefetcher


class RLJob:
    """A job for train_loop.py that repeats `train_step`, or `train_step_async` with rollouts ahead
    of the training."""

    def __init__(
        self,
        stages: Stages,
        evaluate: Callable[[int], Row],
        data: dict[str, str],
        pools: Sequence[RolloutPool] = (),
        ahead: "RolloutPrefetcher | None" = None,
    ):
        config, self.pools, self.learners = stages.config, pools, stages.models.learners
        self.stages, self.evaluate, self.data, self.ahead = stages, evaluate, data, ahead
        self.steps, self.eval_every = config.run.steps, config.eval.every

    def start(self, done: int) -> None:
        staleness = self.stages.config.rollout.staleness
        self.stages.journal.drop_other_meshes(done, staleness)
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
                    next="restore it from a copy, or start over with --fresh (the old run is kept "
                    "beside it)",
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
