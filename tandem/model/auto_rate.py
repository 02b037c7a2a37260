"""The learning rate that "auto" stands for. A run's config.toml has the number."""

from tandem.model.config_file import check_model
from tandem.runtime.errors import UserError

POWERS = {"llama": 0.781, "qwen": 0.0775}  # by the family that a model type begins with


def auto_learning_rate(path: str, adapters: bool, supervised: bool = True) -> float:
    """Compute a peak rate of AdamW for the model at path, to three digits:

        5e-5 * (10 with adapters, else 1) * (2000 / hidden size) ** POWERS[family]

    It is `get_lr` of tinker-cookbook 0.6.1, fitted to supervised sweeps of Llama and Qwen. The ten
    is of "LoRA Without Regret" (Thinking Machines 2025), which finds it for RL too. A model of some
    million parameters wants more (results/lora_regret.md). Raises UserError where no source goes.
    """
    text = check_model(path).get_text_config()
    family = next((name for name in POWERS if text.model_type.startswith(name)), "")
    if not (family and (adapters or supervised)):
        raise UserError(
            "no learning rate is known for this training",
            where=f'learning_rate = "auto"; model.path = {path}',
            found=f"{text.model_type}, {'adapters' if adapters else 'all weights'}",
            expected=f"adapters, or tandem sft, of {' or '.join(POWERS)}",
            next="write a number; usual are 1e-6 for all weights by RL, and 1e-5 for adapters",
        )
    rate = 5e-5 * (10 if adapters else 1) * (2000 / text.hidden_size) ** POWERS[family]
    return float(f"{rate:.3g}")
