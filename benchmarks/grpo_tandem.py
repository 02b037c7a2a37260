"""One GRPO step of Tandem on the work of grpo_trl.py: the real step of step.py, rewards in workers,
journal included.

    python benchmarks/grpo_tandem.py MODEL_DIR DATA.jsonl PROMPTS GROUP NEW_TOKENS STEPS FIXED MEM

prints one JSON line. FIXED 1 lets no sequence stop early, so that every step has the same number of
tokens. MEM is "whole" (all samples in one microbatch), "bfloat16" (the same in that type) or
"checkpointed" (1,024 tokens at a time, activation checkpointing).
"""

import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from tandem.config.recipe import load_config
from tandem.data.renderer import load_renderer
from tandem.jobs.engines import build_engine, open_envs_and_rewards, prepare_process
from tandem.jobs.inputs import read_data
from tandem.jobs.models import build_rl_models
from tandem.rollout.collect import Collector
from tandem.rollout.score import RolloutRunner, sampling_params
from tandem.run_folder.journal import Journal
from tandem.run_folder.metrics import peak_rss_mb
from tandem.step import Stages, train_step
from tandem.trainer.parity import ExactCheck
from tandem.weights.in_process import InlineSync

MEMORY = {
    "whole": ["train.tokens_per_microbatch=1000000"],
    "bfloat16": ["train.tokens_per_microbatch=1000000", "model.dtype=bfloat16"],
    "checkpointed": ["train.tokens_per_microbatch=1024", "train.activation_checkpointing=true"],
}
REWARD = str(Path(__file__).parent.parent / "examples" / "last_number.py") + ":score"


def main() -> None:
    imports = peak_rss_mb() / 1024
    path, data, prompts, group, new, steps, fixed, memory = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "empty.toml").write_text("")
        config = load_config(
            Path(folder) / "empty.toml",
            [
                f"model.path={path}",
                f"data.train={data}",
                f"rl.prompts_per_step={prompts}",
                f"rl.group_size={group}",
                f"rollout.max_new_tokens={new}",
                "train.learning_rate=1e-6",
                f"reward.function={REWARD}",
                *MEMORY[memory],
            ],
        )
        prepare_process(config)
        renderer, models = load_renderer(path), build_rl_models(config)
        engine = build_engine(config, models.policy.model, renderer)
        sampling = sampling_params(config.rollout, renderer)
        if fixed == "1":
            sampling = replace(sampling, stop_token_ids=())
        journal = Journal(Path(folder) / "episodes", "benchmark", [])
        with open_envs_and_rewards(config) as (envs, rewards):
            collector = Collector(
                config=config,
                problems=read_data(config, "data.train"),
                runner=RolloutRunner(
                    engine=engine, renderer=renderer, envs=envs, rewards=rewards, reward_model=None
                ),
                sampling=sampling,
                journal=journal,
            )
            stages = Stages(
                config=config,
                models=models,
                sampling=sampling,
                parity=ExactCheck(),
                collector=collector,
                sync=InlineSync(engine),
            )
            print(json.dumps(measure(stages, int(steps)) | {"imports_gib": imports}))


def measure(stages: Stages, steps: int) -> dict[str, float | str]:
    seconds, rollout, tokens = [], [], []
    for step in range(steps):
        start = time.perf_counter()
        result = train_step(stages, step)
        seconds.append(time.perf_counter() - start)
        rollout.append(result.timings["rollout_s"])
        tokens.append(result.metrics["num_loss_tokens"])
        assert result.metrics["logprob_gap"] == 0.0
    skip = 2 if steps > 4 else 1  # the first steps meet new shapes
    return {
        "bench": "tandem",
        "step_s": statistics.median(seconds[skip:]),
        "rollout_s": statistics.median(rollout[skip:]),
        "tokens": statistics.median(tokens[skip:]),
        "tokens_per_s": sum(tokens[skip:]) / sum(seconds[skip:]),
        "rss_gib": peak_rss_mb() / 1024,
    }


if __name__ == "__main__":
    main()
