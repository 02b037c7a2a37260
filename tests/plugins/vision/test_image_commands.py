"""A model that reads images, by the commands: data made on the spot, supervised start, GRPO,
evaluation, export."""

import json
import shutil

import pytest
import torch

from tandem.model.load import load_model
from tandem.run_folder.metrics import read_metrics
from tandem.runtime.image_parts import keep_in
from tests.support.home import invoke, mistake, output_of
from tests.support.image_models import picture, prompts_of, stock_logits
from tests.support.runs import REWARD

STEPS = 3
RECIPE = """
run.steps = {steps}
rollout.max_new_tokens = 8
rl.prompts_per_step = 4
rl.group_size = 4
rl.correction = "tis"
train.learning_rate = 1e-3
data.train = "{folder}/train.jsonl"
sft.train = "{folder}/train.jsonl"
sft.steps = {steps}
eval.data = "{folder}/test.jsonl"
model.path = "{folder}/model"
reward.function = "{folder}/parity.py:score"
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    invoke("tiny", folder / "model", "--images", "--hidden", 64, "--intermediate", 128)
    invoke("tiny", folder / "text")
    for split, count in (("train", 24), ("test", 6)):
        out = folder / f"{split}.jsonl"
        invoke("generate", "squares", "--count", count, "--split", split, "--out", out)
    (folder / "parity.py").write_text(REWARD)  # a random model counts nothing
    (folder / "recipe.toml").write_text(RECIPE.format(steps=STEPS, folder=folder))
    return folder


@pytest.fixture(scope="module")
def trained(home):
    output = output_of("train", home / "recipe.toml", f"run.folder={home}/run")
    return home / "run", " ".join(output.split())


def test_run_says_why_it_is_not_exact_and_measures_the_gap(trained):
    folder, output = trained
    rows = read_metrics(folder)
    assert all(row["grad_norm"] > 0 for row in rows[1:]) and rows[-1]["reward"] > 0
    assert "(architecture qwen2_5_vl: it reads images)" in output
    assert all(0 <= row["logprob_gap"] < 1e-3 for row in read_metrics(folder)[1:])


def test_export_is_a_stock_model_with_its_processor(trained):
    folder, _ = trained
    target = folder / f"hf/step_{STEPS:06d}"
    assert (target / "preprocessor_config.json").is_file()
    name = sorted(file.name for file in (folder / "images").iterdir())[0]
    chat = ({"role": "user", "content": [{"type": "image", "image": name}]},)
    keep_in(folder / "images")
    [prompt] = prompts_of(str(target), chat)
    model = load_model(str(target))
    with torch.no_grad():
        found = model.head(model.run(torch.from_numpy(prompt[None])))[0]
    torch.testing.assert_close(found, stock_logits(str(target), [name], prompt), atol=1e-4, rtol=0)


def test_other_commands_read_the_same_rows(home, trained, tmp_path):
    commands = [
        ["sft", home / "recipe.toml", f"run.folder={tmp_path}/sft"],
        ["train", home / "recipe.toml", f"run.folder={tmp_path}/lora", "lora.rank=2"],
        ["train", home / "recipe.toml", f"run.folder={tmp_path}/more", "rollout.workers=1"],
        ["eval", home / "recipe.toml", "--out", tmp_path / "means.json"],
        ["plan", home / "recipe.toml"],
    ]
    for command in commands:
        output_of(*command)
    before, *_ = read_metrics(trained[0])  # of the same weights
    found = json.loads((tmp_path / "means.json").read_text())
    assert 0 < found["eval/sampled"] == before["eval/sampled"] < 1


def test_resume_with_another_image_is_refused(home, tmp_path):
    """An image that is new, the two of two rows exchanged, and a processor that reads them in
    another way; of a training and of a rollout, which keeps its images."""
    files = ["a.png", "b.png", "b.png", "b.png"]
    rows = [{"prompt": f"{n}?", "answer": "1", "images": [file]} for n, file in enumerate(files)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    shutil.copytree(home / "model", tmp_path / "model")
    processor = tmp_path / "model" / "preprocessor_config.json"
    values = json.loads(processor.read_text())
    shared = [home / "recipe.toml", f"model.path={tmp_path}/model"]
    shared += [f"data.train={tmp_path}/rows.jsonl"]
    commands = [
        ["train", *shared, f"run.folder={tmp_path}/run", "run.steps=1", "eval.data="],
        ["rollout", *shared, "--out", tmp_path / "out"],
    ]

    def write(one, other, mean=0.5):
        (tmp_path / "a.png").write_bytes(picture(one))
        (tmp_path / "b.png").write_bytes(picture(other))
        processor.write_text(json.dumps({**values, "image_mean": [mean] * 3}))

    write(1, 2)
    for command in commands:
        output_of(*command)
    assert len(list((tmp_path / "out" / "images").iterdir())) == 2
    for changed, name in (((2, 1), "images"), ((1, 3), "images"), ((1, 2, 0.4), processor.name)):
        write(*changed)
        assert all(name in mistake(*command) for command in commands), changed
    write(1, 2)
    assert all(invoke(*command).exit_code == 0 for command in commands)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        (["model.path=FOLDER/text"], "this model reads text alone"),
        (["rl.correction=none"], "it reads images"),
        (["rollout.engine=http://127.0.0.1:9/v1"], "with Tandem's engine"),
        (["rl.algorithm=ppo"], "no value head for this architecture"),
    ],
)
def test_what_images_cannot_do_is_one_error(changes, found, home, tmp_path):
    changes = [change.replace("FOLDER", str(home)) for change in changes]
    assert found in mistake("train", home / "recipe.toml", f"run.folder={tmp_path}/run", *changes)
