"""A warm start on tool calls in the forms of APIGen-MT, xLAM and ToolACE, then GRPO with tools, with
each `rollout.history`.

    python benchmarks/tool_warm_start.py     rewrites results/tool_warm_start.json and .md

The rows are made up. Half of the answers in them are guessed, without the tool: GRPO unlearns that.
The template is Qwen3's in short: thoughts before the last question are dropped. Each run of GRPO is
made a second time with a `kill -9` on the way. What an earlier start has done stays in
runs/tool_warm_start, and counts.
"""

import json
import random
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
WORDS = ['{"name": "add", "arguments": {"a": ', ', "b": ', "It is "]  # one token each
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
eval.greedy = false
eval.samples = 4
env.name = "benchmarks/tool_warm_start.py:Sums"
env.max_turns = 4
reward.function = "env"
run.steps = 24
run.save_every = 4
rollout.max_new_tokens = 12
rl.algorithm = "dr_grpo"
rl.prompts_per_step = 8
rl.group_size = 8
train.learning_rate = 1e-3
sft.train = "{0}/warm.jsonl"
sft.steps = 100
sft.batch_size = 32
sft.learning_rate = 4e-3
sft.warmup_steps = 10
"""
PAGE = """# A warm start on tool calls, then GRPO

`python benchmarks/tool_warm_start.py`; {machine}; {date}.

A random Qwen3 of {parameters:,} parameters, with a template that drops earlier thoughts, is fine-tuned on made-up rows in the forms of
APIGen-MT, xLAM and ToolACE. Half of the answers in them are guessed without the tool. Then come {steps} steps of Dr.GRPO on two sums, one
after the other, with a tool; each right answer is half of the reward. Reward is of 24 held-out problems, 4 samples each. The gap is the
largest one between log-probs of engine and trainer in any step. Each run is made again with a `kill -9` on the way; the last column
tells whether metrics and model have the same bytes.

| `rollout.history` | held-out reward before | after | calls of an episode, first step | last step | sequences of an episode | gap | equal bytes |
|---|---|---|---|---|---|---|---|
{rows}

Training reward by step:

{curves}
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
        self.result, *self.later = problem.answer.split()
        return problem.messages

    async def step(self, text):
        seen = await super().step(text)
        if not seen.done:
            return seen
        right = text.endswith(f"Answer: {self.result}")
        if not (right and self.later):
            return Observation(done=True, reward=right / 2, parts=self.parts())
        asked, self.result = self.later
        self.later = []
        return Observation(messages=[{"role": "user", "content": asked}], reward=right / 2)


def question(rng):
    a, b = rng.randrange(1, 5), rng.randrange(1, 5)
    return f"{a}+{b}=?", {"a": a, "b": b}, str(a + b)


def warm_row(rng, form):
    asked, arguments, result = question(rng)
    call = json.dumps({"name": "add", "arguments": arguments})
    tools = json.dumps([{"name": "add", "description": "Adds.", "parameters": {}}])
    if form == "xLAM":
        return {"query": asked, "tools": tools, "answers": f"[{call}]"}
    if form == "ToolACE":
        said = f"[add(a={arguments['a']}, b={arguments['b']})]"
        turns, more = [("user", asked), ("assistant", said)], {"system": "Functions: add"}
    else:  # of one question or two; the template would drop a thought before the last
        turns, more = [], {"tools": tools}
        for left in reversed(range(rng.randrange(1, 3))):
            asked, arguments, result = question(rng)
            turns.append(("human", asked))
            if rng.random() < 0.5:
                call = json.dumps({"name": "add", "arguments": arguments})
                turns += [("function_call", call), ("observation", result)]
            else:
                result = str(rng.randrange(2, 9))
            thought = "" if left else f"<think>It is {result}.</think>"
            turns.append(("gpt", f"{thought}Answer: {result}"))
    return {"conversations": [{"from": who, "value": value} for who, value in turns], **more}


