"""The adapter of a checkpoint by itself, in PEFT's format."""

from pathlib import Path

from safetensors.torch import save_file

from tandem.model.load import ExactModel
from tandem.model.lora import write_adapter_config
from tandem.run_folder.export import write_export
from tandem.runtime.errors import UserError


def export_adapter(model: ExactModel, source: str, folder: Path, card: str) -> Path:
    """Write the adapter alone, as `peft.PeftModel.from_pretrained(stock model of source, folder)`
    reads it; whole or not at all. Of the language model of a larger checkpoint (text_part) the
    stock model is that of an export.

    The score of a value model goes with it. Raises UserError for a model without an adapter.
    """
    lora = model.lora
    if lora is None:
        raise UserError(
            "the model has no adapter to export",
            where=str(folder),
            found="a model that was loaded without LoRA",
            expected="one with an adapter",
            next="export the whole model",
        )
    weights = {
        f"base_model.model.{name}": weight for name, weight in model.adapter_weights().items()
    }
    scored = "score.weight" in model.trainable()
    if scored:
        weights["base_model.model.score.weight"] = model.head.weight.detach()

    def write(folder: Path) -> None:
        save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        write_adapter_config(lora, model.adapted, source, folder, scored=scored)

    return write_export(folder, write, card)
