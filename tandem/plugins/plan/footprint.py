"""Memory and disk that a run needs, by arithmetic over the shapes of its models: one process, or
rank 0 of a mesh and the ranks beside it.

No weights are loaded. Microbatches and the cache count as large as they may become. Passing tensors
of a step come on top; on the CPU `rows_here` has them, with Python and other processes, for as many
tokens as a step has if all completions are as long as they may become. results/scaling.md has the
formulas of meshes in words, with their checks against published numbers, results/plan_accuracy.md
compares plans with runs. What a user's reward function or environment holds is not known.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tandem.choices import trainer_of, transport_of
from tandem.config.parallel import Parallel
from tandem.config.schema import Config
from tandem.engine.page_cache import page_bytes
from tandem.jobs.inputs import Count
from tandem.jobs.models import adapter_of, placement, releases_cache
from tandem.model.config_file import check_model, has_experts, head_size, inner_size, kv_heads_of
from tandem.model.kernels import kernels_of
from tandem.model.load import empty_model
from tandem.model.logprobs import CHUNK_BYTES
from tandem.model.lora import add_adapter
from tandem.model.onednn import pack_bytes
from tandem.model.paged_attention import PAGE
from tandem.model.placement import Placement
from tandem.model.quantized import quantized_bytes
from tandem.plugins.plan.shards import FLOAT32, Model, Work, activation_bytes, largest_layer, memory
from tandem.registry import find
from tandem.run_folder.metrics import peak_rss_mb
from tandem.runtime.disk import human_bytes
from tandem.runtime.errors import UserError
from tandem.runtime.place import here

Need = tuple[str, int, str]  # what, bytes, how
COPY, CACHE = "whole weights of rank 0", "key/value cache"
OF_RANK_0 = {COPY, CACHE, "model", "packed weights of rank 0"}
HOW = {  # rows of one process are computed
    "weights": "of engine and trainer, in model.dtype (lora.base)",
    "packed weights": "the same in the order of the kernels",
    "adapters": "(inputs + outputs) x lora.rank per linear",
    "masters": "float32, 4 bytes x trained parameters",
    "Adam moments": "8 bytes x what AdamW steps; 2 of adamw_8bit",
    "Muon momentum": "4 bytes x parameters of the layers' matrices",
    "optimizer's share": "a bucket; the others are in host memory",
    "gradients": "4 bytes x trained parameters",
    CACHE: "at most rollout.cache_mb (rollout.release_cache)",
    "critic": "weights, packs, gradients and moments of its own",
    "reference": "weights and packs; beside adapters packs alone",
    "a save under way": "a copy of weights and moments",
}
NAMED = 3  # settings of the advice to a run out of memory
# it sums gradients in another order, so a run that is under way keeps its value
CHANGES_BITS = "train.tokens_per_microbatch"


# ---------------------------------------------------------------- the models


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The models of a run, and their device and type."""

    place: Placement  # of all models
    policy: Model
    others: Mapping[str, Model] = field(default_factory=dict)  # by config key

    @property
    def on_gpu(self) -> bool:
        return self.place.device.type != "cpu"

    @property
    def packed(self) -> int:
        """Bytes of a parameter in a pack of weights; a GPU has none."""
        return 0 if self.on_gpu else pack_bytes(self.place.dtype)

    @property
    def trained(self) -> list[Model]:
        """The policy, and the critic if there is one."""
        critic = self.others.get("critic.path")
        return [self.policy] if critic is None else [self.policy, critic]

    @property
    def checkpoint(self) -> int:
        """Bytes of all trained weights and their moments."""
        return sum(FLOAT32 * model.trained + model.moments for model in self.trained)


def model_sizes(config: Config, command: str) -> Sizes:
    """Count parameters on the meta device: shapes without storage. Raises UserError for adapters'
    targets that are not there."""
    paths = {
        "model.reference": (config.model.reference or config.model.path)
        * (command == "dpo" or (command == "train" and config.rl.kl_coef > 0)),
        "critic.path": (config.critic.path or config.model.path)
        * (command == "train" and config.rl.estimator.needs_critic),
        "distill.teacher": config.distill.teacher * (command == "distill"),
        "reward.model": config.reward.model * (command != "rm"),
    }
    return Sizes(
        place=placement(config),
        policy=_model(config.model.path, config),
        others={
            key: _model(path, config, trained=key == "critic.path")
            for key, path in paths.items()
            if path
        },
    )


