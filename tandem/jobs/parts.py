"""Make the parts of a command from its config: data, models, engine, optimizer, evaluation.

commands.py puts them together.
"""

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from tandem.config.schema import SFT, Config, Preference, Train
from tandem.data.problems import read_problems
from tandem.data.readers.sources import source_files
from tandem.data.renderer import ChatRenderer, load_renderer
from tandem.engine.engine import Engine, check_room
from tandem.engine.page_cache import page_bytes
from tandem.engine.worker_pool.pool import Workers
from tandem.envs.load import load_env
from tandem.envs.load import source_files as env_files
from tandem.model.load import ExactModel, check_model, load_model
from tandem.model.lora import Lora, require_peft
from tandem.model.probe import Exactness, probe
from tandem.model.weight_files import check_weights
from tandem.rewards.pool.pool import RewardPool
from tandem.rollout.episodes import EnvPool
from tandem.rollout.evaluate import evaluate
from tandem.rollout.score import Grade, RolloutRunner
from tandem.run_folder.journal import Journal
from tandem.runtime import numerics
from tandem.runtime.disk import file_hash
from tandem.runtime.errors import UserError
from tandem.runtime.rng import address
from tandem.runtime.sandbox import open_sandbox
from tandem.runtime.user_code import source_file as source_of
from tandem.train.learn import Models
from tandem.train.learner import Learner
from tandem.train.optimizer import Optimizer
from tandem.train.supervised import scores
from tandem.types import Episode, Generate, Group, Problem, Renderer, Row, Sync
from tandem.weights.in_process import InlineSync
from tandem.weights.shared import SharedWeights
from tandem.weights.worker_sync import ProcessSync

Report = Callable[[str], None]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def read_data(config: Config, key: Literal["data.train", "eval.data"]) -> Sequence[Problem]:
    """The problems that a key names; an eval set that is not configured is empty."""
    source, weights = (
        (config.data.train, config.data.weights) if key == "data.train" else (config.eval.data, [])
    )
    if key == "data.train" and not source:
        raise UserError(
            "no training problems are named",
            where=key,
            expected="a source of problems, see docs/data.md",
            next="add data.train=FILE",
        )
    return read_problems(source, config.data, key=key, weights=weights) if source else []


def input_hashes(config: Config, *keys: str) -> dict[str, str]:
    """SHA-256 by key of what a run is a function of: the data files that these keys name, the files
    of reward functions and environment, and the weights in local model directories."""
    models = {
        "model.path": config.model.path,
        "model.reference": config.model.reference,
        "critic.path": config.critic.path,
        "distill.teacher": config.distill.teacher,
        "reward.model": config.reward.model,
    }
    paths: dict[str, Path] = {}
    for key in keys:
        section, field = key.split(".")
        files = [
            file
            for name in _names(getattr(getattr(config, section), field))
            for file in source_files(name, key)
        ]
        paths |= {key if len(files) == 1 else f"{key}/{file}": file for file in files}
    for key, folder in models.items():
        files = sorted(Path(folder).glob("*.safetensors")) if folder else []
        paths |= {f"{key}/{file.name}": file for file in files}
    own = [source_of(function) for function in config.reward.functions]
    paths |= {f"reward.function/{file}": file for file in own if file is not None}
    paths |= {f"env/{file}": file for file in env_files(config.env)}
    return {key: _input_hash(key, path) for key, path in paths.items() if path.is_file()}


def _input_hash(key: str, path: Path) -> str:
    try:
        return file_hash(path)
    except OSError as error:
        raise UserError(
            "a file that the run is a function of cannot be read",
            where=f"{key.partition('/')[0]}: {path}",
            found=error.strerror or str(error),
            next=f"ls -l {path}",
        ) from None


def _names(source: str | list[str]) -> list[str]:
    return [source] * bool(source) if isinstance(source, str) else source


def prepare_process(config: Config) -> None:
    """Reproducible arithmetic, and memory that stays with the process: page faults of fresh tensors
    cost a tenth of a small step. Called before the first product."""
    numerics.prepare(config.run.threads)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_M_TRIM_THRESHOLD, 1 << 30)