def make(folder: Path) -> int:
    """Write the data, the model and the recipe; return the number of parameters."""
    rng = random.Random(0)
    forms = ["APIGen-MT", "APIGen-MT", "xLAM", "ToolACE"]
    write(folder / "warm.jsonl", [warm_row(rng, forms[n % 4]) for n in range(2000)])
    for name, count in (("train", 200), ("test", 24)):
        pairs = [(question(rng), question(rng)) for _ in range(count)]
        rows = [{"prompt": one[0], "answer": f"{one[2]} {two[0]} {two[2]}"} for one, two in pairs]
        write(folder / f"{name}.jsonl", rows)
    (folder / "recipe.toml").write_text(RECIPE.format(folder))
    tokenizer = make_tokenizer(256, others=MARKS, template=TEMPLATE)
    tokenizer.add_tokens(WORDS)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.06,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return save_random(Qwen3ForCausalLM, config, tokenizer, folder / "model", seed=0)


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def tandem(command: str, folder: Path, *overrides: str, kill_at: int = 0) -> Path:
    """Run a command into a folder, once killed after so many steps; return the exported model."""
    line = [sys.executable, "-m", "tandem", command, str(RUNS / "recipe.toml")]
    line += [f"run.folder={folder}", *overrides]
    if kill_at:
        process = subprocess.Popen(line, cwd=ROOT)
        while process.poll() is None and len(read_metrics(folder)) <= kill_at:
            time.sleep(0.1)
        process.kill()
        process.wait()
    subprocess.run(line, check=True, cwd=ROOT)
    [model] = (folder / "hf").glob("step_*")
    return model


def learned(history: str, warm: Path) -> dict:
    """Train from the warm model, twice; return what came of it."""
    whole, killed = RUNS / history, RUNS / f"{history}-killed"
    settings = [f"rollout.history={history}", f"model.path={warm}"]
    files = [tandem("train", whole, *settings) / "model.safetensors", whole / "metrics.jsonl"]
    again = tandem("train", killed, *settings, kill_at=9)
    others = [again / "model.safetensors", killed / "metrics.jsonl"]
    rows = read_metrics(whole)
    held_out = [row["eval/sampled"] for row in rows if "eval/sampled" in row]
    steps = rows[1:]  # the first row is of the evaluation before
    episodes = read_episodes(whole / f"episodes/train_step_{len(steps):06d}.parquet")
    return {
        "history": history,
        "before": held_out[0],
        "after": held_out[-1],
        "training": [row["reward"] for row in steps],
        "calls": [row["reward_part/tool_calls"] for row in steps],
        "sequences": sum(len(episode.sequences) for episode in episodes) / len(episodes),
        "gap": max(row["logprob_gap"] for row in steps),
        "equal": all(a.read_bytes() == b.read_bytes() for a, b in zip(files, others, strict=True)),
    }


def main() -> int:
    RUNS.mkdir(parents=True, exist_ok=True)
    parameters = make(RUNS)
    warm = tandem("sft", RUNS / "sft")
    runs = [learned(history, warm) for history in ("keep", "template")]
    about = {"machine": machine.describe(), "date": str(date.today()), "parameters": parameters}
    about["steps"] = len(runs[0]["training"])
    RESULTS.write_text(json.dumps({"runs": runs, **about}, indent=1) + "\n")
    rows = [
        f"| `{r['history']}` | {r['before']:.3f} | {r['after']:.3f} | {r['calls'][0]:.2f} |"
        f" {r['calls'][-1]:.2f} | {r['sequences']:.2f} | {r['gap']} | {r['equal']} |"
        for r in runs
    ]
    curves = [f"- `{r['history']}`: {' '.join(f'{x:.2f}' for x in r['training'])}" for r in runs]
    page = PAGE.format(**about, rows="\n".join(rows), curves="\n".join(curves))
    RESULTS.with_suffix(".md").write_text(page)
    return int(not all(r["equal"] and r["gap"] == 0 for r in runs))


if __name__ == "__main__":
    sys.exit(main())
