"""One GRPO run, as TRL's script and as Tandem's: the same reward, rows, sizes and rates.

python examples/from_trl.py MODEL [--trl]
"""

import sys

ROWS = [
    {"prompt": [{"role": "user", "content": f"What is {a}+{b}?"}], "answer": str(a + b)}
    for a in range(5)
    for b in range(5)
]


def reward(completions, answer, **columns):  # TRL's signature; Tandem reads it, too
    texts = [messages[0]["content"] for messages in completions]
    return [float(text.split()[-1:] == [right]) for text, right in zip(texts, answer, strict=True)]


def with_trl(model, steps=50, **more):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        train_dataset=Dataset.from_list(ROWS),
        args=GRPOConfig(
            output_dir="runs/trl",
            per_device_train_batch_size=32,  # completions
            num_generations=8,
            max_completion_length=16,
            loss_type="dr_grpo",
            scale_rewards="none",
            learning_rate=1e-5,
            lr_scheduler_type="constant",
            max_steps=steps,
            report_to=[],
            **more,
        ),
    )
    trainer.train()
    return trainer


def with_tandem(model, steps=50):
    import tandem

    return tandem.train(
        model=model,
        reward=reward,
        data=ROWS,
        folder="runs/tandem",
        prompts_per_step=4,  # of 8 completions each
        group_size=8,
        max_new_tokens=16,
        algorithm="dr_grpo",
        learning_rate=1e-5,
        steps=steps,
    )


if __name__ == "__main__":
    (with_trl if "--trl" in sys.argv else with_tandem)(sys.argv[1])