def build_generator(
    config: Config, renderer: ChatRenderer, problems: Sequence[Problem], report: Report
) -> Engine:
    """The engine of a command that only generates: the probe's finding is told, and every prompt
    has room."""
    longest = max(
        len(prompt) for prompt in renderer.prompts([problem.messages for problem in problems])
    )
    require_room(config, check_model(config.model.path), longest)
    model = load_model(config.model.path)
    tell_exactness(config, model, report)
    return build_engine(config, model, renderer)


def require_room(config: Config, shape: Any, longest: int) -> None:
    """Raise UserError if no engine has room for a prompt of `longest` tokens and its completion:
    before the weights are loaded, and not at the step that first draws it. shape: the transformers
    config."""
    size = page_bytes(shape)
    check_room(
        shape,
        (config.rollout.cache_mb << 20) // size,
        size,
        longest + config.rollout.max_new_tokens,
    )


def check_tokenizer(config: Config, shape: Any, renderer: ChatRenderer) -> None:
    """Raise UserError if the tokenizer has tokens that the model lacks."""
    if len(renderer.tokenizer) > shape.vocab_size:
        raise UserError(
            "the tokenizer is not this model's",
            where=f"model.path = {config.model.path}",
            found=f"{len(renderer.tokenizer):,} tokens",
            expected=f"at most {shape.vocab_size:,}",
        )


def tell_exactness(
    config: Config,
    model: ExactModel,
    report: Report,
    *,
    workers: int = 0,
    beside: Sequence[ExactModel] = (),
) -> Exactness:
    """Contract D7: say whether engine and trainer agree on this machine at this model's shapes, and
    with how many threads.

    Where the thread count changes no bit, no more threads are left than there are cores beside the
    rollout workers; where it does, those of `prepare_process` stay. beside: other models that the
    process computes with; of those that have other shapes the threads are tried too.
    """
    free = max(1, min(torch.get_num_threads(), numerics.cores() - workers))
    found, seen = probe(model, config.run.seed, [free]), [_shape(model)]
    for other in beside:
        if _shape(other) not in seen:
            seen.append(_shape(other))
            found.thread_dependent.extend(probe(other, config.run.seed, [free]).thread_dependent)
    agree = "engine and trainer agree to the last bit at this model's shapes"
    parity = f"NOT exact on this machine: {'; '.join(found.parity)}" if found.parity else agree
    if found.thread_dependent:
        report(
            f"exactness probe: {parity}; bits depend on the thread count, {torch.get_num_threads()} are kept"
        )
    else:
        report(f"exactness probe: {parity}{', with any number of threads' * (not found.parity)}")
        torch.set_num_threads(free)
    return found


def _shape(model: ExactModel) -> tuple[Any, ...]:
    config = model.config
    return (
        config.model_type,
        model.heads,
        config.hidden_size,
        config.intermediate_size,
        config.vocab_size,
    )


def build_engine(config: Config, model: ExactModel, renderer: ChatRenderer, **sizes: int) -> Engine:
    """sizes: max_queue and chunk_tokens of the engine, where its defaults are not wanted."""
    check_tokenizer(config, model.config, renderer)
    rollout = config.rollout
    return Engine(
        model,
        renderer.decode,
        cache_bytes=rollout.cache_mb << 20,
        max_batch=rollout.max_batch,
        **{"max_queue": max(1024, config.env.concurrency), **sizes},
    )


def lora_of(config: Config) -> Lora | None:
    lora = config.lora
    if not lora.rank:
        return None
    return Lora(
        rank=lora.rank,
        alpha=lora.alpha,
        targets=tuple(lora.targets),
        seed=address(config.run.seed, "lora") >> 1,
    )


def build_model(
    config: Config, path: str, *, head: Literal["tokens", "value"] = "tokens"
) -> ExactModel:
    """A model to train: with adapters if the config says so, with activation checkpointing if it
    says so."""
    model = load_model(path, lora_of(config), head=head)
    model.checkpointing = config.train.activation_checkpointing
    return model


