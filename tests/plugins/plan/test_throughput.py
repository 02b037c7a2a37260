"""Rollout workers that keep a trainer busy, by the timings of a run."""

import json

import pytest

from tandem.config.recipe import to_toml
from tandem.config.schema import Config
from tandem.plugins.plan.command import measured


def run_folder(folder, workers, rows):
    tree = Config().model_dump()
    tree["rollout"]["workers"] = workers
    (folder / "config.toml").write_text(to_toml(Config.model_validate(tree)))
    (folder / "run.json").write_text(json.dumps({"command": "train"}))
    start = {"rollout_s": 99.0, "learn_s": 9.0, "sync_s": 9.0, "generated_tokens_per_s": 1.0}
    lines = [{"step": n, **row} for n, row in enumerate([start, start, *rows], start=1)]
    (folder / "timings.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


@pytest.mark.parametrize(
    ("workers", "timings", "needed"),
    [
        # 1,000 tokens in 10 s, by one engine: 100 tokens/s; 2 s of training a step
        (0, {"rollout_s": 10.0, "learn_s": 1.5, "sync_s": 0.5}, 5),
        (1, {"rollout_s": 10.0, "learn_s": 1.5, "sync_s": 0.5, "wait_s": 8.0}, 5),
        (4, {"rollout_s": 10.0, "learn_s": 1.5, "sync_s": 0.5, "wait_s": 8.0}, 20),
        # several steps at once: a batch comes every 5 s, though each takes 10 s
        (2, {"rollout_s": 10.0, "learn_s": 1.5, "sync_s": 0.5, "wait_s": 3.0}, 5),
        (1, {"rollout_s": 10.0, "learn_s": 19.0, "sync_s": 0.9, "wait_s": 0.0}, 1),
    ],
)
def test_workers_generate_a_steps_tokens_while_the_trainer_makes_a_step(
    workers, timings, needed, tmp_path
):
    row = {**timings, "generated_tokens_per_s": 1000 / timings["rollout_s"]}
    found = measured(run_folder(tmp_path, workers, [row] * 3))
    assert (found.workers, found.steps, round(found.tokens)) == (needed, 3, 1000)