def _model(path: str, config: Config, *, trained: bool = True) -> Model:
    """Count a model. trained: with adapters, moments and a base of fewer bits, as the config has
    them."""
    module = empty_model(path, check_model(path, head="value"))
    weights = dict(module.named_parameters())
    shape, count = module.config.get_text_config(), sum(w.numel() for w in weights.values())
    if not trained:
        return Model(shape=shape, count=count)
    optimizer = find("optimizers", config.train.optimizer, key="train.optimizer")
    lora, steps = config.lora, [weight.shape for weight in weights.values()]
    saved_in_base, width = 0, placement(config).dtype.itemsize
    if lora.base != "float":  # of the linears of the layers
        linears = [m for m in module.base_model.modules() if isinstance(m, torch.nn.Linear)]
        for weight in (linear.weight for linear in linears):
            saved_in_base += width * weight.numel() - quantized_bytes(weight, lora.base)
    if (adapter := adapter_of(config)) is not None:
        add_adapter(module, adapter)
        steps = [w.shape for name, w in module.named_parameters() if ".lora_" in name]
    return Model(
        shape=shape,
        count=count,
        adapters=sum(step.numel() for step in steps) if lora.rank else 0,
        momentum=sum(w.numel() for name, w in weights.items() if optimizer.has_momentum(name, w)),
        saved_in_8bit=sum(8 * step.numel() - optimizer.moment_bytes(step) for step in steps),
        saved_in_base=saved_in_base,
    )