def build_learner(
    config: Config, model: ExactModel, rates: Train | SFT | Preference, steps: int
) -> Learner:
    """The model with its AdamW; learning rate, schedule and warm-up are those of a section, the
    rest is in [train]."""
    optimizer = Optimizer(
        model.trainable(),
        learning_rate=rates.learning_rate,
        schedule=rates.schedule,
        warmup_steps=rates.warmup_steps,
        total_steps=steps,
        weight_decay=config.train.weight_decay,
        betas=(config.train.beta1, config.train.beta2),
        max_grad_norm=config.train.max_grad_norm,
    )
    return Learner(model, optimizer)


def build_reference(config: Config, policy: ExactModel) -> ExactModel:
    """The frozen model of KL and DPO: the one that is named, the policy without its adapters, or
    the starting weights."""
    if config.lora.rank and not config.model.reference:
        return policy
    return load_model(config.model.reference or config.model.path)


def check_models(config: Config, *others: str, head: Literal["tokens", "value"] = "tokens") -> Any:
    """Before any weights are loaded: model.path and the other keys name models that are there,
    exact, and of one vocabulary.

    Returns the transformers config of model.path.
    """
    paths = {
        "model.reference": config.model.reference,
        "critic.path": config.critic.path,
        "distill.teacher": config.distill.teacher,
    }
    shape = check_model(config.model.path, head=head)
    check_weights(config.model.path)
    size = shape.vocab_size
    for key in others:
        kind: Literal["tokens", "value"] = "value" if key == "critic.path" else "tokens"
        if not paths[key]:
            continue
        if (found := check_model(paths[key], key, head=kind).vocab_size) != size:
            raise UserError(
                "two models do not share a vocabulary",
                where=f"{key} = {paths[key]}",
                found=f"{found:,} tokens",
                expected=f"{size:,}, as model.path",
                next="take a model of the same family",
            )
        check_weights(paths[key])
    if config.lora.rank:
        require_peft()
    return shape


def learning_models(config: Config) -> Models:
    """Policy, and critic and reference where the algorithm has them."""
    updates, critic = config.rl.minibatches * config.rl.epochs, config.critic
    alone = critic.warmup_steps if config.rl.advantage == "gae" else 0
    model = build_model(config, config.model.path)
    policy = build_learner(config, model, config.train, (config.run.steps - alone) * updates)
    reference = build_reference(config, model) if config.rl.kl_coef else None
    if config.rl.advantage != "gae":
        return Models(policy=policy, reference=reference)
    values = build_model(config, critic.path or config.model.path, head="value")
    rates = config.train.model_copy(update={"learning_rate": critic.learning_rate})
    return Models(
        policy=policy,
        reference=reference,
        critic=build_learner(config, values, rates, config.run.steps * updates),
    )


def student_and_teacher(config: Config) -> Models:
    steps = config.run.steps * config.rl.minibatches * config.rl.epochs
    student = build_learner(config, build_model(config, config.model.path), config.train, steps)
    return Models(policy=student, teacher=load_model(config.distill.teacher))


def require_parity(config: Config, found: Exactness) -> bool:
    """Whether the policy can be held to P1; refuses to rely on it where it does not hold."""
    if found.parity and config.rl.correction == "none":
        raise UserError(
            "engine and trainer do not agree bit for bit on this machine",
            where="exactness probe",
            found="; ".join(found.parity),
            expected="every operator exact, or an off-policy correction",
            next="add rl.correction=tis (truncated importance sampling); if it is MKL's mode: unset MKL_CBWR, and in "
            "a notebook call tandem.runtime.numerics.prepare() before anything is computed",
        )
    return not found.parity


def reward_pool(config: Config) -> RewardPool:
    how = config.reward
    options = dict(how.options)
    if "code" in how.functions:
        open_sandbox(config.sandbox)  # without one it refuses to run
        options["code"] = {**options.get("code", {}), "sandbox": config.sandbox.model_dump()}
    return RewardPool(
        how.functions, how.timeout_s, how.workers, weights=how.weights, options=options
    )


