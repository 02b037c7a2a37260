"""A rank after 0 of a command that trains: it loads the same inputs and models as rank 0, and does
its part of each step when rank 0 orders it.

It takes the groups of a step out of the run's stream; without a data plane that is the journal, on
a file system that all ranks share.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

from tandem.choices import engine_of, stream_of
from tandem.config.recipe import load_config
from tandem.config.schema import Config
from tandem.jobs.engines import prepare_process
from tandem.jobs.input_hashes import require_same_functions
from tandem.jobs.own_choices import JournalStream
from tandem.jobs.ranks import make_ranks, require_size
from tandem.jobs.stage import read_inputs
from tandem.registry import built_in, find
from tandem.rollout.collect import RolloutBatch
from tandem.rollout.score import sampling_params
from tandem.rollout.stream import StreamReader
from tandem.run_folder.checkpoint import Saver, load_checkpoint
from tandem.run_folder.journal import Journal
from tandem.run_folder.shards import Shard
from tandem.runtime import watchdog
from tandem.runtime.errors import UserError
from tandem.runtime.place import here
from tandem.step import learn_step
from tandem.train_loop import load_learners, saved_boxes, saved_tensors
from tandem.trainer.learn import LearnStage
from tandem.trainer.learner import Learner
from tandem.trainer.ranks import Ranks

WAIT_S = 5.0  # for rank 0 to end by the same error, whose text is the better one


def follow(config: Config, command: str) -> None:
    """Be a rank after 0, until rank 0 ends."""
    from tandem.trainer.parallel.processes import join

    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 saves first, and needs this process
        signal.signal(number, signal.SIG_IGN)
    place = here(os.environ, config.parallel.processes)
    require_size(place.size, config.parallel.processes)
    parallel, stall_s = config.parallel, config.run.stall_s
    with (
        join(place, timeout_s=parallel.timeout_s, stall_s=stall_s) as processes,
        ExitStack() as opened,
    ):
        _, begin = processes.next_order()
        folder = Path(begin["folder"])
        config = load_config(Path(begin["recipe"]), [])
        try:
            require_same_functions(config, begin["functions"])
            ranks, run_id = make_ranks(config, processes), begin["run_id"]
            orders = _orders(config, command, folder, run_id, ranks, opened)

            def fail(finding: str) -> None:  # the rest of the report is in stderr
                processes.fail(f"rank {processes.rank}: {finding.partition(chr(10))[0]}")

            with watchdog.watching(stall_s, on_stall=fail):
                name, arguments = processes.next_order()
                while name != "stop":
                    orders[name](**arguments)
                    name, arguments = processes.next_order()
        except UserError:
            time.sleep(WAIT_S)
            raise


def _orders(
    config: Config, command: str, folder: Path, run_id: str, ranks: Ranks, opened: ExitStack
) -> Mapping[str, Callable[..., object]]:
    """Load what this rank trains; return what it does on each order. opened: gets what is to be
    closed."""
    prepare_process(config)
    inputs = read_inputs(config, command)
    if command in built_in("fixed_data"):
        job = find("fixed_data", command, key="command")(config, inputs, ranks)
        return job.orders() | _learner_orders(job.learners, folder, ranks)
    journal = Journal(folder / "episodes", run_id, inputs.problems)
    models = find("models", command, key="command")(config, ranks)
    sampling = sampling_params(config.rollout, inputs.renderer)

    stream: StreamReader = JournalStream(journal, folder)

    def join(servers: Any) -> None:
        nonlocal stream
        stream = opened.enter_context(closing(stream_of(config).join(config, ranks, servers)))

    def learn(step: int, num_carried: int, baseline: float, exact: bool) -> None:
        parity = engine_of(config).parity(config, exact, models.policy.model.gap)
        stage = LearnStage(config=config, models=models, sampling=sampling, parity=parity)
        groups = stream.take(step, [], stage.plan_share)
        rollouts = RolloutBatch(
            step=step, groups=groups, num_carried=num_carried, baseline=baseline, state={}
        )
        learn_step(stage, rollouts)

    return {"learn": learn, "join_stream": join, **_learner_orders(models.learners, folder, ranks)}


def _learner_orders(
    learners: Mapping[str, Learner], folder: Path, ranks: Ranks
) -> dict[str, Callable[..., Any]]:
    saver = Saver()

    def publish(learner: str) -> None:
        learners[learner].publish()

    def load(checkpoint: str) -> None:
        tensors, state = load_checkpoint(Path(checkpoint), verify=False)  # rank 0 has verified it
        load_learners(learners, tensors, state["optimizer_steps"])

    def save(step: int, folder: str) -> None:
        tensors, boxes = saved_tensors(learners), saved_boxes(learners)
        shard = Shard(rank=ranks.rank, size=ranks.size, folder=folder, boxes=boxes)
        post = partial(ranks.post, f"{folder}/{ranks.rank}")
        saver.save_shard(checkpoints, step, tensors, shard, post)

    def use_kernels(kernels: str) -> None:
        next(iter(learners.values())).model.kernels.use_matmul(kernels)

    checkpoints, orders = folder / "checkpoints", (publish, load, save, use_kernels)
    return {order.__name__: order for order in orders}
