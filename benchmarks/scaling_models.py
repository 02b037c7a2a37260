"""Shapes of public models, from their config.json on the hub; no weights are needed."""

from typing import Any

from transformers import LlamaConfig, Qwen3Config, Qwen3MoeConfig

from tandem.plugins.plan.shards import Model, parameters


def model_of(shape: Any) -> Model:
    """Count a model that is trained whole, by AdamW."""
    return Model(shape=shape, count=parameters(shape))


def _qwen3(hidden: int, layers: int, heads: int, inner: int, tied: bool = False) -> Qwen3Config:
    return Qwen3Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=inner,
        vocab_size=151936,
        tie_word_embeddings=tied,
    )


def _llama(hidden: int, layers: int, heads: int, keys: int, inner: int, vocabulary: int) -> Any:
    return LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        intermediate_size=inner,
        vocab_size=vocabulary,
        tie_word_embeddings=False,
    )


QWEN3 = {
    "Qwen3-0.6B": _qwen3(1024, 28, 16, 3072, tied=True),
    "Qwen3-8B": _qwen3(4096, 36, 32, 12288),
    "Qwen3-32B": _qwen3(5120, 64, 64, 25600),
    "Qwen3-30B-A3B": Qwen3MoeConfig(
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        vocab_size=151936,
        tie_word_embeddings=False,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
}
# billions, as on the models' pages
PUBLISHED = {"Qwen3-0.6B": 0.6, "Qwen3-8B": 8.2, "Qwen3-32B": 32.8, "Qwen3-30B-A3B": 30.5}
OTHERS = {
    "Qwen3-1.7B": _qwen3(2048, 28, 16, 6144, tied=True),
    "Qwen3-4B": _qwen3(2560, 36, 32, 9728, tied=True),
    "Llama-3.1-8B": _llama(4096, 32, 32, 8, 14336, 128256),
    "Llama-3.1-70B": _llama(8192, 80, 64, 8, 28672, 128256),
    "Llama-3.1-405B": _llama(16384, 126, 128, 8, 53248, 128256),
}