@contextmanager
def playground(config: Config) -> Iterator[Callable[[Generate, Renderer], RolloutRunner]]:
    """Environment and reward workers, checked before anything expensive is loaded and alive as long
    as the context; it yields what makes a RolloutRunner of them with an engine and a renderer."""
    world = EnvPool(make=load_env(config.env, config.sandbox), limits=config.env)
    if config.reward.model:
        check_model(config.reward.model, "reward.model", head="value")
    with reward_pool(config) as reward, closing(world):
        yield lambda engine, renderer: RolloutRunner(
            engine=engine, renderer=renderer, world=world, reward=reward, grade=grader(config)
        )


@contextmanager
def rollout_side(
    config: Config, engine: Engine, local: RolloutRunner, report: Report
) -> Iterator[tuple[RolloutRunner, Sync, Callable[[], None]]]:
    """Who samples for training, how weights get there, and what ends it: the trainer's own engine,
    or worker processes."""
    rollout, model = config.rollout, engine.model
    if not rollout.workers:
        yield local, InlineSync(engine), lambda: None
        return
    with (
        closing(SharedWeights(model.merged_weights())) as shared,
        Workers(
            model_path=config.model.path,
            cache_mb=rollout.cache_mb,
            max_batch=rollout.max_batch,
            longest=engine.longest,
            count=rollout.workers,
            heartbeat_s=config.run.stall_s / 2,
            restarts=rollout.restarts,
            weights=shared,
            report=report,
        ) as workers,
    ):
        sync = ProcessSync(workers, engine, shared, model.merged_weights, rollout.staleness)
        yield replace(local, engine=workers), sync, workers.close


def grader(config: Config) -> Grade | None:
    """What lets the reward model of the config, if any, have its word: it reads each chat up to the
    model's last turn."""
    if not config.reward.model:
        return None
    scorer, renderer = (
        load_model(config.reward.model, head="value"),
        load_renderer(config.reward.model),
    )
    alone = threading.Lock()  # rollouts ahead and an evaluation may ask at once

    def grade(
        problems: Sequence[Problem], attempts: Sequence[tuple[Episode, ...]]
    ) -> list[tuple[Episode, ...]]:
        rendered = {}
        for row, episode in (
            (row, e) for row, group in enumerate(attempts) for e in group if e.num_turns
        ):
            chat = episode.chat(problems[row])
            said = max(i + 1 for i, message in enumerate(chat) if message["role"] == "assistant")
            # its template refuses the chat: `reward_model` has no word on it, and says so
            with suppress(UserError):
                [rendered[row, episode.sample_index]] = renderer.chats([chat[:said]])
        with alone:
            values = scores(scorer, list(rendered.values()), config.train.tokens_per_microbatch)
        word = dict(zip(rendered, values, strict=True))
        return [
            tuple(_with_word(episode, word.get((row, episode.sample_index))) for episode in group)
            for row, group in enumerate(attempts)
        ]

    return grade


def _with_word(episode: Episode, value: float | None) -> Episode:
    return (
        episode
        if value is None
        else replace(episode, given={**episode.given, "reward_model": value})
    )


def evaluator(
    config: Config,
    problems: Sequence[Problem],
    player: RolloutRunner,
    stop_token_ids: tuple[int, ...],
    journal: Journal | None,
) -> Callable[[int], Row]:
    """A function of the steps done; it returns no metrics where there is nothing to evaluate. What
    it finds of an earlier start of the run in the journal is not played again."""

    def run(done: int) -> Row:
        if not problems:
            return {}
        known = {} if journal is None else _passes(journal, done)

        def keep(kind: str, groups: list[Group]) -> None:
            if journal is not None:
                journal.write(done, groups, kind=f"eval_{kind}")

        metrics, _ = evaluate(
            player,
            problems,
            seed=config.run.seed,
            how=config.eval,
            rollout=config.rollout,
            stop_token_ids=stop_token_ids,
            known=known,
            ended=keep,
        )
        return metrics

    return run


def _passes(journal: Journal, done: int) -> dict[str, list[Group]]:
    """Of an evaluation that an earlier start of the run has made."""
    found = {kind: journal.read(done, f"eval_{kind}") for kind in ("sampled", "greedy")}
    return {kind: known[0] for kind, known in found.items() if known is not None}
