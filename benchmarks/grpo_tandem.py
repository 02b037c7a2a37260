"""One GRPO step of Tandem on the work of grpo_trl.py: the real step of step.py, rewards in workers,
journal included.

    python benchmarks/grpo_tandem.py MODEL_DIR DATA.jsonl PROMPTS GROUP NEW_TOKENS STEPS FIXED MEMORY     one JSON line

FIXED 1 lets no sequence stop early, so that every step has the same number of tokens. MEMORY is
"whole" (all samples in one microbatch) or "checkpointed" (1,024 tokens at a time, activation
checkpointing).
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tandem.config.recipe import load_config
from tandem.data.renderer import load_renderer
from tandem.jobs.parts import build_engine, learning_models, playground, prepare_process, read_data
from tandem.rollout.evaluate import sampling_params
from tandem.run_folder.journal import Journal
from tandem.run_folder.metrics import peak_rss_mb
from tandem.step import Stages, train_step, update
from tandem.weights.in_process import InlineSync

MEMORY = {
    "whole": ["train.tokens_per_microbatch=1000000"],
    "checkpointed": ["train.tokens_per_microbatch=1024", "train.activation_checkpointing=true"],
}
REWARD = str(Path(__file__).parent.parent / "examples" / "last_number.py") + ":score"


def main() -> None:
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
        renderer, models = load_renderer(path), learning_models(config)
        engine = build_engine(config, models.policy.model, renderer)
        with playground(config) as player_of:
            stages = Stages(
                config=config,
                problems=read_data(config, "data.train"),
                player=player_of(engine, renderer),
                models=models,
                exact=True,
                sync=InlineSync(engine),
                journal=Journal(Path(folder) / "episodes", "benchmark", []),
                params=sampling_params(
                    config.rollout, () if fixed == "1" else renderer.stop_token_ids
                ),
            )
            print(json.dumps(measure(stages, int(steps))))


def measure(stages: Stages, steps: int) -> dict[str, float | str]:
    seconds, rollout, tokens = [], [], []
    for step in range(steps):
        start = time.perf_counter()
        metrics, timings, _ = train_step(stages, step, update)
        seconds.append(time.perf_counter() - start)
        rollout.append(timings["rollout_s"])
        tokens.append(metrics["num_loss_tokens"])
        assert metrics["logprob_gap"] == 0.0
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
