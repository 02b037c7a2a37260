"""The paired baseline: TRL's GRPOTrainer on the same model, prompts, samples and lengths as
grpo_tandem.py.

    python benchmarks/grpo_trl.py MODEL_DIR DATA.jsonl PROMPTS GROUP NEW_TOKENS STEPS FIXED MEMORY

MEMORY is "whole" (all samples in one batch), "bfloat16" (the same in that type) or "checkpointed"
(8 sequences at a time, gradient checkpointing).
"""

import json
import os
import re
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def reward(completions, answer, **columns):
    numbers = [re.findall(r"-?\d+", completion[0]["content"]) for completion in completions]
    return [float(bool(n) and n[-1] == a) for n, a in zip(numbers, answer, strict=True)]


class StepClock(TrainerCallback):
    def __init__(self):
        self.seconds, self.start = [], 0.0

    def on_step_begin(self, *args, **kwargs):
        self.start = time.perf_counter()

    def on_step_end(self, *args, **kwargs):
        self.seconds.append(time.perf_counter() - self.start)


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    imports = peak_gib()
    path, data, prompts, group, new, steps, fixed, memory = sys.argv[1:]
    samples = int(prompts) * int(group)
    at_once = 8 if memory == "checkpointed" else samples
    rows = [json.loads(line) for line in Path(data).read_text(encoding="utf-8").splitlines()]
    chat = [
        {"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]}
        for row in rows
    ]
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    tokenizer.padding_side = "left"
    clock, dtype = StepClock(), torch.bfloat16 if memory == "bfloat16" else torch.float32
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(path, dtype=dtype),
        reward_funcs=reward,
        callbacks=[clock],
        train_dataset=Dataset.from_list(chat),
        processing_class=tokenizer,
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=at_once,
            num_generations=int(group),
            gradient_accumulation_steps=samples // at_once,
            max_completion_length=int(new),
            max_steps=int(steps),
            learning_rate=1e-6,
            # no end-of-sequence token before
            generation_kwargs={"min_new_tokens": int(new)} if fixed == "1" else None,
            temperature=1.0,
            beta=0.0,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=memory == "checkpointed",
            disable_tqdm=True,
            seed=0,
            remove_unused_columns=False,
        ),
    )
    trainer.train()
    lengths = [
        row["completions/mean_length"]
        for row in trainer.state.log_history
        if "completions/mean_length" in row
    ]
    skip = 2 if int(steps) > 4 else 1
    tokens = [length * samples for length in lengths]
    print(
        json.dumps(
            {
                "bench": "trl",
                "step_s": statistics.median(clock.seconds[skip:]),
                "tokens": statistics.median(tokens[skip:]),
                "tokens_per_s": sum(tokens[skip:]) / sum(clock.seconds[skip:]),
                "rss_gib": peak_gib(),
                "imports_gib": imports,
            }
        )
    )


if __name__ == "__main__":
    main()
