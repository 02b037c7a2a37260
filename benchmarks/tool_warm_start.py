"""A warm start on tool calls in the forms of APIGen-MT, xLAM and ToolACE, then GRPO with tools, with
each `rollout.history`. The rows are made up; the template is Qwen3's in short: thoughts before the
last question go.

    python benchmarks/tool_warm_start.py     rewrites results/tool_warm_start.json and .md

Reward is of held-out problems, sampled, before and after `tandem train`; `gap` is the largest
difference between the log-probs of engine and trainer in any step.
"""

import json
import random
import shutil
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import machine
from transformers import Qwen3Config, Qwen3ForCausalLM

from tandem.envs.tools import ToolEnv
from tandem.model.tiny import make_tokenizer, save_random
from tandem.run_folder.episode_files import read_episodes
from tandem.run_folder.metrics import read_metrics
from tandem.types import Observation

ROOT = Path(__file__).parent.parent
RUNS = ROOT / "runs" / "tool_warm_start"
RESULTS = ROOT / "results" / "tool_warm_start.json"
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TEMPLATE = """
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}<|system|>{% for t in tools %}{{ t.function.name }}{% endfor %}<|end|>{% endif %}
{%- for m in messages %}
{%- set said = m.content or '' %}
{%- if m.role == 'assistant' and loop.index0 < ns.last %}{% set said = said.split('</think>')[-1] %}{% endif %}
{{- '<|' + m.role + '|>' + said }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}
{%- endfor %}{{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
RECIPE = """
model.path = "{0}/model"
data.train = "{0}/train.jsonl"
eval.data = "{0}/test.jsonl"
env.name = "benchmarks/tool_warm_start.py:Sums"
env.max_turns = 4
reward.function = "env"
run.steps = 40
rollout.max_new_tokens = 56
eval.greedy = false
eval.samples = 2
rl.prompts_per_step = 16
rl.group_size = 8
rl.algorithm = "dr_grpo"
train.learning_rate = 3e-4
sft.train = "{0}/warm.jsonl"
sft.steps = 230
sft.batch_size = 32
sft.learning_rate = 4e-3
sft.warmup_steps = 10
"""
PAGE = """# A warm start on tool calls, then GRPO

`python benchmarks/tool_warm_start.py`; {machine}; {date}. A Qwen3 of 0.14M parameters with a template
that drops earlier thoughts: SFT on made-up rows of the forms of APIGen-MT, xLAM and ToolACE, then 40
steps of Dr.GRPO on two sums with a tool. Reward of 24 held-out problems x 2 samples; gap: the largest
between engine and trainer log-probs in any step. {seconds} s in all.

