"""A model directory with an architecture of its own: its Python files run where the recipe says so,
in every process, are part of the run, and leave with its exports."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.model import custom_code
from tandem.model.load import load_model
from tandem.model.tiny import make_tiny
from tandem.model.tokenizer import load_tokenizer
from tandem.run_folder.read import open_past
from tandem.runtime.errors import UserError
from tests.support.home import invoke, make_home, mistake, output_of
from tests.support.tiny import change_json, stock_logits

FILES = {
    "configuration_halved": """
from transformers import Qwen3Config

class HalvedConfig(Qwen3Config):
    model_type = "halved"
""",
    "scale_halved": "FACTOR = 0.5\n",
    "modeling_halved": """
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM, Qwen3MLP

from .configuration_halved import HalvedConfig
from .scale_halved import FACTOR

class HalvedMLP(Qwen3MLP):
    def forward(self, x):
        return FACTOR * super().forward(x)

class HalvedForCausalLM(Qwen3ForCausalLM):
    config_class = HalvedConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = HalvedMLP(config)
        self.post_init()
""",
}
AUTO_MAP = {
    "AutoConfig": "configuration_halved.HalvedConfig",
    "AutoModelForCausalLM": "modeling_halved.HalvedForCausalLM",
}
TRUSTED = "model.trust_remote_code=true"


@pytest.fixture(scope="module", autouse=True)
def no_code_allowed():
    yield
    custom_code.allow(False)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A home whose model is of an architecture of its own."""
    folder = make_home(tmp_path_factory.mktemp("home"), steps=2)
    customize(folder / "model")
    return folder


def customize(folder):
    for name, text in FILES.items():
        (folder / f"{name}.py").write_text(text)
    own = {"model_type": "halved", "architectures": ["HalvedForCausalLM"], "auto_map": AUTO_MAP}
    change_json(folder / "config.json", **own)


@pytest.fixture(scope="module")
def trained(home, tmp_path_factory):
    run = tmp_path_factory.mktemp("run") / "run"
    changes = [TRUSTED, "rollout.workers=1", "rl.kl_coef=0.05"]
    output_of("train", home / "recipe.toml", f"run.folder={run}", *changes)
    return run


@pytest.mark.parametrize("command", ["train", "eval", "rollout"])
def test_without_the_key_the_files_are_named_and_not_run(command, home, tmp_path):
    custom_code.allow(True)  # of a command before
    out = ["--out", tmp_path / "out.json"] if command != "train" else []
    text = mistake(command, home / "recipe.toml", f"run.folder={tmp_path / 'run'}", *out)
    assert "configuration_halved.py, modeling_halved.py" in text
    assert "model.trust_remote_code=true" in text
    assert "trust_remote_code" in invoke("plan", home / "recipe.toml").output
    with pytest.raises(UserError, match="Python files of its own"):
        load_model(str(home / "model"))


def test_files_of_another_repository_do_not_run(home, tmp_path):
    folder = shutil.copytree(home / "model", tmp_path / "model")
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"modeling_halved', '"someone/else--modeling_halved'))
    text = mistake("train", home / "recipe.toml", f"model.path={folder}", TRUSTED)
    assert "another repository" in text and "someone/else--modeling_halved.py" in text


def test_config_of_another_repository_does_not_run_for_the_tokenizer(home, tmp_path):
    """transformers asks config.json, of a known architecture too, where it loads a tokenizer."""
    make_tiny(folder := tmp_path / "model")
    auto_map = {"AutoConfig": "someone/else--configuration_x.XConfig"}
    change_json(folder / "config.json", auto_map=auto_map)
    text = mistake("train", home / "recipe.toml", f"model.path={folder}", TRUSTED)
    assert "another repository" in text and "someone/else--configuration_x.py" in text


def test_tokenizer_of_files_of_its_own_needs_the_key_too(home, tmp_path):
    folder = shutil.copytree(home / "model", tmp_path / "model")
    (folder / "tokenization_own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n\n"
        "class OwnTokenizer(PreTrainedTokenizerFast):\n    own = True\n"
    )
    auto_map = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}
    own = {"auto_map": auto_map, "tokenizer_class": "OwnTokenizer"}
    change_json(folder / "tokenizer_config.json", **own)
    custom_code.allow(False)
    with pytest.raises(UserError, match="Python files of its own") as error:
        load_tokenizer(str(folder))
    assert "tokenization_own.py" in str(error.value)
    custom_code.allow(True)
    assert load_tokenizer(str(folder)).own


def test_the_files_compute_in_every_process_and_leave_with_the_export(trained, home, tmp_path):
    rows = open_past(trained)
    assert rows.metrics[2]["logprob_gap"] == 0.0 and rows.metrics[1]["reference_kl"] == 0.0
    [folder] = (trained / "hf").iterdir()
    assert {f"{name}.py" for name in FILES} <= {path.name for path in folder.iterdir()}
    assert json.loads((folder / "config.json").read_text())["auto_map"] == AUTO_MAP
    moved = shutil.copytree(folder, tmp_path / "moved")
    stock = AutoModelForCausalLM.from_pretrained(
        moved, trust_remote_code=True, attn_implementation="eager"
    )
    assert type(stock.model.layers[0].mlp).__name__ == "HalvedMLP"
    assert len(AutoTokenizer.from_pretrained(moved)) == stock.config.vocab_size
    assert not torch.equal(
        load_file(moved / "model.safetensors")["model.layers.0.mlp.up_proj.weight"],
        load_file(home / "model" / "model.safetensors")["model.layers.0.mlp.up_proj.weight"],
    )
    tokens = torch.arange(20)
    with torch.no_grad():
        expected = stock_logits(stock, tokens)
        for layer in stock.model.layers:
            layer.mlp.forward = super(type(layer.mlp), layer.mlp).forward
        assert (stock_logits(stock, tokens) - expected).abs().max() > 1e-3
    output_of("eval", home / "recipe.toml", TRUSTED, f"model.path={moved}")


def test_past_run_needs_its_own_copy_of_the_files_only(trained, home, tmp_path):
    kept = trained / "model"
    assert {f"{name}.py" for name in FILES} <= {path.name for path in kept.iterdir()}
    away = shutil.move(home / "model", tmp_path / "away")
    try:
        output_of("export", trained, "--out", tmp_path / "out")
    finally:
        shutil.move(away, home / "model")
    [first] = (trained / "hf").iterdir()
    for name in ("model.safetensors", "modeling_halved.py", "scale_halved.py"):
        assert (tmp_path / "out" / name).read_bytes() == (first / name).read_bytes(), name
    output_of("replay", trained, "--step", 2)
