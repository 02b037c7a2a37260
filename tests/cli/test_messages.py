"""Users' mistakes: each is told by the key or the file, and most with what was probably meant."""

import json
import shutil
from contextlib import chdir

import pytest

from tandem.config.recipe import to_toml
from tandem.config.schema import Config
from tandem.runtime.errors import UserError
from tests.support.home import invoke, make_home

# command | what its message names, and what it offers
CASES = """
train data.shuffle=False | data.shuffle | boolean
train data.train=[a.jsonl, b.jsonl] | data.train | names no file
train data.system=5 | data.system | string
train data.train=5 | data.train
train reward.weights=1,2 | reward.weights | list
train rl.algorithm=grop | rl.algorithm | grpo?
train rl.algorithm=GRPO | rl.algorithm | grpo?
train rl.loss=PPO_Clip | rl.loss | ppo_clip?
train rll.group_size=8 | command line | did you mean rl
train rl.deep.group_size=8 | command line | did you mean rl
plan a-run | the recipe is a folder | did you mean a-run/config.toml?
plan latin.toml | not valid TOML | latin.toml | utf-8
train rl.grop_size=4 | rl.grop_size | rl.group_size
train reward=exatc | reward.function | 'exact'?
train reward=mine.py | reward.function | mine.py:score
train reward=mine.py:swapped | reward.function | (problem, completion)
train data.train=nan.jsonl | nan.jsonl:1 | NaN
train data.train=header.csv | header.csv | a header alone
train data.train=prompts.jsonl | prompts.jsonl:1, answer | data.answer_column=''
train data.train=numbers.jsonl | numbers.jsonl:1, prompt | as text
train data.train=solutions.jsonl | solutions.jsonl:1, answer | data.answer_column=solution
train data.train=long.jsonl | data.max_prompt_tokens | 'long/1'
train data.train=none.jsonl | data.train | none.jsonl
sft sft.train=target.jsonl | target.jsonl:1, response | rename target to response
train model.path=nan.jsonl | model.path
train model.path=empty | model.path | tandem tiny DIR
train model.path=a-run | model.path | tandem export a-run
train model.path=a-run/checkpoints/step_000010 | model.path
train model.path=~/model | does not exist | ~/model
train model.path=cut | cut
train model.path=pickle | pickle | pytorch_model.bin
train model.path=scorer | reward model | critic.path
train rollout.max_new_tokens=100000 | rollout.max_new_tokens | lower
train data.train= | data.train | add data.train=...
train data.train=nope.jsonl | data.train | nope.jsonl
train data.train=targt.jsonl | data.train | target.jsonl
train rollout.max_tokens=9 | did you mean rollout.max_new_tokens?
train steps=3 | run.steps=3 or sft.steps=3 or preference.steps=3
train data.chat_template=nope.jinja | cannot be read | data.chat_template = nope.jinja
train data.chat_template=blank.jinja | cannot be read | data.chat_template = blank.jinja
train data.chat_template=latin.toml | cannot be read | data.chat_template = latin.toml
train model.path=./nope | model.path = ./nope
train model.path= | no model is named | model.path
train model.path=models/nope | model.path = models/nope
train model.dtype=float16 | model.dtype | bfloat16
train rl.loss=ppo_clipp | rl.loss | ppo_clip?
train rl.loss=nope.py:loss | rl.loss = nope.py:loss
train rl.loss=mine.py:swapped | rl.loss = mine.py:swapped | 'response'
train rl.advantage=mine.py:ragged | rl.advantage = mine.py:ragged | docs/guide/algorithms.md
train rl.filter=mine.py:swapped | rl.filter
train eval.metric=mine.py:broken | eval.metric = mine.py:broken | mine.py:3
train rollout.release_cache=maybe | rollout.release_cache
train cluster.placement=pack | cluster.placement
train parallel.tensor=3 | parallel.tensor | parallel.tensor=2
train env=nope | env.name | single_turn
distill distill.temperature=1 | distill.temperature | rollout.temperature
distill distill.teacher= | add distill.teacher=
distill distill.teacher=./nope | distill.teacher = ./nope
rm preference.train=mine.py | mine.py | convert the file
dpo preference.beta=0.1 | add preference.train=
export empty | empty
show a-rum | a-rum | a-run
show runs | runs/mine
status nan.jsonl | nan.jsonl
why runs | runs/mine
report a-rum | a-run
train reward=accuracy_reward | reward.function | 'answer'?
train data.chat_template=broken.jinja | broken.jinja, line 2
train model.path=broken | model.path = broken, config.json
train run.folder=nan.jsonl | nan.jsonl | another path
train run.folder=/proc/x | /proc/x | another path
init empty | empty | name another
tiny model | model | name another
try nope.py:score | data.train | add data.train=...
"""
WITHOUT_RECIPE = ("export", "plan", "show", "status", "why", "report", "init", "tiny", "try")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder that the commands run in."""
    folder = make_home(tmp_path_factory.mktemp("home"), steps=2)
    rows = {
        "nan.jsonl": ['{"prompt": "1?", "answer": NaN}'],
        "header.csv": ["prompt,answer"],
        "prompts.jsonl": [json.dumps({"prompt": [{"role": "user", "content": "1?"}]})],
        "numbers.jsonl": [json.dumps({"prompt": 3, "answer": 4})],
        "solutions.jsonl": [json.dumps({"prompt": "1?", "solution": "2"})],
        "long.jsonl": [json.dumps({"prompt": "1" * 2000, "answer": "2"})],
        "target.jsonl": [json.dumps({"prompt": "1?", "target": "2"})],
        "mine.py": [
            "def swapped(response, answer): return 0.0",
            "def ragged(rewards): return [[1.0], [1.0, 2.0]]",
            "def broken(rewards): return rewards.average()",
        ],
    }
    for name, lines in rows.items():
        (folder / name).write_text("\n".join(lines) + "\n")
    (folder / "latin.toml").write_bytes(b"\xff\xfe")
    (folder / "empty").mkdir()
    (folder / "runs/mine").mkdir(parents=True)
    (folder / "runs/mine/config.toml").touch()
    (folder / "a-run/checkpoints/step_000010").mkdir(parents=True)
    (folder / "a-run/config.toml").touch()
    (folder / "a-run/checkpoints/step_000010/state.json").write_text("{}")
    (folder / "broken.jinja").write_text("{% for m in messages %}\n{{ m.content }\n")
    (folder / "blank.jinja").write_text(" \n")
    for name in ("cut", "pickle", "broken", "scorer"):
        shutil.copytree(folder / "model", folder / name)
    weights = (folder / "cut/model.safetensors").read_bytes()
    (folder / "cut/model.safetensors").write_bytes(weights[: len(weights) // 2])
    (folder / "broken/config.json").write_text('{\n  "model_type": "llama"\n  "vocab_size": 9\n}\n')
    scorer = json.loads((folder / "scorer/config.json").read_text())
    scorer["architectures"] = ["Qwen3ForSequenceClassification"]
    (folder / "scorer/config.json").write_text(json.dumps(scorer))
    (folder / "pickle/model.safetensors").rename(folder / "pickle/pytorch_model.bin")
    return folder


@pytest.mark.parametrize("case", CASES.strip().splitlines())
def test_a_mistake_is_told_with_its_key_and_what_was_meant(folder, case):
    typed, *words = case.split(" | ")
    command, _, argument = typed.partition(" ")
    recipe = [] if command in WITHOUT_RECIPE else ["recipe.toml"]
    with chdir(folder):
        error = invoke(command, *recipe, argument).exception
    assert isinstance(error, UserError), error
    assert all(word in str(error) for word in words), error


@pytest.mark.parametrize(
    "wrong",
    ["data.train=nope.jsonl", "model.path=./nope", "reward=nope", "env=nope", "rl.loss=nope.py:f"],
)
def test_a_mistake_is_told_before_the_values_that_differ_from_the_run_in_the_folder(folder, wrong):
    ended = folder / "ended"
    ended.mkdir(exist_ok=True)
    (ended / "run.json").write_text('{"command": "train", "created": "", "directory": ""}')
    (ended / "config.toml").write_text(to_toml(Config()))
    (ended / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
    command = folder / "recipe.toml", f"run.folder={ended}", wrong
    said = invoke("plan", *command).output
    assert "nope" in said and "the config differs" not in said
