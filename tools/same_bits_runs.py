"""Short runs of same_bits.py, what each must show in its files, and what is renamed on purpose.

A run that does not show what it is there for would prove nothing by being equal. All of them are a few
steps of a tiny model with a warm start. Knows settings, metrics and columns by name; does not know
revisions.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Old name: new name; a revision may have either. "critic" stands for "critic/value" and so on, too.
# Beside entries the hashes that depend on names are left out: what they are hashes of is compared.
RENAMED_METRICS: dict[str, str] = {}
# Columns of the journal; also keys of its notes, of the ledger and of state.json.
RENAMED_COLUMNS: dict[str, str] = {"given": "env_rewards", "untold": "pending_metrics"}
# "rl.old": "rl.new", or "rl.old": "" for one that only one of the revisions has.
RENAMED_SETTINGS: dict[str, str] = {"model.device": "", "model.dtype": "", "rollout.devices": ""}

STEPS, KILL_AT = 4, 3
COMMON = f"""
run.steps={STEPS} sft.steps={STEPS} preference.steps={STEPS} run.save_every=2
data.train=problems.jsonl eval.data=problems.jsonl sft.train=chats.jsonl
preference.train=pairs.jsonl model.path=model distill.teacher=random reward.function=reward.py:score
rl.prompts_per_step=4 rl.group_size=4 rollout.max_new_tokens=12 eval.samples=1
sft.batch_size=8 preference.batch_size=4
train.learning_rate=1e-3 critic.learning_rate=1e-3 sft.learning_rate=1e-3
preference.learning_rate=1e-3
"""
TINY = "--hidden 32 --layers 2 --intermediate 64 --context 128"
WARM = """
model.path=random eval.data= sft.steps=60 sft.batch_size=16 sft.learning_rate=2e-2
sft.warmup_steps=5
"""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A command line, and whether what it Left (same_bits_left.py) shows what it is there for."""

    command: str = "train"
    settings: str = ""
    killed: str = ""  # the run that this one repeats, killed and resumed: it must leave the same
    shows: str
    seen: Callable[[Any], bool]


RUNS = {
    "grpo": Run(
        shows="advantages, and evaluations before and after",
        seen=lambda left: left.most("policy_loss") > 0 and len(left.files("episodes/eval_*")) == 4,
    ),
    "dapo": Run(
        settings="rl.algorithm=dapo rl.minibatches=2 rl.group_size=3 rl.max_gen_batches=9",
        shows="groups left out, groups carried to the next step, two updates a step",
        seen=lambda left: all(
            [
                {"train", "no_signal", "carry"} == set(left.column("outcome")),
                left.most("groups/carried_in") > 0,
                left.updates == {"policy": 2 * STEPS},
            ]
        ),
    ),
    "ppo": Run(
        settings="rl.algorithm=ppo rl.epochs=2 critic.warmup_steps=1",
        shows="a critic that begins a step before the policy, and ratios other than 1",
        seen=lambda left: all(
            [left.updates == {"critic": 2 * STEPS, "policy": 2 * STEPS - 2}, left.most("ratio") > 1]
        ),
    ),
    "lora": Run(
        settings="lora.rank=4 rl.kl_coef=0.05 rl.entropy_coef=0.01",
        shows="adapters, and a distance to the reference",
        seen=lambda left: all(
            [
                left.most("reference_kl") > 0,
                all("lora" in name for name in left.tensors("checkpoints/*/policy_optimizer.*")),
            ]
        ),
    ),
    "gspo": Run(
        settings="rl.algorithm=gspo rl.minibatches=2",
        shows="sequences that are clipped",
        seen=lambda left: left.most("clip_share") > 0,
    ),
    "stale": Run(
        settings="rollout.staleness=1 rollout.workers=1 rl.correction=decoupled",
        shows="steps sampled by the weights of the step before",
        seen=lambda left: left.versions == [{max(0, n - 2)} for n in left.column("step")],
    ),
    "partial": Run(
        settings="rollout.token_budget=4 rollout.staleness=1 rl.correction=tis",
        shows="episodes that pause, and go on under other weights",
        seen=lambda left: "paused" in left.column("stop_reason") and {1, 2} in left.versions,
    ),
    "turns": Run(
        settings="env=guess env.max_turns=3 reward=['env','reward.py:score'] rl.curriculum=true",
        shows="conversations of three turns, and rewards that differ",
        seen=lambda left: 3 in left.column("num_turns") and left.most("reward_std") > 0,
    ),
    "tools": Run(
        settings="env=tools env.max_turns=3 env.options={tools='tool.py:t',show_tools=false}",
        shows="calls that a tool has answered",
        seen=lambda left: any(dict(given)["tool_calls"] for given in left.column("given")),
    ),
    "sft": Run(
        command="sft",
        shows="an update a step",
        seen=lambda left: left.updates == {"policy": STEPS} and left.most("grad_norm") > 0,
    ),
    "dpo": Run(
        command="dpo",
        shows="a margin that grows",
        seen=lambda left: left.most("margin") > left.metrics[1]["margin"],
    ),
    "rm": Run(
        command="rm",
        shows="an update a step",
        seen=lambda left: left.updates == {"scorer": STEPS} and left.most("grad_norm") > 0,
    ),
    "distill": Run(
        command="distill",
        shows="a distance to the teacher",
        seen=lambda left: left.most("teacher_kl") > 0,
    ),
}
for _name in ("grpo", "partial"):
    RUNS[f"{_name}-killed"] = Run(
        settings=RUNS[_name].settings,
        killed=_name,
        shows="that it was resumed",
        seen=lambda left: any(b"resumed from step_" in line for line in left.lines("log.txt")),
    )


REWARD = """import zlib


def score(problem, completion):
    return zlib.crc32(completion.encode()) % 2
"""
TOOL = '''def t(n: int) -> int:
    """Double a number.

    Args:
        n: the number
    """
    return 2 * n
'''


def input_files() -> dict[str, str]:
    """Everything that the runs read, besides models; the chats call the tool, or guess a number."""
    problems, chats, pairs = list[Any](), list[Any](), list[Any]()
    for n in range(10):
        prompt = f"{n}?"
        problems.append({"prompt": prompt, "answer": str(n), "low": 0, "high": 9})
        pairs.append({"prompt": prompt, "chosen": f"Answer: {n}", "rejected": "no" * n + "!"})
        for digit in range(10):
            said = [("user", prompt), ("assistant", f"[t(n={digit})]"), ("tool", str(2 * digit))]
            said.append(("assistant", f"Answer: {digit}"))
            chats.append({"messages": [{"role": role, "content": text} for role, text in said]})
            chats.append({"prompt": prompt, "response": f"is it {digit}"})
    named = {"problems.jsonl": problems, "chats.jsonl": chats, "pairs.jsonl": pairs}
    lines = {name: "".join(f"{json.dumps(row)}\n" for row in rows) for name, rows in named.items()}
    return {**lines, "recipe.toml": "", "reward.py": REWARD, "tool.py": TOOL}
