"""LoRA adapters (Hu et al. 2021, arXiv 2106.09685): made and saved with PEFT, run by Tandem.

A PEFT layer exists only from `add_adapter` until `exact_adapted` replaces it. No other file knows
PEFT. It is imported for the first adapter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from tandem.model.linear import ExactConv1D, ExactLinear, is_conv1d
from tandem.model.quantized import Base, QuantizedWeight, quantize
from tandem.runtime.errors import UserError, not_installed

ALL_LINEAR = "all-linear"
# begins the names of a language model that a vision tower stands beside, with names alike
BESIDE_VISION = ("language_model.", "text_model.")
_ADAPTER = "default"  # PEFT's name for the only one there is


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """An adapter: each target's weight becomes W + alpha / rank * B @ A.

    A is drawn from seed, B starts at zero, W is frozen. Targets are names of linear modules or ends
    of such names, or "all-linear": every linear of the layers.
    base: what W is kept in, "float" for the type of the model.
    Example: Lora(rank=16, alpha=32.0, targets=("q_proj", "v_proj"), seed=0)
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    seed: int
    base: Literal["float"] | Base = "float"


def add_adapter(module: Any, lora: Lora) -> None:
    """Put PEFT's layers into a stock transformers module, and freeze all else but a `score`.

    The same seed gives the same bits, and no other random state changes. Raises UserError for a
    target that the module lacks.
    """
    peft = require_peft()
    linears = _linear_names(module)
    unknown = [
        target
        for target in lora.targets
        if not (linears if target == ALL_LINEAR else [n for n in linears if _named(n, [target])])
    ]
    if unknown or not lora.targets:
        known = ", ".join(_last_names(linears)) or "it has none"
        raise UserError(
            "LoRA targets are not in this model",
            where="lora.targets",
            found=", ".join(unknown) or "none",
            expected=f"{ALL_LINEAR}, or some of its linear modules: {known}",
        )
    config = _peft_config(peft, lora, linears)
    config.fan_in_fan_out = any(map(is_conv1d, module.modules()))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(lora.seed)
        try:
            peft.inject_adapter_in_model(config, module)
        except ValueError as error:  # some linears of Mamba
            raise UserError(
                "PEFT makes no adapter of these linears",
                where="lora.targets",
                found=str(error).split("\n")[0],
                expected="linears that PEFT can adapt",
                next="name others in lora.targets",
            ) from None
    if module.get_output_embeddings() is None:
        module.score.requires_grad_(True)  # a new head is always trained


def exact_adapted(layer: Any) -> ExactLinear:
    """Make an ExactLinear on the parameters of PEFT's lora Linear, as `add_adapter` made it."""
    base, lora_a, lora_b = layer.base_layer, layer.lora_A[_ADAPTER], layer.lora_B[_ADAPTER]
    kind = ExactConv1D if is_conv1d(base) else ExactLinear
    return kind(base.weight, base.bias, lora_a, lora_b, layer.scaling[_ADAPTER])


def quantize_base(module: Any, lora: Lora | None) -> None:
    """Keep the weights of all linears of an exact module's layers in the adapter's base, adapted
    or not; experts, routers, embeddings and heads stay float."""
    if lora is None or lora.base == "float":
        return
    linears = [part for part in module.base_model.modules() if type(part) is ExactLinear]
    if not linears:
        raise UserError(
            "this model has no linear whose base can be quantized",
            where=f"lora.base = {lora.base}",
            found="layers whose products are of another class, as GPT-2's Conv1D",
            expected="a model with linear modules",
            next="set lora.base=float",
        )
    for part in linears:
        part.weight = nn.Parameter(quantize(part.weight, lora.base), requires_grad=False)
    for weight in module.parameters():
        if not isinstance(weight, QuantizedWeight):
            # the file of all weights stays in memory as long as one of them is mapped from it
            weight.data = weight.data.clone()


def _named(name: str, targets: Sequence[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _last_names(names: Sequence[str]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in names})


def _linear_names(module: Any) -> list[str]:
    """List every linear of the layers, without heads and without those whose names PEFT gives to
    experts."""
    linears = [
        f"{module.base_model_prefix}.{name}"
        for name, child in module.base_model.named_modules()
        if _is_linear(child)
    ]
    if module.config.get_text_config() is not module.config:  # vision parts keep their own
        decoder = module.get_decoder()
        [own] = [name for name, part in module.named_modules() if part is decoder]
        linears = [name for name in linears if name.startswith(f"{own}.")]
    kept = {name for name in _last_names(linears) if not _is_of_experts(module, name)}
    return [name for name in linears if name.rpartition(".")[2] in kept]


def _is_linear(child: Any) -> bool:
    """Tell whether a module is a linear, and not a router of transformers' that is one too."""
    own = type(child).__module__.startswith("transformers.models.")
    return (isinstance(child, nn.Linear) and not own) or is_conv1d(child)


def _is_of_experts(module: Any, name: str) -> bool:
    """Tell whether PEFT takes the name of a linear for that of experts, which once were linear
    modules and are parameters now. A dense layer's MLP and shared experts may have it too."""
    config = require_peft().LoraConfig(target_modules=[name])
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    try:
        convert_peft_config_for_transformers(config, model=module, conversions=None)
    except ValueError:  # half of two that experts have as one
        return True
    return bool(config.target_modules != {name})


def write_adapter_config(
    lora: Lora, adapted: Mapping[str, ExactLinear], source: str, folder: Path, *, scored: bool
) -> None:
    """Write adapter_config.json in PEFT's format.

    adapted: the linears with an adapter by name; source: the base model; scored: whether a `score`
    was trained beside the adapter.
    """
    config = _peft_config(require_peft(), lora, list(adapted))
    config.fan_in_fan_out = any(isinstance(part, ExactConv1D) for part in adapted.values())
    config.base_model_name_or_path, config.inference_mode = source, True
    if scored:
        config.task_type, config.modules_to_save = "SEQ_CLS", ["score"]
    # PEFT keeps a set, which has another order in each process
    config.target_modules = sorted(config.target_modules)
    config.save_pretrained(folder)


def _peft_config(peft: Any, lora: Lora, linears: Sequence[str]) -> Any:
    """Make PEFT's config. "all-linear" is spelt out: PEFT's own includes experts and routers."""
    targets = _last_names(linears) if ALL_LINEAR in lora.targets else list(lora.targets)
    if any(name.partition(".")[2].startswith(BESIDE_VISION) for name in linears):
        targets = [n for n in linears if ALL_LINEAR in lora.targets or _named(n, lora.targets)]
    return peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=targets,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )


def require_peft() -> Any:
    """Import PEFT. Raises UserError if it is not installed."""
    try:
        import peft
    except ImportError:
        raise not_installed("peft", "lora", where="lora.rank") from None
    return peft
