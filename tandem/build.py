"""Build the stages of a command from its config, cheapest check first: data, tokenizer, model, and only then workers."""

import ctypes
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from tandem.config import SFT, Config, Train
from tandem.data.chats import read_chats
from tandem.data.problems import problems_of_step, read_problems
from tandem.data.render import ChatRenderer, load_renderer
from tandem.drive import Job
from tandem.engine.engine import Engine
from tandem.envs.single_turn import SingleTurn
from tandem.errors import UserError
from tandem.evaluate import evaluate, sampling_params
from tandem.loop import Clock, Stages, train_step
from tandem.model.load import ExactModel, check_model, load_model
from tandem.model.probe import what_is_not_exact
from tandem.rewards.pool import RewardPool
from tandem.stream.journal import write_episodes
from tandem.train.optimizer import Optimizer
from tandem.train.pack import pack
from tandem.train.policy import Policy
from tandem.types import Problem, Reward, Row, Sample
from tandem.weights.inline import InlineSync

Report = Callable[[str], None]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def read_data(config: Config, *keys: str) -> dict[str, list[Problem]]:
    """The problems of "data.train" and "eval.data", as named; an eval set that is not configured is empty."""
    paths = {"data.train": config.data.train, "eval.data": config.eval.data}
    if "data.train" in keys and not config.data.train:
        raise UserError("no training problems are named", where="data.train", expected="a JSONL or Parquet file",
                        next="add data.train=FILE")  # fmt: skip
    return {key: read_problems(paths[key], config.data, key=key) if paths[key] else [] for key in keys}


def input_hashes(config: Config) -> dict[str, str]:
    """SHA-256 of every data file, and of the weights in local model directories, that the config names; by key."""
    paths = {"data.train": config.data.train, "eval.data": config.eval.data, "sft.train": config.sft.train}
    for key, folder in (("model.path", config.model.path), ("model.reference", config.model.reference)):
        files = sorted(Path(folder).glob("*.safetensors")) if folder else []
        paths |= {f"{key}/{file.name}": str(file) for file in files}
    return {key: _sha256(Path(path)) for key, path in paths.items() if Path(path).is_file()}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def prepare_process(config: Config) -> None:
    """Threads, and memory that stays with the process: page faults of fresh tensors cost a tenth of a small step."""
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_M_TRIM_THRESHOLD, 1 << 30)


def build_generator(config: Config, renderer: ChatRenderer, problems: Sequence[Problem], report: Report) -> Engine:
    """The engine of a command that only generates: the probe's finding is told, and every prompt has room."""
    model = load_model(config.model.path)
    tell_exactness(model, report)
    engine = build_engine(config, model, renderer)
    require_room(config, engine, renderer, problems)
    return engine


def require_room(config: Config, engine: Engine, renderer: ChatRenderer, problems: Sequence[Problem]) -> None:
    """Now, and not at the step that first draws the longest prompt."""
    longest = max(len(prompt) for prompt in renderer.prompts([problem.messages for problem in problems]))
    engine.require_room(longest + config.rollout.max_new_tokens)


def tell_exactness(model: ExactModel, report: Report) -> list[str]:
    """Contract D7: say whether P1 holds on this machine; returns what is not exact."""
    failures = what_is_not_exact(model)
    if failures:
        report(f"exactness probe: NOT exact on this machine: {', '.join(failures)}")
    else:
        report("exactness probe: engine and trainer agree to the last bit at this model's shapes")
    return failures


def build_engine(config: Config, model: ExactModel, renderer: ChatRenderer, **sizes: int) -> Engine:
    """sizes: max_queue and chunk_tokens of the engine, where its defaults are not wanted."""
    if len(renderer.tokenizer) > model.config.vocab_size:
        raise UserError("the tokenizer is not this model's", where=f"model.path = {config.model.path}",
                        found=f"{len(renderer.tokenizer):,} tokens", expected=f"at most {model.config.vocab_size:,}")  # fmt: skip
    rollout = config.rollout
    return Engine(model, renderer.decode, cache_bytes=rollout.cache_mb << 20, max_batch=rollout.max_batch, **sizes)


def build_policy(config: Config, model: ExactModel, shape: Train | SFT, *, steps: int, reference: bool) -> Policy:
    """The learning rates come from shape, the section of the command, and all else from [train]."""
    optimizer = Optimizer(
        dict(model.module.named_parameters()), learning_rate=shape.learning_rate, schedule=shape.schedule,
        warmup_steps=shape.warmup_steps, total_steps=steps, weight_decay=config.train.weight_decay,
        betas=(config.train.beta1, config.train.beta2), max_grad_norm=config.train.max_grad_norm,
    )  # fmt: skip
    return Policy(model, optimizer, load_model(config.model.reference or config.model.path) if reference else None)


