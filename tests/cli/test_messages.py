"""Messages for users' mistakes, each as it is in messages.txt.

python -m tests.cli.test_messages     # writes the file again; read the diff before a commit
"""

import json
import shutil
import sys
import tempfile
from contextlib import chdir
from pathlib import Path

import pytest

from tandem.runtime.errors import UserError
from tests.support.home import invoke, make_home

SNAPSHOT = Path(__file__).parent / "messages.txt"
CASES = [
    ["train", "data.shuffle=False"],
    ["train", "data.train=[a.jsonl, b.jsonl]"],
    ["train", "data.system=5"],
    ["train", "data.train=5"],
    ["train", "reward.weights=1,2"],
    ["train", "rl.algorithm=grop"],
    ["train", "rl.algorithm=GRPO"],
    ["train", "rl.loss=PPO_Clip"],
    ["train", "rl.grop_size=4"],
    ["train", "reward=exatc"],
    ["train", "reward=mine.py"],
    ["train", "reward=mine.py:swapped"],
    ["train", "data.train=nan.jsonl"],
    ["train", "data.train=header.csv"],
    ["train", "data.train=prompts.jsonl"],
    ["train", "data.train=numbers.jsonl"],
    ["train", "data.train=solutions.jsonl"],
    ["train", "data.train=twice.jsonl"],
    ["train", "data.train=long.jsonl"],
    ["train", "data.train=none.jsonl"],
    ["sft", "sft.train=target.jsonl"],
    ["train", "model.path=nan.jsonl"],
    ["train", "model.path=empty"],
    ["train", "model.path=a-run"],
    ["train", "model.path=a-run/checkpoints/step_000010"],
    ["train", "model.path=~/model"],
    ["train", "model.path=cut"],
    ["train", "model.path=pickle"],
    ["train", "rollout.max_new_tokens=100000"],
    ["train", "data.train="],
    ["train", "data.train=nope.jsonl"],
    ["train", "data.train=targt.jsonl"],
    ["train", "steps=3"],
    ["train", "data.chat_template=nope.jinja"],
    ["train", "model.path=./nope"],
    ["train", "model.path=models/nope"],
    ["train", "model.device=gpu"],
    ["train", "model.dtype=float16"],
    ["train", "rl.group_size=abc"],
    ["train", "rl.group_size=0"],
    ["train", "rl.loss=ppo_clipp"],
    ["train", "rl.loss=nope.py:loss"],
    ["train", "rl.loss=mine.py:swapped"],
    ["train", "rl.advantage=mine.py:ragged"],
    ["train", "rl.filter=mine.py:swapped"],
    ["train", "rl.kl_coef=-1"],
    ["train", "eval.metric=mine.py:broken"],
    ["train", "train.learning_rate=fast"],
    ["train", "train.tokens_per_microbatch=1"],
    ["train", "run.steps=-1"],
    ["train", "run.threads=-1"],
    ["train", "rollout.temperature=-1"],
    ["train", "rollout.release_cache=maybe"],
    ["train", "rollout.workers=many"],
    ["train", "rollout.engine=vlm"],
    ["train", "weights.transport=pigeon"],
    ["train", "cluster.placement=near"],
    ["train", "cluster.placement=pack"],
    ["train", "parallel.tensor=3"],
    ["train", "env=nope"],
    ["train", "lora.rank=-1"],
    ["train", "nonsense.key=1"],
    ["train", "rl"],
    ["distill", "distill.temperature=1"],
    ["distill", "distill.teacher=./nope"],
    ["rm", "preference.train=mine.py"],
    ["dpo", "preference.beta=0.1"],
    ["export", "empty"],
    *(
        [command, argument]
        for command in ("show", "status", "why", "report")
        for argument in ("empty", "nan.jsonl", "a-rum", "runs")
    ),
    ["train", "learning_rate=3e-4"],
    ["train", "model=model"],
    ["train", "reward=accuracy_reward"],
    ["train", "data.chat_template=broken.jinja"],
    ["train", "model.path=broken"],
    ["train", "run.folder=nan.jsonl"],
    ["train", "run.folder=/proc/x"],
    ["init", "empty"],
    ["tiny", "model"],
    ["try", "nope.py:score"],
]
WITHOUT_RECIPE = ("export", "show", "status", "why", "report", "init", "tiny", "try")


def prepare(folder):
    """The folder that the commands run in."""
    make_home(folder, steps=2)
    rows = {
        "nan.jsonl": ['{"prompt": "1?", "answer": NaN}'],
        "header.csv": ["prompt,answer"],
        "prompts.jsonl": [json.dumps({"prompt": [{"role": "user", "content": "1?"}]})],
        "numbers.jsonl": [json.dumps({"prompt": 3, "answer": 4})],
        "solutions.jsonl": [json.dumps({"prompt": "1?", "solution": "2"})],
        "twice.jsonl": ['{"prompt": "1?", "prompt": "2?", "answer": "3"}'],
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
    (folder / "empty").mkdir()
    (folder / "runs/mine").mkdir(parents=True)
    (folder / "runs/mine/config.toml").touch()
    (folder / "a-run/checkpoints/step_000010").mkdir(parents=True)
    (folder / "a-run/config.toml").touch()
    (folder / "a-run/checkpoints/step_000010/state.json").write_text("{}")
    (folder / "broken.jinja").write_text("{% for m in messages %}\n{{ m.content }\n")
    for name in ("cut", "pickle", "broken"):
        shutil.copytree(folder / "model", folder / name)
    weights = (folder / "cut/model.safetensors").read_bytes()
    (folder / "cut/model.safetensors").write_bytes(weights[: len(weights) // 2])
    (folder / "broken/config.json").write_text('{\n  "model_type": "llama"\n  "vocab_size": 9\n}\n')
    (folder / "pickle/model.safetensors").rename(folder / "pickle/pytorch_model.bin")
    return folder


def message(folder, command, argument):
    with chdir(folder):
        recipe = [] if command in WITHOUT_RECIPE else ["recipe.toml"]
        error = invoke(command, *recipe, argument).exception
    assert isinstance(error, UserError), error
    return f"$ tandem {command} {argument}\nerror: {error}".replace(str(folder), ".").replace(
        str(Path.home()), "/home/me"
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("home"))


@pytest.mark.parametrize(("command", "argument"), CASES)
def test_message_of_a_mistake_equals_the_snapshot(folder, command, argument):
    known = {
        text.partition("\n")[0]: text for text in SNAPSHOT.read_text().rstrip("\n").split("\n\n")
    }
    assert message(folder, command, argument) == known[f"$ tandem {command} {argument}"]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        home = prepare(Path(temporary))
        SNAPSHOT.write_text("\n\n".join(message(home, *case) for case in CASES) + "\n")
    sys.stdout.write(SNAPSHOT.read_text())