# ---------------------------------------------------------------- the run


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Memory and disk that a run of a command takes.

    longest: tokens of the longest prompt, chat or answer, which all are taken to have.
    """

    sizes: Sizes
    config: Config
    command: str
    longest: int

    def on(self, mesh: Parallel) -> "Footprint":
        """Return that of the same run on another mesh."""
        return replace(self, config=self.config.model_copy(update={"parallel": mesh}))

    @property
    def mesh(self) -> Parallel:
        return self.config.parallel

    @property
    def work(self) -> Work:
        """The updates of a step."""
        config, rl, train, updates = self.config, self.config.rl, self.config.train, 1
        if self.samples:
            new, updates = config.rollout.max_new_tokens, rl.minibatches * rl.epochs
            room = (train.tokens_per_microbatch - self.longest) // new
            together = max(1, min(rl.group_size, room))
            episodes = rl.prompts_per_step * rl.group_size
            clusters = -(-episodes // (together * rl.minibatches))
            cluster, length = self.longest + together * new, self.longest + new
        else:
            pairs = self.command != "sft"
            clusters = (config.preference if pairs else config.sft).batch_size
            cluster, length = self.longest * (1 + pairs), self.longest
        return Work(
            model=self.sizes.policy,
            dtype=self.sizes.place.dtype,
            clusters=clusters,
            cluster=cluster,
            length=length,
            microbatch=train.tokens_per_microbatch,
            checkpointing=train.activation_checkpointing,
            offload=self.sizes.on_gpu and train.offload_optimizer,
            megatron=not trainer_of(config).runs_alone,
            updates=updates,
        )

    @property
    def samples(self) -> bool:
        """Tell whether the command plays episodes to learn from."""
        return self.command in ("train", "distill")

    @property
    def divided(self) -> bool:
        """Tell whether trainer and engine have weights of their own."""
        return self.mesh.processes > 1 or not trainer_of(self.config).runs_alone

    # ------------------------------------------------------------ memory

    def of_rank_0(self) -> dict[str, int]:
        """Return the bytes of rank 0, which besides its part of the models has the engine."""
        sizes, policy, config, mesh = self.sizes, self.sizes.policy, self.config, self.mesh
        width, divided = sizes.place.dtype.itemsize, self.divided
        rows = memory(self.work, mesh)
        whole, cache = sizes.packed * policy.count, config.rollout.cache_mb << 20
        if releases_cache(config, sizes.place):
            cache = max(0, cache - rows["gradients"] - rows["activations"])
        packs = {"packed weights of rank 0" if divided else "packed weights": whole}
        if divided and mesh.replicas == 1:  # FSDP's gathered weights keep none
            packs["packed weights"] = sizes.packed * rows["weights"] // width
        others = {CACHE: cache, COPY: width * policy.count * divided}
        if not divided:
            rows["weights"] -= policy.saved_in_base
            others["adapters"] = width * policy.adapters
        others |= self._other_models()
        if not sizes.on_gpu:
            others["a save under way"] = sizes.checkpoint // mesh.processes
        rows = {"weights": rows.pop("weights")} | packs | rows | others
        return {name: size for name, size in rows.items() if size}

    def _other_models(self) -> dict[str, int]:
        """Return the bytes of further models, which FSDP holds in float32 parts; a reward model is
        whole, on rank 0. Without adapters the policy is its own reference."""
        sizes, config, mesh, work = self.sizes, self.config, self.mesh, self.work
        width, divided = work.dtype.itemsize, self.divided
        shards = 1 if work.megatron else mesh.shard or mesh.replicas
        left = 1 / (mesh.tensor * mesh.pipeline * shards) if divided else 1.0
        frozen = FLOAT32 * left if divided else width + sizes.packed
        rows = {}
        for key, model in sizes.others.items():
            held = frozen * model.count
            if key == "reward.model" and divided:
                held = width * model.count
            elif key == "model.reference" and sizes.policy.adapters and not config.model.reference:
                # packs of the weights without adapters
                held = 0 if divided else sizes.packed * model.count
            elif key == "critic.path":
                gradients = FLOAT32 * model.trained
                masters = gradients if width < FLOAT32 and not divided else 0
                held += left * (gradients + (0 if work.offload else model.moments + masters))
                held -= 0 if divided else model.saved_in_base
            rows[_row_of(key)] = round(held)
        return rows

    def loading(self) -> int:
        """Return the most bytes of rank 0 while it loads its models: each is whole before it is
        divided, a layer of it in float32 at a time, beside those that came before."""
        policy, work, rows = self.sizes.policy, self.work, self._other_models()
        width = work.dtype.itemsize
        others = {key: model for key, model in self.sizes.others.items() if rows[_row_of(key)]}
        if not self.divided:
            return width * (policy.count + sum(model.count for model in others.values()))
        largest = width * policy.count + FLOAT32 * largest_layer(policy.shape)
        before = memory(work, self.mesh)["weights"] + width * policy.count  # the engine's copy
        for key, model in others.items():
            layer = FLOAT32 * largest_layer(model.shape)
            largest = max(largest, before + width * model.count + layer)
            before += rows[_row_of(key)]
        return largest

    def needs(self) -> list[Need]:
        """List the memory of a run: of its one process, or of its mesh on this machine; on GPUs
        that of rank 0."""
        rows, mesh = self.of_rank_0(), self.mesh
        if self.command == "rm":
            rows.pop(CACHE, None)
        if self.divided:
            count = 1 if self.sizes.on_gpu else here(os.environ, mesh.processes).local_size
            each = f"of each of {count} processes" if count > 1 else f"of rank 0, mesh {mesh.mesh}"
            found = [
                (name, size, "of rank 0 alone") if name in OF_RANK_0 else (name, count * size, each)
                for name, size in rows.items()
            ]
        else:
            found = [(name, size, self._how(name)) for name, size in rows.items()]
        return found + self._workers()

    def _workers(self) -> list[Need]:
        """List the memory of the rollout workers, if the run has some."""
        sizes, rollout, width = self.sizes, self.config.rollout, self.sizes.place.dtype.itemsize
        if not (rollout.workers and self.samples):
            return []
        count, versions = sizes.policy.count, rollout.staleness + 1
        held = rollout.workers * ((width + sizes.packed) * count + (rollout.cache_mb << 20))
        transport = transport_of(self.config)
        if transport.stages:
            held += rollout.workers * width * count  # the copy that they receive into
        text = f"{transport.memory}, {versions} versions"
        return [
            ("rollout workers", held, f"{rollout.workers} x weights, packs and rollout.cache_mb"),
            ("published weights", versions * width * count, text),
        ]

    def on_host(self) -> list[Need]:
        """List the memory that a run takes of its machine while its models are on a GPU."""
        sizes = self.sizes
        if not sizes.on_gpu:
            return []
        trained = sum(m.trained for m in sizes.trained)
        rows = {"a save under way": sizes.checkpoint}
        if self.config.train.offload_optimizer:
            masters = {"masters": 4 * trained} if sizes.place.dtype != torch.float32 else {}
            rows = masters | {"Adam moments": 8 * trained} | rows
        return [(name, size, self._how(name)) for name, size in rows.items()]

    def _how(self, name: str) -> str:
        """Say how a row of one process is computed."""
        if name != "activations":
            return HOW.get(name, "weights and packs of the frozen model")
        train = self.config.train
        other = not train.activation_checkpointing
        instead = human_bytes(self.activations(activation_checkpointing=other))
        switch = "with" if other else "without"
        return f"{train.tokens_per_microbatch:,} tokens; {instead} {switch} checkpointing"

    def activations(self, **changes: Any) -> int:
        """Return the bytes that autograd keeps of a microbatch, under these changes of [train]."""
        train = self.config.train.model_copy(update=changes)
        return activation_bytes(
            self.sizes.policy.shape,
            train.tokens_per_microbatch,
            self.sizes.place.dtype,
            checkpointing=train.activation_checkpointing,
            head=not self.sizes.policy.adapters,
        )

    # ------------------------------------------------------------ disk, and advice

    def disk(self) -> list[Need]:
        """List the disk needs of a run, besides its episodes."""
        kept = self.config.run.keep_checkpoints + self.config.eval.keep_best
        checkpoints = f"weights and moments; {kept} kept while one is written"
        export = self.sizes.place.dtype.itemsize * self.sizes.policy.count
        return [
            ("checkpoints", (kept + 1) * self.sizes.checkpoint, checkpoints),
            ("export", export, "the Hugging Face directory"),
        ]

    def savings(self) -> list[tuple[str, int]]:
        """List (setting, bytes that it saves on the device of the models), the most first."""
        train, cache_mb, found = self.config.train, self.config.rollout.cache_mb, {}
        for section, key, value in (
            ("train", "activation_checkpointing", True),
            ("train", "tokens_per_microbatch", max(16, train.tokens_per_microbatch // 2)),
            ("train", "offload_optimizer", True),
            ("rollout", "cache_mb", max(1, cache_mb // 2)),
        ):
            if key == "offload_optimizer" and not train.can_offload:
                continue
            part = getattr(self.config, section).model_copy(update={key: value})
            other = replace(self, config=self.config.model_copy(update={section: part}))
            found[f"{section}.{key}={str(value).lower()}"] = total(self) - total(other)
        return sorted((item for item in found.items() if item[1] > 0), key=lambda item: -item[1])


def _row_of(key: str) -> str:
    """Return the row of a further model, e.g. "teacher" of distill.teacher."""
    return "critic" if key == "critic.path" else key.rpartition(".")[2]


def total(footprint: Footprint) -> int:
    """Return the bytes of all that a run needs."""
    return sum(size for _, size, _ in footprint.needs())


def out_of_memory(error: Exception, config: Config, command: str) -> UserError:
    """Make the error of an allocation that failed: the settings that would save most, and how
    much."""
    sizes = model_sizes(config, command)
    run = Footprint(
        sizes=sizes, config=config, command=command, longest=config.data.max_prompt_tokens
    )
    settings = [
        f"{setting} saves {human_bytes(size)}"
        + " (in a new run.folder)" * setting.startswith(CHANGES_BITS)
        for setting, size in run.savings()[:NAMED]
    ]
    return UserError(
        "out of memory",
        where=f"{sizes.place.device}, {config.model.path}",
        found=str(error).strip().partition("\n")[0],
        expected=f"about {human_bytes(total(run))} and the passing tensors of a step (tandem plan)",
        next="nothing is lost: the same command resumes from the last checkpoint, with one of "
        + "; ".join(settings),
    )


# ---------------------------------------------------------------- what comes besides


MIB = 1 << 20
# Measured on runs (benchmarks/plan_accuracy.py), not computed: libraries and kernels that a run
# loads and compiles besides what a plan has, for all commands, for gradients, an engine, and a row
# of decode.
KERNELS, GRADIENTS, ENGINE, DECODE_ROW = 80 * MIB, 100 * MIB, 45 * MIB, 3 * MIB // 8
UNMAPPED = 100 * MIB  # of libraries, in a forked worker
WATCHDOG, FORK_SERVER, REWARD_WORKER = 34 * MIB, 39 * MIB, 27 * MIB  # chat templates with the first


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sizes of a step. Example: Batch(update=2048, sequences=64, pages=64)"""

    update: int  # tokens of an optimizer update
    sequences: int  # decoded at once
    pages: int  # of the cache


