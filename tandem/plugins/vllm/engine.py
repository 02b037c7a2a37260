"""vLLM as the engine of a rollout worker. The one file that imports vllm; it runs in vLLM's
interpreter (worker.py), in one process, with the loop of worker.py around it.

    Request   token ids      --> add_request: one seed a request, n samples share a cached prompt
    step      LLMEngine.step --> new tokens and log-probs of the distribution sampled from
                                 (processed_logprobs); find_ending ends them as Tandem's engine does
    apply     weights        --> start, update and finish of vLLM's weight transfer in each
                                 tensor-parallel rank, then reset_prefix_cache
    rest      sleep          --> until apply, which wakes the weights, loads them, and then wakes
                                 the cache

Completions depend on what vLLM runs together, so the trainer measures the gap of every token
(trainer/learn.py) and the journal keeps what was sampled. Written for vLLM 0.32.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import EngineArgs, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from tandem.engine.ending import Decode, find_ending
from tandem.model import custom_code
from tandem.model.tokenizer import decode_text, load_tokenizer
from tandem.plugins.vllm import WHERE, bias
from tandem.runtime.errors import UserError
from tandem.runtime.rng import address
from tandem.types import Array, Completion, CompletionStop, Request
from tandem.weights.hashing import Digest, tensor_digests
from tandem.weights.shared import Layout, SharedWeights, read_tensors

BACKEND = "tandem"  # of vLLM's weight transfer
CPU_BLOCK = 32  # tokens of a page: prompts share whole ones, and vLLM's 128 is longer than many
PASS_TOKENS = 4096  # of one pass of the model, or more if one prompt can be longer
# how vLLM says no to a model or to weights; pydantic's errors are ValueErrors
REFUSALS = (ValueError, RuntimeError, AssertionError, LookupError, TypeError)


@dataclass
class NoInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing to agree on: memory is shared."""


