"""Rollouts of a run: what the engine's object is given, and what it opens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.choices import Report
from tandem.config.schema import Config
from tandem.engine.engine import Engine
from tandem.jobs.here import Here
from tandem.rollout.score import RolloutRunner
from tandem.types import WeightSync

# of a step's rollouts: what plays them, and gives it weights
Lane = tuple[RolloutRunner, WeightSync]


@dataclass(frozen=True, kw_only=True)
class RolloutStage:
    """All that a RolloutBackend opens its rollouts with."""

    config: Config
    engine: Engine  # the trainer's own, over the policy; it evaluates
    local: RolloutRunner  # plays episodes with that engine
    folder: Path  # of the run
    exact: bool  # rollouts check their log-probs
    worker_threads: int  # compute threads of a worker on a CPU
    machine: Here  # where workers run
    report: Report


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Opened rollouts. lanes: one for each step rolled out at once; stop: ends those under way."""

    lanes: Sequence[Lane]
    pool: Any = None  # workers.pool.Pool, whose `status` tells of the workers
    stop: Callable[[], None] = lambda: None
