"""Rollouts by worker processes, for every engine that runs in them: a pool of workers, the
transport of weights to them, and a lane for each step that is rolled out at once."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace

from tandem.choices import engine_of
from tandem.engine.sync_check import Probe
from tandem.jobs.models import placement
from tandem.jobs.rollouts import Lane, Rollouts, RolloutStage
from tandem.model.placement import place_models
from tandem.rollout.collect import steps_at_once
from tandem.rollout_workers.client import Client
from tandem.rollout_workers.pool import COMMAND, ENVIRONMENT, EngineSpec, Workers
from tandem.weights.shared import SharedWeights
from tandem.weights.worker_sync import ProcessSync
from tandem.workers.host import LocalHosts, OpenHost
from tandem.workers.pool import Limits


@contextmanager
def open_workers(
    stage: RolloutStage,
    *,
    command: Sequence[str] = COMMAND,
    forks: bool = False,
    checks: bool = True,
    probe: Callable[[], Probe | None] = lambda: None,
) -> Iterator[Rollouts]:
    """Open rollout workers of the trainer's model.

    command: of a worker; forks: on a CPU it may be forked; checks: completions are compared before
    their weights change; probe: scores what workers of other kernels compare themselves with, by
    the weights in use. With one, a version is tried out at once.
    """
    config, model = stage.config, stage.engine.model
    for device in config.rollout.devices:
        place_models(device, config.model.dtype)
    with (
        stage.machine.open_weights(config, model.merged_weights()) as (shared, spawn),
        _start(stage, shared, spawn, command, forks) as workers,
    ):
        if (sample := probe()) is not None:
            shared.publish(0, model.merged_weights(), sample)
            gap = Client(workers).try_out(0)
            shared.release(below=1)
            stage.report(
                "the workers' engine runs the model: log-probs of a fixed sequence differ by "
                f"{gap:.1e} nats"
            )

        def lane(number: int) -> Lane:
            client = Client(workers, number, checks=checks)
            sync = ProcessSync(
                client,
                stage.engine,
                shared,
                lambda: (model.merged_weights(), probe()),
                config.rollout.staleness,
            )
            return replace(stage.local, engine=client, after_generation=client.rest), sync

        lanes = [lane(number) for number in range(steps_at_once(config))]
        yield Rollouts(lanes=lanes, pool=workers, stop=workers.close)


@contextmanager
def _start(
    stage: RolloutStage,
    weights: SharedWeights,
    spawn: OpenHost | None,
    command: Sequence[str],
    forks: bool,
) -> Iterator[Workers]:
    """Start the workers; they end with the context."""
    config, model = stage.config, stage.engine.model
    rollout = config.rollout
    ranks = config.parallel.processes
    devices = rollout.devices or stage.machine.worker_devices(str(model.device), ranks)
    spec = EngineSpec(
        model_path=config.model.path,
        devices=devices,
        dtype=placement(config).dtype_name,
        splits=model.splits,
        tensor_parallel=rollout.tensor_parallel,
        options=rollout.vllm,
        matmul=model.kernels.chosen,
        threads=stage.worker_threads,
        cache_mb=rollout.cache_mb,
        max_batch=rollout.max_batch,
        longest=stage.engine.longest,
        record_experts=config.rl.router_replay,
        release_cache=engine_of(config).rests(config),
    )
    # CUDA does not survive a fork, should an import have started it
    preload = config.model.path if forks and set(devices) == {"cpu"} else None
    with (
        closing(LocalHosts(command, ENVIRONMENT, preload)) as local,
        Workers(
            spec,
            weights,
            spawn or local.open,
            count=rollout.workers,
            limits=Limits(silent_s=config.run.stall_s / 2, restarts=rollout.restarts),
            report=stage.report,
        ) as workers,
    ):
        yield workers