@dataclass
class Mapped(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Tensors of a version, by name; for tensor-parallel ranks, which are other processes, the path
    and layout of a file that they map."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    path: str = ""
    parts: Sequence[Any] = ()

    def read(self) -> dict[str, Tensor]:
        if not self.path:
            return self.tensors
        with open(self.path, "rb") as file:
            return read_tensors(Layout.from_json(list(self.parts)), file.fileno())


class SharedMemoryTransfer(WeightTransferEngine[NoInit, Mapped]):  # type: ignore[misc]
    """vLLM's side of an update. vLLM calls init once, and the three others for each version."""

    init_info_cls, update_info_cls = NoInit, Mapped

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Do nothing."""

    def start_weight_update(self) -> None:
        """Take layers back to the form that weights come in. On a CPU vLLM pads and packs experts
        only where it makes their kernel, which is therefore made again."""
        if self.device.type == "cpu":
            for module in self.model.modules():
                if isinstance(module, RoutedExperts):
                    module.quant_method.moe_kernel = None
        before = {name for name, _ in self.model.named_parameters()}
        with torch.device(self.device):
            initialize_layerwise_reload(self.model)
        # not what quantization makes of them, as scales
        self._missing = before & {name for name, _ in self.model.named_parameters()}

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive without the base class's wait for an accelerator, which a CPU has not."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Mapped) -> None:
        self._missing -= self.model.load_weights(iter(update_info.read().items()))

    def finish_weight_update(self) -> None:
        """Build what layers compute from their weights again. Raises UserError if a parameter
        was not sent, as its old value would stay.

        A tied head is a module without weights of its own: vLLM does not process it again, and it
        would go on with the packed copy of the old ones.
        """
        finalize_layerwise_reload(self.model, self.model_config)
        for module in self.model.modules():
            if isinstance(module, VocabParallelEmbedding):
                module.quant_method.process_weights_after_loading(module)
        if names := sorted(self._missing):
            raise UserError(
                "weights came without some parameters of vLLM's model",
                where="vLLM's weight transfer",
                found=f"nothing for {len(names)} of them: {', '.join(names[:4])}",
                next="report this with config.json of the model; Tandem's engine goes on",
            )

    def shutdown(self) -> None:
        """Do nothing."""


WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryTransfer)


class RankExtension:
    """Nothing. Tensor-parallel ranks import it by name, and with it what is registered here."""


class VLLMModel:
    """The weights of a vLLM engine."""

    def __init__(self, llm: LLMEngine):
        self._llm, self.received = llm, dict[str, Tensor]()
        llm.collective_rpc("init_weight_transfer_engine", args=({},))

    def load_weights(self, tensors: dict[str, Tensor]) -> None:
        """Load tensors by name, and keep them as `received`. Raises UserError if vLLM does
        not take them; its ranks in other processes raise all errors as a RuntimeError."""
        try:
            self._llm.collective_rpc("start_weight_update")
            if self._llm.vllm_config.parallel_config.world_size == 1:
                self._llm.collective_rpc("update_weights", args=({"tensors": tensors},))
            else:
                self._send_to_ranks(tensors)
            self._llm.collective_rpc("finish_weight_update")
        except REFUSALS as error:
            raise _refused("vLLM does not take this model's weights", WHERE, error) from error
        self.received = tensors

    def _send_to_ranks(self, tensors: dict[str, Tensor]) -> None:
        """Have every rank map a copy of the tensors, and take its own part of each."""
        with closing(SharedWeights(tensors)) as shared:
            shared.publish(0, tensors)
            descriptor = shared.descriptor(0)
            update = {"path": f"/proc/{os.getpid()}/fd/{descriptor}", "parts": shared.layout.parts}
            try:
                self._llm.collective_rpc("update_weights", args=(update,))
            finally:
                os.close(descriptor)


@dataclass(eq=False, slots=True, kw_only=True)
class VLLMRequest:
    """A request on its way. `completion` is set once it has ended."""

    request: Request
    name: str  # in vLLM
    pause_at: int = 0  # tokens at which it pauses; 0: never
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    completion: Completion | None = None


class VLLMEngine:
    """vLLM's LLMEngine with the interface of engine.Engine that a worker serves."""

    def __init__(self, llm: LLMEngine, decode: Decode):
        self.model, self.weight_version = VLLMModel(llm), -1
        self._llm, self._decode = llm, decode
        self._running: dict[str, VLLMRequest] = {}
        self._submitted = 0

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    def submit(self, request: Request) -> VLLMRequest:
        """Take a request, and go on from the tokens of `resume_from` as from a longer prompt."""
        running = VLLMRequest(request=request, name=str(self._submitted))
        self._submitted += 1
        if (paused := request.resume_from) is not None:
            running.tokens, running.logprobs = paused.tokens.tolist(), paused.logprobs.tolist()
            running.weight_versions = paused.weight_versions.tolist()
        if request.max_tokens_now:
            running.pause_at = len(running.tokens) + request.max_tokens_now
        tokens = [*request.prompt.tolist(), *running.tokens]
        params = sampling(running, self._llm.vllm_config.model_config.get_vocab_size())
        self._llm.add_request(running.name, {"prompt_token_ids": tokens}, params)
        self._running[running.name] = running
        return running

    def cancel(self, running: VLLMRequest) -> None:
        """End a request now with the tokens it has, unless it has ended."""
        if running.completion is None:
            self._end(running, self._decode(np.array(running.tokens, np.int64)), "cancelled")

    def step(self) -> list[VLLMRequest]:
        """Run one step of vLLM; return the requests that got tokens, with `completion` set on those
        that ended."""
        touched = []
        for output in self._llm.step():
            running, [part] = self._running[output.request_id], output.outputs
            touched.append(running)
            for token, logprobs in zip(part.token_ids, part.logprobs, strict=True):
                running.tokens.append(token)
                running.logprobs.append(logprobs[token].logprob)
                running.weight_versions.append(self.weight_version)
                ending = find_ending(
                    running.request.params, running.tokens, running.pause_at, self._decode
                )
                if ending is not None:
                    self._end(running, *ending)
                    break
            if output.finished and running.completion is None:
                raise RuntimeError(f"vLLM ended a request too early: {part.finish_reason}")
        return touched

    def _end(self, running: VLLMRequest, text: str, reason: CompletionStop) -> None:
        del self._running[running.name]
        self._llm.abort_request([running.name])  # nothing, if vLLM has ended it too
        running.completion = Completion(
            tokens=np.array(running.tokens, np.int64),
            logprobs=np.array(running.logprobs, np.float32),
            weight_versions=np.array(running.weight_versions, np.int32),
            text=text,
            stop_reason=reason,
        )

    def apply(self, version: int, load: Callable[[], None]) -> None:
        """Switch to weights of that version. No request may be under way."""
        if asleep := self._llm.is_sleeping():
            self._llm.wake_up(tags=["weights"])
        load()
        self.weight_version = version
        if asleep:
            self._llm.wake_up(tags=["kv_cache"])
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM keeps cached keys and values of older weights")

    def rest(self) -> None:
        """Give the memory of weights and cache back until `apply`. Level 2 drops the weights, and
        level 1 would copy them to the host: every version brings all of them."""
        self._llm.sleep(level=2)

    def weight_digests(self, digest: Digest) -> dict[str, str]:
        """Return the digests of the bytes received, and let them go: that all arrived. What vLLM
        made of them shows in the gap to the trainer's log-probs."""
        received, self.model.received = self.model.received, {}
        return tensor_digests(received, digest)

    def score(self, tokens: Array) -> Array:
        """Return the log-probs of all tokens but the first, float32 nats, by the model's own
        distribution. No request may be under way."""
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        self._llm.add_request("score", {"prompt_token_ids": tokens.tolist()}, params)
        [output] = _run(self._llm)
        columns = zip(tokens[1:].tolist(), output.prompt_logprobs[1:], strict=True)
        return np.array([found[token].logprob for token, found in columns], np.float32)

    def logprob_gap(self) -> float:
        """Return NaN: these weights came without a probe, so nothing can be compared."""
        return float("nan")


def sampling(running: VLLMRequest, rows: int) -> SamplingParams:
    """Translate a request's params. Its seed is an address, so the same request in the same company
    gives the same tokens, and no other request its draws. rows: of the vocabulary."""
    request, params = running.request, running.request.params
    if params.top_logprobs or params.min_tokens or params.prompt_logprobs is not None:
        raise ValueError("top_logprobs, min_tokens and prompt_logprobs are not asked of vLLM")
    left = params.max_new_tokens - len(running.tokens)
    seed = address("vllm", request.key, request.num_sampled + len(running.tokens))
    return SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        logit_bias=bias(params.vocabulary, rows),
        stop_token_ids=list(params.stop_token_ids),
        ignore_eos=True,  # stop_token_ids has all that end a turn
        max_tokens=max(1, min(left, request.max_tokens_now or left)),
        seed=seed >> 1,  # int64
        logprobs=0,
        detokenize=False,  # find_ending looks for stop strings
        output_kind=RequestOutputKind.DELTA,
    )


