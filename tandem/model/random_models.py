"""Random models of a config's shapes."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights

from tandem.model.custom_code import from_config

VOCABULARY = 512


def random_module(
    config: Any, seed: int, dtype: torch.dtype = torch.float32, device: Any = "cpu"
) -> Any:
    """Make transformers' module of a config with random weights."""
    config.vocab_size = VOCABULARY
    if getattr(config, "vocab_size_per_layer_input", None):  # of embeddings of each layer
        config.vocab_size_per_layer_input = VOCABULARY
    if config.pad_token_id is not None:
        config.pad_token_id = 0  # among the few tokens
    noise = torch.Generator().manual_seed(seed)
    with no_init_weights():
        options = {"dtype": dtype, "experts_implementation": "eager"}
        module = from_config(AutoModelForCausalLM, config, **options).to(device)
    module.tie_weights()
    for weight in module.parameters():
        spread = torch.randn(weight.shape, generator=noise)
        weight.data.copy_(
            1.0 + 0.1 * spread if weight.dim() <= 1 else spread / weight.shape[-1] ** 0.5
        )
    for part in module.modules():
        norm = getattr(getattr(part, "q_norm", None), "weight", None)
        if norm is not None and getattr(part, "scaling", 0.0) == 1.0:
            # trained norms hold the scale; without one rounding grows from layer to layer
            norm.data.mul_(norm.shape[-1] ** -0.5)
    return module.eval()