def batch_of(config: Config, command: str, counts: Mapping[str, Count]) -> Batch:
    """Return the sizes of a step, of completions that are all as long as they may become."""
    rl, rollout = config.rl, config.rollout
    if command not in ("train", "distill"):
        offline = config.sft if command == "sft" else config.preference
        of_data = counts["sft.train" if command == "sft" else "preference.train"]
        update = offline.batch_size * (1 if command == "sft" else 2) * of_data.mean
        return Batch(update=round(update), sequences=0, pages=0)
    prompt, episodes = counts["data.train"].mean, rl.prompts_per_step * rl.group_size
    update = (rl.prompts_per_step * prompt + episodes * rollout.max_new_tokens) / rl.minibatches
    longest = -(-(round(prompt) + rollout.max_new_tokens) // PAGE)
    return Batch(
        update=round(update), sequences=min(rollout.max_batch, episodes), pages=episodes * longest
    )


def rows_here(run: Footprint, batch: Batch) -> list[Need]:
    """Return the memory of a run of one process on the CPU, of as many tokens and pages as a step
    has."""
    config, workers, sizes = run.config, run.config.rollout.workers, run.sizes
    tokens = min(config.train.tokens_per_microbatch, batch.update)
    train = config.train.model_copy(update={"tokens_per_microbatch": tokens})
    run = replace(run, config=config.model_copy(update={"train": train}))
    named = {name: (size, text) for name, size, text in run.needs()}
    width = sizes.place.dtype.itemsize
    used = min(config.rollout.cache_mb * MIB, batch.pages * page_bytes(sizes.policy.shape, width))
    named["key/value cache"] = 0 if workers else used, "the pages of a step's episodes"
    if workers and run.samples:
        # they divide the episodes and their pages; one more process forks them
        each = python_bytes() - UNMAPPED + KERNELS + ENGINE
        each += (width + sizes.packed) * sizes.policy.count
        named["rollout workers"] = (
            python_bytes() + workers * each + DECODE_ROW * batch.sequences + used,
            f"{workers + 1} x Python, {workers} x weights, packs and pages",
        )
    named["passing tensors"] = passing_bytes(sizes, tokens, batch), "of a layer, and of logits"
    engine = ENGINE + DECODE_ROW * batch.sequences if batch.sequences and not workers else 0
    compiled = width == FLOAT32 and kernels_of(torch.empty(0)).fused  # multiply without oneDNN
    kernels = KERNELS + GRADIENTS * (bool(batch.update) and not compiled) + engine
    named["Python"] = python_bytes() + kernels, "libraries, data, kernels"
    rewards = FORK_SERVER + REWARD_WORKER * config.reward.workers
    helpers = WATCHDOG + (rewards if run.command != "rm" else 0)
    named["other processes"] = helpers, "fork server, reward workers"
    return [(name, size, text) for name, (size, text) in named.items() if size]


def python_bytes() -> int:
    """Return what this process holds, which has imported what a run does and has read its data."""
    return round(peak_rss_mb() * MIB)


def passing_bytes(sizes: Sizes, tokens: int, batch: Batch) -> int:
    """Return the bytes that are held for a moment: gradients of a layer's activations, a chunk of
    logits with its probabilities and slope, and a block of keys and values in decode."""
    shape, width = sizes.policy.shape, sizes.place.dtype.itemsize
    inner = inner_size(shape)
    if has_experts(shape):
        inner = shape.moe_intermediate_size * shape.num_experts_per_tok
    layer = FLOAT32 * tokens * (3 * inner + 2 * shape.hidden_size)
    logits = 3 * min(CHUNK_BYTES, FLOAT32 * tokens * shape.vocab_size)
    block = 2 * width * PAGE * kv_heads_of(shape) * head_size(shape)
    return max(layer, logits) + 2 * block * batch.sequences