@contextmanager
def _own_temporary_folder() -> Iterator[None]:
    """Keep sockets and files by which vLLM's processes meet in a folder that is removed. Ranks are
    new interpreters: they find the package `tandem` there, and nothing installed beside it."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tandem").symlink_to(Path(__file__).parents[2])
        sys.path.append(folder)
        tempfile.tempdir = os.environ["VLLM_RPC_BASE_PATH"] = folder
        try:
            yield
        finally:
            tempfile.tempdir = None
            sys.path.remove(folder)


def _run(llm: LLMEngine) -> list[Any]:
    """Run the requests to their ends; return their outputs."""
    outputs = []
    while llm.has_unfinished_requests():
        outputs += [output for output in llm.step() if output.finished]
    return outputs


def load_vllm(
    start: dict[str, Any],
    share: Callable[[dict[str, Any], int, int], float],
    backend: str = BACKEND,
) -> VLLMEngine:
    """Build the engine of a model directory, without its weights: the first version brings them.
    share: of a GPU's memory, vllm_worker.memory_share. Raises UserError if vLLM refuses it."""
    on_cpu, ranks = start["device"] == "cpu", start["tensor_parallel"]
    total = current_platform.get_device_total_memory
    tokens = max(PASS_TOKENS, start["longest"], start["max_batch"])
    several = {
        "tensor_parallel_size": ranks,
        "distributed_executor_backend": "mp",
        "worker_extension_cls": f"{__name__}.{RankExtension.__name__}",
    }
    usual = {
        "model": start["model_path"],
        "trust_remote_code": start["trust_remote_code"],
        "dtype": start["dtype"],
        "load_format": "dummy",
        **(several if ranks > 1 else {}),
        "max_model_len": start["longest"],
        "max_num_seqs": start["max_batch"],
        "kv_cache_memory_bytes": start["cache_bytes"],
        # on a CPU vLLM 0.32 cannot rewind the seed of a prompt that it has begun: none is split
        **(
            {"block_size": CPU_BLOCK, "enable_chunked_prefill": False}
            if on_cpu
            else {"gpu_memory_utilization": share(start, tokens, total())}
        ),
        "max_num_batched_tokens": tokens,
        "enable_prefix_caching": True,
        "enforce_eager": True,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # no sampling defaults of the model's
        "disable_log_stats": True,
        "enable_sleep_mode": start["release_cache"],
        "weight_transfer_config": WeightTransferConfig(backend=backend),
    }
    try:
        with _own_temporary_folder():
            llm = LLMEngine.from_engine_args(EngineArgs(**{**usual, **start["options"]}))
        # a kernel that lacks the model's shape says so at the first token only
        llm.add_request("first", {"prompt_token_ids": [0]}, SamplingParams(max_tokens=1))
        _run(llm)
    except REFUSALS as error:
        raise _refused("vLLM cannot run this model", start["model_path"], error) from error
    custom_code.allow(start["trust_remote_code"])
    tokenizer = load_tokenizer(start["model_path"])
    engine = VLLMEngine(llm, lambda tokens: decode_text(tokenizer, tokens))
    if start["release_cache"]:  # one that is started in an update gets its weights after it
        engine.rest()
    return engine


def _refused(what: str, where: str, error: Exception) -> UserError:
    first = str(error).strip().partition("\n")[0]
    return UserError(
        what,
        where=where,
        found=f"{type(error).__name__}: {first}",
        expected="an architecture and a shape of vLLM's, and room for its weights, one pass, and "
        "one sequence in rollout.cache_mb",
        next="Tandem's engine runs it if it knows its architecture",
    )
