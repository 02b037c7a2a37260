"""LoRA adapters (Hu et al. 2021, arXiv 2106.09685): PEFT creates them and names what is on the
disk, Tandem runs them.

A PEFT layer lives only between `add_adapter` and `make_exact`, which takes its parameters over
(`exact_adapted`). This is the only file that knows PEFT, and it imports it when an adapter is first
wanted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tandem.model.linear import ExactLinear
from tandem.runtime.errors import UserError

ALL_LINEAR = "all-linear"
_ADAPTER = "default"  # PEFT's name for the only one there is


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Each target's weight becomes W + alpha / rank * B @ A; A is drawn from seed, B starts at
    zero, W is frozen.

    Targets are names of linear modules or ends of them, or "all-linear": every linear of the
    layers. Example: Lora(rank=16, alpha=32.0, targets=("q_proj", "v_proj"), seed=0)
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    seed: int


def add_adapter(module: Any, lora: Lora) -> None:
    """Let PEFT put its layers into a stock transformers module, in place; afterwards only they, and
    a `score`, are trained.

    The same seed gives the same bits, and no other random number is touched. Raises UserError for a
    target that is not there.
    """
    peft = require_peft()
    there = _linear_names(module)
    _check_targets(lora.targets, there)
    config = _config(peft, lora, there)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(lora.seed)
        peft.inject_adapter_in_model(config, module)
    if module.get_output_embeddings() is None:
        module.score.requires_grad_(True)  # a new head has nothing to start from


def exact_adapted(layer: Any) -> ExactLinear:
    """PEFT's lora Linear, with the one adapter that `add_adapter` made, as ours; it takes over the
    parameters."""
    base, lora_a, lora_b = layer.base_layer, layer.lora_A[_ADAPTER], layer.lora_B[_ADAPTER]
    return ExactLinear(base.weight, base.bias, lora_a, lora_b, layer.scaling[_ADAPTER])


def _check_targets(targets: Sequence[str], there: Sequence[str]) -> None:
    unknown = [target for target in targets if target != ALL_LINEAR and not _ends_of(there, target)]
    if unknown or not targets:
        raise UserError(
            "LoRA targets are not in this model",
            where="lora.targets",
            found=", ".join(unknown) or "none",
            expected=f"{ALL_LINEAR}, or some of its linear modules: {', '.join(_last_names(there))}",
        )


def chosen_linears(module: Any, targets: Sequence[str]) -> list[nn.Linear]:
    """The linears of a stock transformers module that the targets name. Raises UserError for a
    target that is not there."""
    named = dict(module.named_modules())
    there = _linear_names(module)
    _check_targets(targets, there)
    names = (
        there
        if ALL_LINEAR in targets
        else [name for target in targets for name in _ends_of(there, target)]
    )
    return [named[name] for name in dict.fromkeys(names)]


def _ends_of(names: Sequence[str], target: str) -> list[str]:
    """The names that PEFT takes target for."""
    return [name for name in names if name == target or name.endswith(f".{target}")]


def _last_names(names: Sequence[str]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in names})


def _linear_names(module: Any) -> list[str]:
    """Every linear of the layers; heads are not among them.

    In a mixture of experts PEFT takes the names of a dense layer's MLP for those of the experts,
    which are no linear modules: only attention has some.
    """
    sparse = module.config.model_type == "qwen3_moe"
    return [
        f"model.{name}"
        for name, child in module.model.named_modules()
        if isinstance(child, nn.Linear) and not (sparse and ".mlp." in name)
    ]


def write_adapter_config(
    lora: Lora, adapted: Sequence[str], source: str, folder: Path, *, scored: bool
) -> None:
    """adapter_config.json in PEFT's format.

    adapted are the names of the linears with an adapter, source is the base model, scored says that
    a `score` was trained beside it.
    """
    config = _config(require_peft(), lora, adapted)
    config.base_model_name_or_path, config.inference_mode = source, True
    if scored:
        config.task_type, config.modules_to_save = "SEQ_CLS", ["score"]
    # PEFT keeps a set, whose order changes from process to process
    config.target_modules = sorted(config.target_modules)
    config.save_pretrained(folder)


def _config(peft: Any, lora: Lora, linears: Sequence[str]) -> Any:
    """PEFT's config; "all-linear" is spelt out, because PEFT's own would take experts and routers
    in."""
    targets = _last_names(linears) if ALL_LINEAR in lora.targets else list(lora.targets)
    return peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=targets,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )


def require_peft() -> Any:
    """The package; raises UserError where it is not installed."""
    try:
        import peft
    except ImportError:
        raise UserError(
            "LoRA needs the package peft, which is not installed",
            where="lora",
            expected="peft beside transformers",
            next="pip install 'tandem-rl[lora]'",
        ) from None
    return peft
