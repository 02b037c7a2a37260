"""Tandem: reinforcement learning for language models, with training and inference on one model
code.

Read first
  step.py        one RL step on one page: rollouts, advantages, updates, publication
  step_async.py  the same step with rollouts ahead of the training
  train_loop.py  what repeats a step: resume, evaluate, log, save
  types.py       the nouns that cross rooms, and the Protocols between them
  registry.py    what a run chooses by a name: engines, trackers, rewards, commands
  choices.py     what the chosen engine, trainer, stream, transport and machine answer for

The stages of a step, in order
  data/          problems from files; chat templates to tokens
  engine/        generation: scheduler, page cache, sampler
  rollout_workers/ engines in processes of their own: who gets which request and weights
  envs/          environments and tools that answer the model
  rollout/       problems to scored groups of episodes; evaluation
  rewards/       reward functions, and the pool of processes that run them
  rl/            advantages, losses, KL and corrections as pure functions
  trainer/       packing, log-probs, updates of the weights
  weights/       new weights to the engines
  model/         the exact forward pass that engine and trainer share

Around them
  config/        what a run is
  jobs/          a command that trains, put together from its config
  run_folder/    what a run writes: metrics, journal, checkpoints, exports
  workers/       the one way to run something in another process: channel, host, fork server, pool
  runtime/       this machine: signals, files, HTTP client, random numbers, errors
  serve/         the HTTP application, and OpenAI's and Anthropic's bodies: of `serve`, agents, view
  cli/           the commands
  api/           the commands as functions of Python, and a session of four calls

Beside them
  plugins/       what a run may add, a folder each; the core imports none

A room imports `types`, `runtime/` and rooms below it, never one that leads back to it;
tests/test_layout.py holds the rule and this map. Importing this package has no effects: no thread,
no environment variable, no torch.

From Python: train, sft, dpo, rm, distill, evaluate, generate and Run (api/run.py), and Session for
an algorithm of your own (api/session.py).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tandem.runtime.version import __version__

if TYPE_CHECKING:
    from tandem.api.run import Run, distill, dpo, evaluate, generate, rm, sft, train
    from tandem.api.session import Session
    from tandem.runtime.errors import UserError

__all__ = [
    "Run",
    "Session",
    "UserError",
    "__version__",
    "distill",
    "dpo",
    "evaluate",
    "generate",
    "rm",
    "sft",
    "train",
]
_HOMES = {"Session": "tandem.api.session", "UserError": "tandem.runtime.errors"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'tandem' has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "tandem.api.run")), name)
