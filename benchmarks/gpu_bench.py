"""The place of a GPU benchmark, its models of random weights and its clock."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from tandem.jobs.engines import choose_matmul
from tandem.model.load import ExactModel, make_exact
from tandem.model.placement import Placement
from tandem.model.tiny import make_tokenizer
from tandem.trainer.optimizer import Optimizer, Settings

REPEATS = 5
# Qwen3's shapes, from their config.json on the hub: no weights are needed for speed.
SHAPES: dict[str, dict[str, int]] = {
    "Qwen3-0.6B": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "intermediate_size": 3072,
    },
    "Qwen3-1.7B": {
        "hidden_size": 2048,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "intermediate_size": 6144,
    },
    "Qwen3-4B": {
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "intermediate_size": 9728,
    },
}
COMMON = {
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}
TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
}


@dataclass(frozen=True)
class Bench:
    """The device and the type of the weights, and whether everything is tiny: a trial of the
    benchmark itself."""

    place: Placement
    tiny: bool = False

    def size(self, full: int, tiny: int) -> int:
        return tiny if self.tiny else full

    @property
    def repeats(self) -> int:
        return self.size(REPEATS, 1)

    def config(self, name: str) -> Qwen3Config:
        shape = TINY if self.tiny else SHAPES[name] | COMMON
        return Qwen3Config(**shape, tie_word_embeddings=True, rope_theta=1e6)

    def model(self, name: str) -> ExactModel:
        """A model of random weights; the last one is kept."""
        return _model(self, name)

    def save_model(self, name: str, folder: Path) -> int:
        """Write a model of random weights, and a tokenizer, as a Hugging Face directory; return the
        number of its parameters."""
        module = stock_model(self, name, "eager")
        module.save_pretrained(folder)
        make_tokenizer(self.config(name).max_position_embeddings).save_pretrained(folder)
        return sum(parameter.numel() for parameter in module.parameters())

    def seconds(self, function: Callable[[], object]) -> float:
        """Median seconds of a call after one to warm up."""
        function()
        return statistics.median(self.once(function) for _ in range(self.repeats))

    def once(self, function: Callable[[], object]) -> float:
        self.synchronize()
        start = time.perf_counter()
        function()
        self.synchronize()
        return time.perf_counter() - start

    def synchronize(self) -> None:
        """Wait for the device; a CPU has nothing under way."""
        if self.place.device.type == "cuda":
            torch.cuda.synchronize(self.place.device)

    def free_bytes(self) -> int:
        """Free memory of the device; of a CPU a little, for a trial."""
        if self.place.device.type != "cuda":
            return 1 << 27
        return torch.cuda.mem_get_info(self.place.device)[0]

    def cache_mb(self, parameters: int) -> int:
        """Choose a cache for the rollouts of a trained model of so many parameters: most of what
        its weights, masters and moments leave. The cache gives way to the updates."""
        masters = 0 if self.place.dtype == torch.float32 else 4
        state = parameters * (self.place.dtype.itemsize + masters + 8)
        return max(64, int(0.8 * (self.free_bytes() - state)) >> 20)

    def peak_bytes(self, function: Callable[[], object]) -> int | None:
        """Most bytes of the device that tensors held at once; None on a CPU, which does not count
        them."""
        if self.place.device.type != "cuda":
            function()
            return None
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.place.device)
        function()
        return torch.cuda.max_memory_allocated(self.place.device)


@lru_cache(maxsize=1)
def _model(bench: Bench, name: str) -> ExactModel:
    model = make_exact(stock_model(bench, name, "eager"))
    if bench.place.device.type == "cuda":  # as every command does
        choose_matmul(model, 0, print)
    return model


def stock_model(bench: Bench, name: str, attention: str) -> Any:
    torch.manual_seed(0)
    with bench.place.device:
        return AutoModelForCausalLM.from_config(
            bench.config(name), dtype=bench.place.dtype, attn_implementation=attention
        ).eval()


def forget_models() -> None:
    """Give the memory of the last model back."""
    _model.cache_clear()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def optimizer_of(model: ExactModel) -> Optimizer:
    return Optimizer(model.trainable(), Settings(learning_rate=1e-6, total_steps=100))


def parameters(model: ExactModel) -> int:
    """Parameters, a tied head counted once."""
    return sum(p.numel() for p in model.module.parameters())


@cache
def copy_bandwidth(bench: Bench) -> float:
    """Bytes a second, read and written, of a copy within the device's memory."""
    source = torch.zeros(bench.size(1 << 30, 1 << 16), dtype=torch.uint8, device=bench.place.device)
    target = torch.empty_like(source)
    return 2 * len(source) / bench.seconds(lambda: target.copy_(source))


@cache
def matmul_flops(bench: Bench) -> float:
    """FLOPs a second of torch's own product of two square matrices of the weights' type."""
    n = bench.size(8192, 64)
    a, b = (torch.randn(n, n, dtype=bench.place.dtype, device=bench.place.device) for _ in range(2))
    return 2 * n**3 / bench.seconds(lambda: a @ b)