def check_exactness(config: Config, model: ExactModel, report: Report) -> None:
    """Refuse to rely on P1 where it does not hold."""
    failures = tell_exactness(model, report)
    if failures and not config.rl.importance_cap:
        raise UserError("engine and trainer do not agree bit for bit on this machine", where="exactness probe",
                        found=", ".join(failures), expected="every operator exact, or an off-policy correction",
                        next="add rl.importance_cap=2 (truncated importance sampling)")  # fmt: skip


@contextmanager
def training_job(config: Config, episodes: Path, report: Report) -> Iterator[Job]:
    """`tandem train`."""
    prepare_process(config)
    data = read_data(config, "data.train", "eval.data")
    check_model(config.model.path)
    renderer = load_renderer(config.model.path)
    problems = renderer.check_lengths(data["data.train"], config.data)
    held_out = renderer.check_lengths(data["eval.data"], config.data, key="eval.data") if data["eval.data"] else []
    model = load_model(config.model.path)
    check_exactness(config, model, report)
    steps = config.run.steps * config.rl.minibatches
    policy = build_policy(config, model, config.train, steps=steps, reference=config.rl.kl_coef > 0)
    engine = build_engine(config, model, renderer)
    require_room(config, engine, renderer, [*problems, *held_out])
    sync = InlineSync(engine)
    with RewardPool(config.reward.function, config.reward.timeout_s, config.reward.workers) as reward:
        stages = Stages(
            config=config, problems=problems, renderer=renderer, env=SingleTurn(), engine=engine, reward=reward, policy=policy,
            sync=sync, params=sampling_params(config.rollout, renderer.stop_token_ids), episodes=episodes,
        )  # fmt: skip
        yield Job(
            data=input_hashes(config),
            policy=policy, steps=config.run.steps, eval_every=config.eval.every, publish=sync.publish,
            step=lambda done: train_step(stages, done),
            evaluate=evaluator(config, held_out, engine, renderer, reward, episodes),
        )  # fmt: skip


@contextmanager
def sft_job(config: Config, episodes: Path, report: Report) -> Iterator[Job]:
    """`tandem sft`."""
    prepare_process(config)
    if not config.sft.train:
        raise UserError(
            "no chats are named",
            where="sft.train",
            expected="a JSONL or Parquet file of chats",
            next="add sft.train=FILE",
        )
    chats = read_chats(config.sft.train, key="sft.train")
    held_out = read_data(config, "eval.data")["eval.data"]
    check_model(config.model.path)
    renderer = load_renderer(config.model.path)
    samples = [_chat_sample(tokens, mask) for tokens, mask in renderer.trainings(chats)]
    model = load_model(config.model.path)
    check_fit(samples, model.config.max_position_embeddings)
    policy = build_policy(config, model, config.sft, steps=config.sft.steps, reference=False)
    engine = build_engine(config, model, renderer)
    sync = InlineSync(engine)

    def step(done: int) -> tuple[Row, Row]:
        clock = Clock()
        with clock("learn_s"):
            picked = problems_of_step(samples, done, config.sft.batch_size, config.run.seed, config.data.shuffle)
            metrics = policy.fit(pack(picked, config.train.tokens_per_microbatch))
        sync.publish(done + 1)
        return metrics, clock.timings(tokens=0)

    with RewardPool(config.reward.function, config.reward.timeout_s, config.reward.workers) as reward:
        yield Job(
            data=input_hashes(config),
            policy=policy, steps=config.sft.steps, eval_every=0, publish=sync.publish,
            step=step, evaluate=evaluator(config, held_out, engine, renderer, reward, episodes),
        )  # fmt: skip


def check_fit(samples: Sequence[Sample], limit: int) -> None:
    """Refuse chats that the model has no positions for."""
    row, longest = max(enumerate(len(sample.tokens) for sample in samples), key=lambda pair: pair[1])
    if longest > limit:
        raise UserError("a chat is longer than the model can place", where=f"sft.train, chat {row + 1}",
                        found=f"{longest:,} tokens", expected=f"at most {limit:,}", next="shorten or drop it")  # fmt: skip


def _chat_sample(tokens: np.ndarray, mask: np.ndarray) -> Sample:
    nothing = np.zeros(len(tokens), np.float32)
    return Sample(tokens=tokens, loss_mask=mask, engine_logprobs=nothing, advantages=nothing)


def evaluator(
    config: Config, problems: Sequence[Problem], engine: Engine, renderer: ChatRenderer, reward: Reward, episodes: Path | None
) -> Callable[[int], Row]:  # fmt: skip
    """A function of the steps done; it journals its episodes, and returns no metrics where there is nothing to evaluate."""

    def run(done: int) -> Row:
        if not problems:
            return {}
        metrics, groups = evaluate(
            problems, seed=config.run.seed, how=config.eval, rollout=config.rollout, stop_token_ids=renderer.stop_token_ids,
            engine=engine, renderer=renderer, env=SingleTurn(), reward=reward,
        )  # fmt: skip
        if episodes is not None:
            for kind, part in groups.items():
                write_episodes(episodes, done, part, kind=f"eval_{kind}")
        return metrics

    return run
