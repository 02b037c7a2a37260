"""Megatron-Core as what runs the trained models: train.backend = megatron."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tandem.choices import Trainer
from tandem.config.parallel import Parallel
from tandem.config.schema import Config
from tandem.runtime.errors import UserError

if TYPE_CHECKING:
    from tandem.model.config_file import HeadKind
    from tandem.trainer.parallel.mesh import Mesh
    from tandem.trainer.parallel.processes import Processes
    from tandem.trainer.ranks import Ranks


class Megatron(Trainer):
    """Its log-probs differ from the engine's by rounding, and one process is a mesh already."""

    gap = "train.backend = megatron"
    runs_alone = False

    def conflicts(self, config: Config) -> Iterator[str]:
        parallel = config.parallel
        if config.train.optimizer == "adamw_8bit":
            yield "train.optimizer: adamw_8bit does not step the parts of train.backend=megatron"
        if config.rl.estimator.needs_critic:
            yield (
                f"rl.advantage: {config.rl.advantage} has a critic, which train.backend=megatron "
                "does not train"
            )
        if parallel.context > 1 and parallel.expert > 1:
            yield (
                "parallel.context: with train.backend=megatron it needs parallel.expert=1; "
                "Megatron counts their processes in another order"
            )
        if parallel.expert > 1 and parallel.tensor > 1:
            yield (
                "parallel.expert: with train.backend=megatron it needs parallel.tensor=1; "
                "Megatron wants sequence parallelism beside both"
            )

    def check(self, config: Config) -> None:
        from tandem.plugins.megatron.core import require_megatron

        require_megatron()

    def check_model(self, config: Config, shape: Any, key: str, head: str) -> None:
        check_megatron(shape, config.parallel, "value" if head == "value" else "tokens")

    def make_ranks(self, mesh: "Mesh", processes: "Processes") -> "Ranks":
        from tandem.plugins.megatron.model import MegatronRanks

        return MegatronRanks(mesh, processes)


def check_megatron(shape: Any, parallel: Parallel, head: "HeadKind" = "tokens") -> None:
    """Raise UserError for a model of this transformers config that Megatron does not train."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = shape.rope_parameters["rope_type"]
    reasons = [
        (head == "value", "a value or reward model"),
        (getattr(shape, "attention_bias", False), "a bias in attention_bias"),
        (
            shape.model_type == "qwen3_moe" and parallel.tensor > 1,
            "experts with parallel.tensor > 1 (without sequence parallelism Megatron refuses)",
        ),
        (
            shape.num_hidden_layers % parallel.pipeline > 0,
            f"{shape.num_hidden_layers} layers in {parallel.pipeline} equal stages",
        ),
        (
            (kind != "default" and float(ROPE_INIT_FUNCTIONS[kind](shape, "cpu")[1]) != 1.0),
            "a rotary embedding that scales attention (yarn)",
        ),
    ]
    if found := [reason for wrong, reason in reasons if wrong]:
        raise UserError(
            "Megatron does not train this model",
            where="train.backend = megatron",
            found="; ".join(found),
            expected="Llama, Mistral, Qwen2, Qwen3 or Qwen3-MoE with all weights trained",
            next="train.backend=tandem",
        )
