"""`tandem train` and `tandem distill` with rollouts ahead of the training (rollout.staleness)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace

from tandem.jobs.rl_job import RLJob
from tandem.jobs.rollouts import RolloutPool, Rollouts
from tandem.step import Stages
from tandem.step_async import RolloutPrefetcher, train_step_async
from tandem.types import Row, StepResult


class AsyncRLJob(RLJob):
    """An RLJob with rollouts ahead of the training."""

    def __init__(
        self,
        stages: Stages,
        evaluate: Callable[[int], Row],
        data: dict[str, str],
        prefetcher: RolloutPrefetcher,
        pools: Sequence[RolloutPool] = (),
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
def open_prefetcher(stages: Stages, rollouts: Rollouts) -> Iterator[RolloutPrefetcher]:
    """Open the rollouts of coming steps. Their lanes share progress, journal and rewards."""
    lanes = [
        replace(stages, sync=sync, collector=replace(stages.collector, runner=runner))
        for runner, sync in rollouts.lanes
    ]
    steps = stages.config.run.steps
    with closing(RolloutPrefetcher(stages, steps, rollouts.stop, lanes)) as prefetcher:
        yield prefetcher
