"""vLLM as a choice of what samples: its conflicts, its parity, and its rollout workers."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from tandem.choices import RolloutBackend
from tandem.config.schema import Config
from tandem.plugins.vllm import WHERE
from tandem.runtime.errors import UserError
from tandem.types import ParityCheck

if TYPE_CHECKING:
    from tandem.engine.engine import Engine
    from tandem.engine.sync_check import Probe
    from tandem.jobs.rollouts import Rollouts, RolloutStage

# vLLM's engine arguments that a run decides, and by what
DECIDED = {
    "model": "model.path",
    "dtype": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
    "tokenizer": "model.path",
    "hf_overrides": "model.path",
    "pipeline_parallel_size": "rollout.workers",
    "data_parallel_size": "rollout.workers",
    "max_num_batched_tokens": "the longest prompt",
    "enable_chunked_prefill": "the device",
    "max_model_len": "data.max_prompt_tokens and rollout.max_new_tokens",
    "max_num_seqs": "rollout.max_batch",
    "kv_cache_memory_bytes": "rollout.cache_mb",
    "enable_sleep_mode": "rollout.release_cache",
    "load_format": "the trainer sends all weights",
    "weight_transfer_config": "weights.transport",
    "logprobs_mode": "a correction needs those of what was sampled from",
    "generation_config": "rollout.temperature and the others",
    "distributed_executor_backend": "one process a rank",
    "worker_extension_cls": "the way of the weights",
}


class VLLM(RolloutBackend):
    """vLLM's engine."""

    gap = WHERE
    shares_files = False

    def conflicts(self, config: Config) -> Iterator[str]:
        """Yield the settings that vLLM defines otherwise; the others mean the same there."""
        rollout = config.rollout
        if not rollout.workers:
            yield ("rollout.workers: vLLM runs in rollout processes, so it needs at least 1")
        if rollout.release_cache is True and rollout.staleness:
            yield (
                "rollout.release_cache: with rollout.staleness vLLM rolls out other steps while a "
                "step is trained, and cannot sleep"
            )
        if not 0.01 <= rollout.temperature <= 2:
            yield (
                "rollout.temperature: vLLM raises lower ones to 0.01 and refuses those above 2, so "
                "it needs one between"
            )
        if rollout.min_p and rollout.top_p < 1:
            yield (
                "rollout.min_p: vLLM filters by it before top-p and Tandem after, so with "
                "rollout.top_p < 1 the log-probs would be of another distribution"
            )
        if decided := sorted(DECIDED.keys() & rollout.vllm.keys()):
            instead = ", ".join(f"{name} ({DECIDED[name]})" for name in decided)
            yield f"rollout.vllm: decided by Tandem's own keys: {instead}"
        if config.weights.delta:
            yield "weights.delta: vLLM loads all tensors at once"

    def rests(self, config: Config) -> bool:
        """Tell so only where it is asked for: vLLM then sleeps, its weights too."""
        return config.rollout.release_cache is True

    def check(self, config: Config) -> None:
        from tandem.jobs.models import placement
        from tandem.plugins.vllm.worker import find_python

        if self.rests(config) and placement(config).device.type == "cpu":
            raise UserError(
                "vLLM does not sleep on a CPU",
                where="rollout.release_cache",
                found=f"true, with {WHERE} on a CPU",
                next="rollout.release_cache=auto",
            )
        find_python()

    def check_model(self, config: Config, shape: Any, key: str, head: str) -> None:
        from tandem.model.config_file import is_text_part

        if key == "model.path" and is_text_part(config.model.path, shape):
            raise UserError(
                "vLLM would load all parts of this model, and get the weights of its language "
                "model",
                where=f"model.path = {config.model.path}",
                found=f"{shape.model_type}, beside parts that read images or sound",
                next="take Tandem's engine; what `tandem export` writes is a model of text",
            )

    def parity(self, config: Config, exact: bool, inexact: str) -> ParityCheck:
        from tandem.trainer.parity import MeasuredGap

        return MeasuredGap(config, self.where(config))

    @contextmanager
    def open(self, stage: "RolloutStage") -> Iterator["Rollouts"]:
        from tandem.jobs.worker_rollouts import open_workers
        from tandem.plugins.vllm.worker import command

        probe = partial(_probe, stage.config, stage.engine)
        with open_workers(stage, command=command(), probe=probe) as rollouts:
            yield rollouts


def _probe(config: Config, engine: "Engine") -> "Probe":
    """Score what vLLM compares itself with after a sync, by the weights in use."""
    from tandem.engine.sync_check import make_probe
    from tandem.trainer.parity import gap_limit

    model, limit = engine.model, gap_limit(config, engine.model.dtype)
    return make_probe(engine.score, model.config.vocab_size, engine.longest, limit)
