"""Choices by name: one table from a kind and a name to the object behind it.

A choice is imported when it is chosen, so a run loads nothing that it does not use. A package of
anybody's adds choices by entry points, in the group `tandem.KIND`:

    [project.entry-points."tandem.trackers"]
    aim = "tandem_aim:AimTracker"

Knows no object's interface: each kind's Protocol is named beside it. Built-in names stay.

    python -c "from tandem.registry import names; print(names('trackers'))"
"""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from tandem.runtime.errors import UserError
from tandem.runtime.wording import nearest

BUILT_IN: dict[str, dict[str, str]] = {
    "model_paths": {  # model/paths.py: ModelPath; the first that has nothing against a config
        "lean": "tandem.model.lean:LEAN",
        "general": "tandem.model.trial:GENERAL",
        "inexact": "tandem.model.trial:INEXACT",
    },
    "models": {  # (config, ranks) -> trainer.batch.Models of a command that samples, on every rank
        "train": "tandem.jobs.models:build_rl_models",
        "distill": "tandem.plugins.distill.inputs:build_distill_models",
    },
    "multimodal_paths": dict.fromkeys(  # the same for types of models that also read images
        ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm", "idefics3"),
        "tandem.plugins.vision.image_model:VISION",
    ),
    # what fills chats with parts of a row: (messages, row) -> messages
    "row_parts": {"images": "tandem.plugins.vision.image_rows:with_images"},
    "tiny_models": {  # what `tandem tiny` writes
        "text": "tandem.model.tiny:make_tiny",
        "images": "tandem.plugins.vision.tiny_images:make_tiny_images",
    },
    "kernels": {  # model/kernels.py: Kernels, by the type of a device
        "cpu": "tandem.plugins.native.fused:CPU",
        "cuda": "tandem.plugins.triton.plans:TRITON",
    },
    "cpu_kernels": {  # the same for a CPU, by name
        "fused": "tandem.plugins.native.fused:CPU",
        "plain": "tandem.model.kernels:CPU",
    },
    "model_engines": {  # what samples from the models of a path: an engine.engine.Engine
        "paged": "tandem.engine.engine:Engine",
        "unpaged": "tandem.engine.inexact_engine:InexactEngine",
    },
    "commands": {  # cli/main.py: Commands; in the order of --help
        "demo": "tandem.plugins.start.demo:demo",
        "init": "tandem.plugins.start.init:init",
        "generate": "tandem.plugins.tasks.cli:generate",
        "tiny": "tandem.plugins.start.tiny:tiny",
        "try": "tandem.plugins.rollouts.cli:try_out",
        "doctor": "tandem.plugins.start.doctor:doctor",
        "rollout": "tandem.plugins.rollouts.cli:rollout",
        "eval": "tandem.plugins.commands.cli:evaluate",
        "export": "tandem.plugins.commands.cli:export",
        "replay": "tandem.plugins.audit.cli:replay",
        "status": "tandem.plugins.commands.cli:status",
        "show": "tandem.plugins.commands.cli:show",
        "why": "tandem.plugins.audit.cli:why",
        "diff": "tandem.plugins.audit.cli:diff",
        "view": "tandem.plugins.view.cli:view",
        "report": "tandem.plugins.view.cli:report",
        "plot": "tandem.plugins.view.cli:plot",
        "serve": "tandem.plugins.serve.command:command",
        "plan": "tandem.plugins.plan.cli:plan",
    },
    "engines": {  # choices.py: RolloutBackend
        "tandem": "tandem.jobs.own_choices:TandemEngine",
        "vllm": "tandem.plugins.vllm.backend:VLLM",
        "http": "tandem.plugins.servers.backend:Servers",
    },
    # what a run gives a reward besides the recipe's: config -> options
    "reward_options": {
        "code": "tandem.plugins.graders.code:code_options",
        "suite": "tandem.plugins.suites.suites:suite_options",
    },
    "envs": {  # types.py: Env
        "single_turn": "tandem.types:Env",
        "tools": "tandem.envs.tools:ToolEnv",
        "functions": "tandem.plugins.suites.bfcl:FunctionsEnv",
        "python": "tandem.plugins.graders.python_env:PythonEnv",
        "guess": "tandem.plugins.tasks.guess:GuessTheNumber",
        "gymnasium": "tandem.plugins.gymnasium:GymEnv",
        "verifiers": "tandem.plugins.agents.verifiers:VerifiersEnv",
        "agent": "tandem.plugins.agents.env:AgentEnv",
        "mcp": "tandem.plugins.mcp:McpEnv",
        "openenv": "tandem.plugins.openenv:OpenEnv",
        "harbor": "tandem.plugins.harbor:HarborEnv",
    },
    "extractors": {"answer": "tandem.plugins.graders.answer:extract"},  # text -> final answer
    "inputs": {  # jobs/inputs.py: of a command
        "train": "tandem.jobs.inputs:training_inputs",
        "distill": "tandem.plugins.distill.inputs:distill_inputs",
        "sft": "tandem.plugins.offline.inputs:sft_inputs",
        "dpo": "tandem.plugins.offline.inputs:dpo_inputs",
        "rm": "tandem.plugins.offline.inputs:rm_inputs",
    },
    "jobs": {  # (config, run folder, report) -> context of a train_loop.py: TrainJob
        "train": "tandem.jobs.rl:open_rl_job",
        "distill": "tandem.jobs.rl:open_rl_job",
        "sft": "tandem.plugins.offline.jobs:open_offline_job",
        "dpo": "tandem.plugins.offline.jobs:open_offline_job",
        "rm": "tandem.plugins.offline.jobs:open_offline_job",
    },
    "fixed_data": {  # (config, inputs, ranks) -> job of a command without rollouts, on every rank
        "sft": "tandem.plugins.offline.jobs:sft_job",
        "dpo": "tandem.plugins.offline.jobs:dpo_job",
        "rm": "tandem.plugins.offline.jobs:rm_job",
    },
    "machines": {  # jobs/here.py: Here
        "here": "tandem.jobs.here:Here",
        "ray": "tandem.plugins.cluster.job:Nodes",
    },
    "offload": {"adamw": "tandem.plugins.optim.offload:OffloadedOptimizer"},  # to host memory
    "optimizers": {  # trainer/optimizer.py: Optimizer
        "adamw": "tandem.trainer.optimizer:Optimizer",
        "adamw_8bit": "tandem.plugins.optim.adamw_8bit:Optimizer8bit",
        "muon": "tandem.plugins.optim.muon:Muon",
    },
    "resources": {"memory": "tandem.plugins.plan.footprint:out_of_memory"},  # of a run's config
    "reward_models": {  # reward.model: a check of its path; (config) -> rollout.score.RewardModel
        "check": "tandem.plugins.offline.reward_model:check_reward_model",
        "load": "tandem.plugins.offline.reward_model:load_reward_model",
    },
    "rewards": {  # rewards/load.py: functions with one of its signatures
        "answer": "tandem.plugins.graders.rewards:answer",
        "choice": "tandem.plugins.graders.rewards:choice",
        "code": "tandem.plugins.graders.code:code_reward",
        "countdown": "tandem.plugins.tasks.countdown:reward",
        "env": "tandem.rewards.builtin:env",
        "exact": "tandem.rewards.builtin:exact",
        "format": "tandem.rewards.builtin:format_of_tags",
        "json_schema": "tandem.rewards.builtin:json_schema",
        "judge": "tandem.plugins.graders.judge:judge",
        "length": "tandem.rewards.builtin:length",
        "numeric": "tandem.plugins.graders.rewards:numeric",
        "reasoning_gym": "tandem.plugins.tasks.reasoning_gym:reward",
        "regex": "tandem.rewards.builtin:regex",
        "reward_model": "tandem.rewards.builtin:reward_model",
        "suite": "tandem.plugins.suites.suites:reward",
    },
    "sandboxes": {  # the section [sandbox] -> plugins/graders/sandbox/protocol.py: Sandbox
        "bubblewrap": "tandem.plugins.graders.sandbox.local:open_bubblewrap",
        "fusion": "tandem.plugins.graders.sandbox.fusion:open_fusion",
    },
    # `tandem serve --train`: (its options, a bound socket) -> None, once it is stopped
    "training_servers": {"tinker": "tandem.plugins.tinker.server:serve"},
    "sources": {  # what `tandem generate NAME:ID` copies: (id, limit=) -> rows
        "harbor": "tandem.plugins.harbor:rows",
        "verifiers": "tandem.plugins.agents.verifiers:rows",
    },
    "streams": {  # choices.py: StreamBackend
        "memory": "tandem.jobs.own_choices:Memory",
        "transfer_queue": "tandem.plugins.cluster.stream:TransferQueue",
    },
    "tables": {  # data/readers.py: what reads rows of a Source
        "csv": "tandem.plugins.tables:csv_rows",
        "parquet": "tandem.plugins.tables:parquet_rows",
        "dataset": "tandem.plugins.tables:dataset_rows",
        "dataset_files": "tandem.plugins.tables:dataset_files",
        "suite": "tandem.plugins.suites.suites:rows",
        "suite_files": "tandem.plugins.suites.suites:files",
    },
    "tasks": {  # plugins/tasks/generate.py: Task
        "algebra": "tandem.plugins.tasks.algebra:TASK",
        "arithmetic": "tandem.plugins.tasks.arithmetic:TASK",
        "calculator": "tandem.plugins.tasks.calculator:TASK",
        "countdown": "tandem.plugins.tasks.countdown:TASK",
        "guess": "tandem.plugins.tasks.guess:TASK",
        "squares": "tandem.plugins.tasks.squares:TASK",
    },
    "tools": {"calculator": "tandem.plugins.tasks.calculator:calculator"},
    "trackers": {  # run_folder/tracking.py: Tracker
        "mlflow": "tandem.plugins.trackers.mlflow:MlflowTracker",
        "trackio": "tandem.plugins.trackers.trackio:TrackioTracker",
        "wandb": "tandem.plugins.trackers.wandb:WandbTracker",
    },
    "trainers": {  # choices.py: Trainer
        "tandem": "tandem.jobs.own_choices:TandemTrainer",
        "megatron": "tandem.plugins.megatron.trainer:Megatron",
    },
    "transports": {  # choices.py: Transport
        "shm": "tandem.weights.transports:SharedMemory",
        "cuda_ipc": "tandem.plugins.cluster.transports:CudaIpc",
        "collective": "tandem.plugins.cluster.transports:Collective",
        "rdma": "tandem.plugins.cluster.transports:Rdma",
        "ray": "tandem.plugins.cluster.transports:ObjectStore",
    },
}
# kinds whose objects stand in a table of a module that imports nothing heavy
TABLES = {
    "advantages": "tandem.rl.algorithms:ADVANTAGES",
    "algorithms": "tandem.rl.algorithms:ALGORITHMS",
    "losses": "tandem.rl.algorithms:LOSSES",
    "suites": "tandem.plugins.suites.known:SUITES",
}


