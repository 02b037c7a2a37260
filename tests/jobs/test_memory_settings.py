"""Settings of memory, which change no bit, reach the jobs that they are for."""

import pytest

from tandem.config.recipe import load_config
from tandem.plugins.offline.jobs import OfflineJob
from tandem.plugins.optim.offload import OffloadedOptimizer
from tandem.registry import find
from tandem.rollout.collect import RolloutBatch
from tandem.run_folder.folder import open_run

NO_ROLLOUTS = RolloutBatch(step=0, groups=[], num_carried=0, baseline=0.0, state={})


@pytest.mark.parametrize("command", ["train", "sft"])
@pytest.mark.parametrize("value", ["true", "false"])
def test_cache_and_optimizer_leave_the_device_where_the_config_says_so(
    value, command, home, tmp_path
):
    settings = [f"rollout.release_cache={value}", f"train.offload_optimizer={value}"]
    settings.append(f"sft.train={home}/data/warm.jsonl")
    config = load_config(home / "recipe.toml", settings)
    with (
        open_run(tmp_path / "run", config, fresh=False, command=command) as run,
        find("jobs", command, key="command")(run.config, run, print) as job,
    ):
        offline = isinstance(job, OfflineJob)
        evaluator, make_room = (
            (job.evaluator, job.make_room)
            if offline
            else (job.evaluate, lambda: job.stages.before_updates(NO_ROLLOUTS))
        )
        make_room()
        leaves = value == "true"
        assert (evaluator.runner.engine.cache.keys == ()) is leaves
        assert isinstance(job.learners["policy"].optimizer, OffloadedOptimizer) is leaves
