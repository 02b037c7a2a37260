"""A checkpoint as a Hugging Face directory that stock transformers and vLLM load: weights, config, tokenizer, card."""

import json
import shutil
from pathlib import Path

from safetensors import SafetensorError

from tandem import __version__
from tandem.disk import disk_errors, os_error
from tandem.model.hashing import weight_hash
from tandem.model.load import ExactModel


def export(model: ExactModel, source: str, folder: Path, card: str) -> Path:
    """Write model, and the tokenizer of the model at `source`, into folder; it appears whole or not at all."""

    temporary = folder.with_name(f".tmp-{folder.name}")
    with disk_errors(folder):
        try:
            _write(model, source, temporary, card)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise os_error(error, temporary) or error from None
        aside = folder.with_name(f".old-{folder.name}")
        shutil.rmtree(aside, ignore_errors=True)
        if folder.exists():
            folder.rename(aside)
        temporary.rename(folder)
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def _write(model: ExactModel, source: str, folder: Path, card: str) -> None:
    from transformers import AutoTokenizer

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model.module.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    (folder / "README.md").write_text(card, encoding="utf-8")
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors writes files that only their owner can read


def model_card(model: ExactModel, *, base: str, command: str, step: int, metrics: dict[str, object]) -> str:
    """The README.md of an exported model: where it comes from and what was measured."""
    numbers = json.dumps({k: v for k, v in metrics.items() if k.startswith("eval/") or k == "step"}, indent=2)
    return (
        f"---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags: [tandem, reinforcement-learning]\n---\n"
        f"# {Path(base).name}, after `tandem {command}`\n\n"
        f"Trained from `{base}` by Tandem {__version__}, {step} steps. Weight hash `{weight_hash(model.named_weights())}`.\n\n"
        f"Last metrics of the run:\n```json\n{numbers}\n```\n"
    )