def names(kind: str) -> list[str]:
    """List the names of a kind, built-in ones first."""
    own = built_in(kind)
    return [*own, *(name for name in _foreign(kind) if name not in own)]


def built_in(kind: str) -> Mapping[str, Any]:
    """Return the built-in choices of a kind by name: the objects, or "module:object"."""
    return _load(TABLES[kind]) if kind in TABLES else BUILT_IN[kind]


def find(kind: str, name: str, *, key: str) -> Any:
    """Import the object of that kind and name, which the config's key holds. Raises UserError if
    there is none, or if a foreign package fails."""
    if (choice := built_in(kind).get(name)) is not None:
        return _load(choice) if isinstance(choice, str) else choice
    if (point := _foreign(kind).get(name)) is None:
        known = names(kind)
        raise UserError(
            f"there is no {name!r} among the {kind}",
            where=key,
            found=repr(name),
            expected=f"one of {', '.join(known)}",
            next=nearest(name, known) or f"or a package with an entry point tandem.{kind}",
        )
    try:
        return point.load()
    except Exception as error:  # a foreign package may raise anything
        raise UserError(
            f"the package behind {name!r} cannot be loaded",
            where=f"{key} = {name} ({point.value})",
            found=f"{type(error).__name__}: {error}",
            next=f"python -c 'import {point.module}'",
        ) from error


def _load(place: str) -> Any:
    module, _, member = place.partition(":")
    return getattr(import_module(module), member)


@cache
def _foreign(kind: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=f"tandem.{kind}")}
