"""A checkpoint as a Hugging Face directory that stock transformers and vLLM load: weights, config, tokenizer, card."""

import json
import shutil
from pathlib import Path

from tandem import __version__
from tandem.checkpoint import weight_hash
from tandem.errors import UserError
from tandem.model.load import ExactModel


def export(model: ExactModel, source: str, folder: Path, card: str) -> Path:
    """Write model, and the tokenizer of the model at `source`, into folder; it appears whole or not at all."""
    from transformers import AutoTokenizer

    temporary = folder.with_name(f".tmp-{folder.name}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        model.module.save_pretrained(temporary)
        AutoTokenizer.from_pretrained(source).save_pretrained(temporary)
        (temporary / "README.md").write_text(card, encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(
            "the model cannot be written", where=str(folder), found=str(error), expected="a writable disk with room"
        ) from None
    return folder


def model_card(model: ExactModel, *, base: str, command: str, step: int, metrics: dict[str, object]) -> str:
    """The README.md of an exported model: where it comes from and what was measured."""
    numbers = json.dumps({k: v for k, v in metrics.items() if k.startswith("eval/") or k == "step"}, indent=2)
    return (
        f"---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags: [tandem, reinforcement-learning]\n---\n"
        f"# {Path(base).name}, after `tandem {command}`\n\n"
        f"Trained from `{base}` by Tandem {__version__}, {step} steps. Weight hash `{weight_hash(model.named_weights())}`.\n\n"
        f"Last metrics of the run:\n```json\n{numbers}\n```\n"
    )
