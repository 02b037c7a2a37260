"""The learning rate that "auto" stands for. A run's config.toml has the number."""

from tandem.model.config_file import check_model
from tandem.runtime.errors import UserError

POWERS = {"llama": 0.781, "qwen": 0.0775}  # by the family that a model type begins with


def auto_learning_rate(path: str, *, adapters: bool) -> float:
    """Compute a peak rate of AdamW for the model at path, to three digits:

        5e-5 * (10 with adapters, else 1) * (2000 / hidden size) ** POWERS[family]

    It is `get_lr` of tinker-cookbook 0.6.1, fitted to supervised sweeps of Llama and Qwen. The ten
    is of "LoRA Without Regret" (Thinking Machines 2025), which finds it for RL too. A model of some
    million parameters wants far more (results/lora_regret.md). Raises UserError for a model of
    another family, or that is not there.
    """
    text = check_model(path).get_text_config()
    family = next((name for name in POWERS if text.model_type.startswith(name)), "")
    if not family:
        raise UserError(
            "no learning rate is known for this architecture",
            where=f'learning_rate = "auto"; model.path = {path}',
            found=text.model_type,
            expected=f"one of {', '.join(POWERS)}",
            next="write a number; with adapters about ten times that of full training",
        )
    rate = 5e-5 * (10 if adapters else 1) * (2000 / text.hidden_size) ** POWERS[family]
    return float(f"{rate:.3g}")
