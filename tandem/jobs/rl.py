"""`tandem train` and `tandem distill`: jobs whose episodes are sampled on the way."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from tandem.choices import Report, choices, engine_of, machine_of, stream_of
from tandem.config.schema import Config
from tandem.jobs.engines import (
    build_engine,
    build_runner,
    make_room,
    open_envs_and_rewards,
    prepare_process,
    probe_exactness,
)
from tandem.jobs.exactness import require_parity
from tandem.jobs.input_hashes import KEYS, input_hashes
from tandem.jobs.inputs import ProblemInputs
from tandem.jobs.models import build_distill_models, build_rl_models, placement
from tandem.jobs.ranks import open_ranks
from tandem.jobs.rl_job import RLJob
from tandem.jobs.rollouts import RolloutPool, Rollouts, RolloutStage
from tandem.model.probe import Exactness
from tandem.registry import find
from tandem.rollout.collect import Collector, RolloutBatch
from tandem.rollout.evaluate import Evaluator, sampling_params
from tandem.run_folder.folder import RunFolder, identity
from tandem.run_folder.journal import Journal
from tandem.step import Stages
from tandem.train.batch import Models
from tandem.train.ranks import Ranks
from tandem.types import ParityCheck

# What loads a command's models, on every rank.
MODELS = {"train": build_rl_models, "distill": build_distill_models}


@contextmanager
def open_rl_job(config: Config, run: RunFolder, report: Report) -> Iterator[RLJob]:
    """Open the job of `tandem train` or `tandem distill`: inputs are checked first, then models are
    loaded, then workers start."""
    for choice in choices(config):
        choice.check(config)
    prepare_process(config)
    inputs: ProblemInputs = find("inputs", run.command, key="command")(config, exact=False)
    data = input_hashes(config, *KEYS[run.command]) | inputs.images
    run_id, mesh = identity(config, data), config.parallel.mesh
    with (
        machine_of(config).open(config, run.path) as machine,
        open_envs_and_rewards(config, machine, report) as (envs, rewards),
        open_ranks(config, run, report, machine, run_id) as ranks,
    ):
        models = MODELS[run.command](config, ranks)
        parity = _compare(config, run, models, report)
        engine = build_engine(config, models.policy.whole, inputs.renderer)
        stage = RolloutStage(
            config=config,
            engine=engine,
            local=build_runner(config, engine, inputs.renderer, envs, rewards),
            folder=run.path,
            exact=parity.exact,
            machine=machine,
            report=report,
        )
        stop_token_ids = inputs.renderer.stop_token_ids
        evaluate = Evaluator(
            config=config,
            problems=inputs.held_out,
            runner=stage.local,
            stop_token_ids=stop_token_ids,
            journal=Journal(run.episodes, run_id, inputs.held_out, mesh),
        )
        with (
            engine_of(config).open(stage) as rollouts,
            stream_of(config).open(config, ranks, report) as stream,
        ):
            sampling = sampling_params(config.rollout, stop_token_ids)
            runner, sync = rollouts.lanes[0]
            stages = Stages(
                config=config,
                models=models,
                sampling=sampling,
                parity=parity,
                collector=Collector(
                    config=config,
                    problems=inputs.problems,
                    runner=runner,
                    sampling=sampling,
                    journal=Journal(run.episodes, run_id, inputs.problems, mesh),
                ),
                sync=sync,
                stream=stream,
                before_updates=partial(_before_updates, ranks, parity, make_room(config, engine)),
            )
            stages.journal.clean()
            with _open_job(stages, rollouts, evaluate, data, [envs, rewards]) as job:
                yield job


def _compare(config: Config, run: RunFolder, models: Models, report: Report) -> ParityCheck:
    """Find out whether engine and trainer agree on this machine."""
    found = probe_exactness(
        config,
        models.policy.whole,
        report,
        workers=config.rollout.workers,
        others=models.others,
        folder=run.path,
    )
    parity = require_parity(config, found)
    note_machine(run, found, report)
    return parity


@contextmanager
def _open_job(
    stages: Stages,
    rollouts: Rollouts,
    evaluate: Evaluator,
    data: dict[str, str],
    pools: Sequence[RolloutPool],
) -> Iterator[RLJob]:
    """Open the job of these stages; with rollout.staleness its rollouts are ahead."""
    pools = pools if rollouts.pool is None else [rollouts.pool, *pools]
    if not stages.config.rollout.staleness:
        yield RLJob(stages, evaluate, data, pools)
        return
    from tandem.jobs.rl_ahead import AsyncRLJob, open_prefetcher

    with open_prefetcher(stages, rollouts) as prefetcher:
        yield AsyncRLJob(stages, evaluate, data, prefetcher, pools)


def _before_updates(
    ranks: Ranks, parity: ParityCheck, make_room: Callable[[], None], rollouts: RolloutBatch
) -> None:
    """Make room on the device, and order the other ranks to learn from the same rollouts."""
    make_room()
    ranks.order(
        "learn",
        step=rollouts.step,
        num_carried=rollouts.num_carried,
        baseline=rollouts.baseline,
        exact=parity.exact,
    )


def note_machine(run: RunFolder, found: Exactness, report: Report) -> None:
    """Write the processor and its kernel to machine.json; report it if the processor changed."""
    place = placement(run.config)
    if news := run.note_machine(place.processor(), not found.thread_dependent, found.matmul):
        report(news)