| `rollout.history` | reward before | after | turns of an episode | samples of an episode | gap |
|---|---|---|---|---|---|
{rows}
"""


async def add(a: int, b: int) -> str:
    """Adds two numbers.

    Args:
        a: One.
        b: The other.
    """
    return str(a + b)


class Sums(ToolEnv):
    """Two sums, one after the other; each right answer is half of the reward."""

    def __init__(self):
        super().__init__(tools=[add])

    def reset(self, problem):
        self.asked = problem.answer.split()  # result, the next question, its result
        return problem.messages

    async def step(self, text):
        seen = await super().step(text)
        if not seen.done:
            return seen
        result, *self.asked = *self.asked, "", ""
        right = text.endswith(f"Answer: {result}")
        next_one = [{"role": "user", "content": self.asked[0]}] if right and self.asked[0] else []
        return Observation(
            messages=next_one, done=not next_one, reward=right / 2, parts=self.parts()
        )


def question(rng):
    a, b = rng.randrange(1, 5), rng.randrange(1, 5)
    return f"{a}+{b}=?", {"a": a, "b": b}, str(a + b)


def warm_row(rng, form):
    asked, arguments, result = question(rng)
    call = {"name": "add", "arguments": arguments}
    tools = json.dumps([{"name": "add", "description": "Adds.", "parameters": {}}])
    if form == "xLAM":
        return {"query": asked, "tools": tools, "answers": json.dumps([call])}
    if form == "ToolACE":
        said = f"[add(a={arguments['a']}, b={arguments['b']})]"
        turns = [("user", asked), ("assistant", said)]
        more = {"system": "Functions: add"}
    else:  # of one question, or of two; a thought before the last would be dropped
        turns, more = [], {"tools": tools}
        for left in reversed(range(rng.randrange(1, 3))):
            asked, arguments, result = question(rng)
            call = {"name": "add", "arguments": arguments}
            thought = "" if left else f"<think>It is {result}.</think>"
            turns += [("human", asked), ("function_call", json.dumps(call))]
            turns += [("observation", result), ("gpt", f"{thought}Answer: {result}")]
    return {"conversations": [{"from": who, "value": value} for who, value in turns], **more}


def make(folder: Path) -> None:
    """Write the data, the model and the recipe."""
    rng = random.Random(0)
    forms = ["APIGen-MT", "APIGen-MT", "xLAM", "ToolACE"]
    write(folder / "warm.jsonl", [warm_row(rng, forms[n % 4]) for n in range(2000)])
    for name, count in (("train", 200), ("test", 24)):
        pairs = [(question(rng), question(rng)) for _ in range(count)]
        rows = [{"prompt": one[0], "answer": f"{one[2]} {two[0]} {two[2]}"} for one, two in pairs]
        write(folder / f"{name}.jsonl", rows)
    tokenizer = make_tokenizer(256, others=MARKS, template=TEMPLATE)
    size = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        max_position_embeddings=256,
        initializer_range=0.06,
        tie_word_embeddings=True,
        bos_token_id=None,
        dtype="float32",
        **size,
        **heads,
        **ids,
    )
    save_random(Qwen3ForCausalLM, config, tokenizer, folder / "model", seed=0)
    (folder / "recipe.toml").write_text(RECIPE.format(folder))


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def tandem(command: str, folder: Path, *overrides: str) -> Path:
    """Run a command into a folder of its name; return the folder."""
    target = folder / "-".join([command, *(o.partition("=")[2] for o in overrides[:1])])
    recipe, run = str(folder / "recipe.toml"), f"run.folder={target}"
    line = [sys.executable, "-m", "tandem", command, recipe, run, *overrides]
    subprocess.run(line, check=True, cwd=ROOT)
    return target


def learned(history: str, folder: Path, warm: str) -> dict:
    """Train from the warm model; return what came of it."""
    run = tandem("train", folder, f"rollout.history={history}", f"model.path={warm}")
    rows = read_metrics(run)
    episodes = read_episodes(run / f"episodes/train_step_{rows[-1]['step']:06d}.parquet")
    held_out = [row["eval/sampled"] for row in rows if "eval/sampled" in row]
    return {
        "history": history,
        "before": held_out[0],
        "after": held_out[-1],
        "training": [row["reward"] for row in rows if "reward" in row],
        "turns": sum(e.num_turns for e in episodes) / len(episodes),
        "sequences": sum(len(e.sequences) for e in episodes) / len(episodes),
        "gap": max(row["logprob_gap"] for row in rows if "logprob_gap" in row),
    }


def main() -> int:
    start = time.perf_counter()
    shutil.rmtree(RUNS, ignore_errors=True)
    RUNS.mkdir(parents=True)
    make(RUNS)
    [warm] = (tandem("sft", RUNS) / "hf").glob("step_*")
    results = [learned(history, RUNS, str(warm)) for history in ("keep", "template")]
    seconds = round(time.perf_counter() - start)
    about = {"machine": machine.describe(), "date": str(date.today()), "seconds": seconds}
    RESULTS.write_text(json.dumps({"runs": results, **about}, indent=1) + "\n")
    lines = [
        f"| `{r['history']}` | {r['before']:.3f} | {r['after']:.3f} | {r['turns']:.1f} |"
        f" {r['sequences']:.1f} | {r['gap']} |"
        for r in results
    ]
    RESULTS.with_suffix(".md").write_text(PAGE.format(**about, rows="\n".join(lines)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
