"""Megatron-Core's GPTModel, built from a Hugging Face config. The one file that imports Megatron.

Layers are those of Megatron's local specification, which needs neither Transformer Engine nor Apex.
Its attention is replaced by Tandem's packed attention: Megatron's own, without Transformer Engine,
takes no packed sequences, and none of its kernels knows a prefix that several sequences share.
"""

import warnings
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tandem.config.parallel import Parallel
from tandem.model.attention import Plan, Scoring
from tandem.model.config_file import head_size, window_of
from tandem.runtime.errors import UserError, not_installed
from tandem.trainer.parallel.mesh import Mesh


class PackedAttention(nn.Module):
    """Tandem's packed attention in the place of Megatron's `core_attention`. Megatron hands the
    plan through its layers as their `attention_bias`, which it gives a recomputation too."""

    def __init__(self, config: Any, layer_number: int, **_: Any):
        super().__init__()
        self.number = layer_number - 1
        self.scale: float = config.kv_channels**-0.5
        self.window: int | None = None  # `build` sets it

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, attention_bias: Plan, **__: Any
    ) -> Tensor:
        """Attend: query [T, 1, H, E], key and value [T, 1, K, E] to [T, 1, H * E]."""
        q, k, v = query[:, 0], key[:, 0], value[:, 0]
        out = attention_bias.attend(self.number, q, k, v, Scoring(self.scale, self.window))
        return out.reshape(len(out), 1, -1)


def require_megatron() -> None:
    """Raise UserError if Megatron-Core is not installed, or has no GPU."""
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        where, instead = "train.backend = megatron", "train.backend=tandem"
        raise not_installed("megatron-core", "megatron", where=where, instead=instead)
    try:
        torch.cuda.current_device()  # it asks so for the place of its weights and messages
    except (AssertionError, RuntimeError) as error:
        raise UserError(
            "Megatron-Core has no GPU to run on",
            where="train.backend = megatron",
            found=str(error),
            next="train.backend=tandem, which runs on a CPU too",
        ) from None


def start(parallel: Parallel) -> None:
    """Make Megatron's process groups, of the same processes as those of Tandem's mesh: both count
    tensor, expert, data and pipeline from the inside out. Megatron knows nothing of a context: the
    rows are divided before they come to its layers, and it takes those processes for data's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Apex and Transformer Engine are not needed
        from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            expert_model_parallel_size=parallel.expert,
            expert_tensor_parallel_size=1,
            create_gloo_process_groups=False,
        )


def build(config: Any, mesh: Mesh, dtype: torch.dtype, recompute: bool) -> Any:
    """Build this process's part of a GPTModel, with weights to be filled. config: of transformers;
    recompute: keep only the inputs of layers for the backward pass."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    parallel, pipeline = mesh.config, mesh.group("pipeline")
    settings = _settings(config, parallel, mesh.device, dtype, recompute)
    spec = get_gpt_layer_local_spec(
        num_experts=settings.num_moe_experts,
        qk_layernorm=settings.qk_layernorm,
        normalization="RMSNorm",
    )
    spec.submodules.self_attention.submodules.core_attention = PackedAttention
    module = GPTModel(
        config=settings,
        transformer_layer_spec=spec,
        vocab_size=padded_vocabulary(config, parallel),
        max_sequence_length=config.max_position_embeddings,
        # in stages of a pipeline each has its own, and Tandem keeps them equal
        share_embeddings_and_output_weights=config.tie_word_embeddings and pipeline.size == 1,
        pre_process=pipeline.rank == 0,
        post_process=pipeline.rank == pipeline.size - 1,
        position_embedding_type="rope",
    )
    module.to(mesh.device).train()
    for part in module.modules():
        if isinstance(part, PackedAttention):
            part.window = window_of(config, part.number)
    return module


def padded_vocabulary(config: Any, parallel: Parallel) -> int:
    """Return the rows of embedding and head: tensor parallelism divides them evenly."""
    return int(config.vocab_size + -config.vocab_size % parallel.tensor)


def _require_router() -> None:
    """Raise UserError for a Megatron whose router of experts needs what is not installed."""
    from megatron.core import __version__

    if version(__version__) < (0, 19) and find_spec("transformer_engine") is None:
        raise UserError(
            "this Megatron-Core has no router of experts without Transformer Engine",
            where="train.backend = megatron",
            found=f"megatron-core {__version__}",
            expected="megatron-core 0.19 or newer, or Transformer Engine",
        )


def version(text: str) -> tuple[int, int]:
    """Return the first two numbers of a version. Example: "0.16.1" -> (0, 16)"""
    major, minor, *_ = text.split(".")
    return int(major), int(minor)


def _settings(
    config: Any, parallel: Parallel, device: torch.device, dtype: torch.dtype, recompute: bool
) -> Any:
    """Translate a Hugging Face config and the mesh into a TransformerConfig."""
    from megatron.core.transformer import TransformerConfig

    kind, sizes = config.model_type, dict[str, Any]()
    if kind == "qwen3_moe":
        _require_router()
        sizes = {
            "num_moe_experts": config.num_experts,
            "moe_ffn_hidden_size": config.moe_intermediate_size,
            "moe_router_topk": config.num_experts_per_tok,
            "moe_router_pre_softmax": not config.norm_topk_prob,
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
            "moe_token_dispatcher_type": "alltoall",
        }
    if recompute:
        sizes |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=head_size(config),
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        qk_layernorm=kind in ("qwen3", "qwen3_moe"),
        add_bias_linear=False,
        add_qkv_bias=kind == "qwen2",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1,
        use_cpu_initialization=device.type == "cpu",
        perform_initialization=False,
        **sizes,
    )
