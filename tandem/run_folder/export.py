"""A checkpoint as a Hugging Face directory that stock transformers and vLLM load: weights, config,
tokenizer, card, and their SHA-256 (`sha256sum -c SHA256SUMS`), which `load_model` checks.

An adapter is merged into it; plugins/commands/export.py writes it by itself.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors import SafetensorError

from tandem.config.recipe import changed
from tandem.config.schema import Config
from tandem.model.custom_code import is_custom, save_files
from tandem.model.load import ExactModel
from tandem.model.stock import SUMS
from tandem.model.tokenizer import load_tokenizer
from tandem.runtime.disk import file_hash, os_error, whole_folder
from tandem.runtime.errors import UserError
from tandem.runtime.version import __version__
from tandem.types import Row
from tandem.weights.hashing import weight_hash


def export(
    model: ExactModel, source: str, folder: Path, card: str, *, max_shard_size: str = "50GB"
) -> Path:
    """Write model, and the tokenizer at `source`, into folder, which appears whole or not at all.

    An adapter is merged into the weights. max_shard_size: of a file of weights, e.g. "5GB".
    """

    def write(folder: Path) -> None:
        weights = model.merged_weights()
        model.module.save_pretrained(folder, state_dict=weights, max_shard_size=max_shard_size)
        load_tokenizer(source).save_pretrained(folder)
        model.save_reader(source, folder)

    return write_export(folder, write, card)


def keep_model(model: ExactModel, source: str, folder: Path, chat_template: str = "") -> None:
    """Write config and tokenizer of a run's model into folder, so that checkpoints can be loaded
    without the model at `source`. chat_template: of the run, if the tokenizer's is another."""

    def write(folder: Path) -> None:
        model.module.config.save_pretrained(folder)
        if is_custom(model.config):
            save_files(model.module, folder)
        if model.module.can_generate():
            model.module.generation_config.save_pretrained(folder)
        tokenizer = load_tokenizer(source)
        tokenizer.chat_template = chat_template or tokenizer.chat_template
        tokenizer.save_pretrained(folder)
        model.save_reader(source, folder)

    if not folder.exists():
        card = f"# Config and tokenizer of {source}; the weights are in ../checkpoints\n"
        write_export(folder, write, card)


def write_export(folder: Path, write: Callable[[Path], None], card: str) -> Path:
    """Let write fill a directory, add card and SHA-256 sums, and put it at folder, in place of an
    older one."""
    with whole_folder(folder) as temporary:
        try:
            write(temporary)
        except SafetensorError as error:
            raise os_error(error, temporary) or error from None
        (temporary / "README.md").write_text(card, encoding="utf-8")
        sums = [f"{file_hash(file)}  {file.name}\n" for file in sorted(temporary.iterdir())]
        (temporary / SUMS).write_text("".join(sums))
        for file in temporary.iterdir():
            file.chmod(0o644)  # safetensors writes files that only their owner can read
    return folder


def check_target(folder: Path) -> None:
    """Raise UserError if an export to this folder would replace anything but an older export."""
    sums = folder / SUMS
    listed = [*sums.read_text().split()[1::2], SUMS] if sums.is_file() else []
    is_other = folder.is_symlink() or (folder.exists() and not folder.is_dir())
    if is_other or {file.name for file in folder.glob("*")} - {*listed}:
        raise UserError("the target of the export exists", where=str(folder), next="name a new one")


def model_card(
    model: ExactModel,
    config: Config,
    *,
    command: str,
    metrics: Row,
    inputs: Mapping[str, str],
    versions: Mapping[str, str],
) -> str:
    """Write the README.md of an exported model: its origin, its metrics, and what the run was a
    function of. metrics: of its step; inputs: SHA-256 by key; versions: of the libraries that
    computed it."""
    base, step = config.model.path, metrics["step"]
    task, method = (
        ("text-classification", "reward-model") if command == "rm" else ("text-generation", command)
    )
    numbers = {k: v for k, v in metrics.items() if k.startswith("eval/") or k == "step"}
    quantized = (
        f"The adapter was trained on it with the linears of its layers in {config.lora.base}; "
        "merged weights are those that ran, dequantized.\n\n"
    ) * config.lora.is_quantized
    lines = [f"{key} = {value}" for key, value, _ in changed(config)]
    on_hub = re.fullmatch(r"(?!runs/)\w[\w.-]*/\w[\w.-]*", base, re.ASCII)
    linked = f'base_model: "{base}"\n' if on_hub and not Path(base).exists() else ""
    return (
        f"---\nlibrary_name: transformers\npipeline_tag: {task}\ntags: [tandem, {method}]\n"
        f"{linked}---\n"
        f"# {Path(base).name}, after `tandem {command}`\n\n"
        f"Trained from `{base}` by Tandem {__version__}, {step} steps, seed {config.run.seed}. "
        f"Weight hash `{weight_hash(model.merged())}`.\n\n"
        f"{quantized}"
        f"Last metrics of the run:\n{_block('json', json.dumps(numbers, indent=2))}\n"
        f"## Recipe\n\nEvery key that differs from its default:\n{_block('toml', lines)}\n"
        f"## Inputs\n\nSHA-256 of the data, functions and weights that the run began with:\n"
        f"{_block('', [f'{digest}  {key}' for key, digest in sorted(inputs.items())])}\n"
        f"## Versions\n\n{_block('', [f'{name} {v}' for name, v in versions.items()])}"
    )


def _block(kind: str, text: str | list[str]) -> str:
    """Write a block of code, which no text ends before its end."""
    body = text if isinstance(text, str) else "\n".join(text)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", body)), default=0))
    return f"{fence}{kind}\n{body}\n{fence}\n"
