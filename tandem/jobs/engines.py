"""The engine of a command, its environments and rewards, and whether engine and trainer agree."""

import ctypes
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tandem.choices import Report, engine_of
from tandem.config.schema import Config
from tandem.data.renderer import ChatRenderer, load_renderer
from tandem.engine.engine import Engine, check_room, make_engine
from tandem.engine.page_cache import page_bytes
from tandem.envs.load import load_env
from tandem.jobs.here import Here
from tandem.jobs.models import check_parts, check_tokenizer, placement, releases_cache
from tandem.model import custom_code
from tandem.model.config_file import check_model, inner_size
from tandem.model.load import ExactModel, load_model
from tandem.model.probe import Exactness, fastest_exact, probe, try_matmuls
from tandem.model.schedule import random_model
from tandem.registry import find, names
from tandem.rewards.pool import RewardPool, ScorePool
from tandem.rollout.env_pool import EnvPool
from tandem.rollout.score import RolloutRunner
from tandem.run_folder.folder import read_matmul
from tandem.runtime import numerics
from tandem.types import Generate, Problem, Renderer, Reward

logger = logging.getLogger(__name__)

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def prepare_process(config: Config) -> None:
    """Make arithmetic reproducible, and let memory stay with the process: page faults of fresh
    tensors cost a tenth of a small step. What an earlier job of the process left free goes back.
    Call it before the first product."""
    numerics.prepare(config.run.threads)
    custom_code.allow(config.model.trust_remote_code)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_M_TRIM_THRESHOLD, 1 << 30)
        libc.malloc_trim(0)


def probe_exactness(
    config: Config,
    model: ExactModel,
    report: Report,
    *,
    workers: int = 0,
    others: Sequence[ExactModel] = (),
    folder: Path | None = None,
    alone: bool = True,
) -> Exactness:
    """Report whether engine and trainer agree on this machine at this model's shapes, and with how
    many threads (contract D7).

    If the thread count changes no bit, no more threads are left than there are cores beside the
    rollout workers; otherwise those of `prepare_process` stay. others: further models, whose
    threads are probed too if their shapes differ. They may be divided, and no other rank comes to
    their passes, so it is random models of their shapes that run: nobody needs the gradient of
    their vocabulary. folder: of the run, if there is one. alone: no other process multiplies by
    these weights.
    """
    processor = placement(config).processor()
    on_gpu, seed = model.device.type == "cuda", config.run.seed
    microbatch = config.train.tokens_per_microbatch
    before = "" if folder is None else read_matmul(folder, processor)
    if not on_gpu:
        keep_kernels(model, before or model.kernels.matmuls[0], report)
    if gap := model.gap:  # operators of the inexact path, which nobody probes
        report(
            f"NOT exact: engine and trainer compute differently ({gap}), gap measured each step; "
            f"bits depend on the thread count, {torch.get_num_threads()} are kept; {processor}"
        )
        return Exactness(
            parity=[], thread_dependent=[gap], inexact=gap, matmul=model.kernels.chosen
        )
    if on_gpu:
        alone = alone and config.parallel.processes == 1 and engine_of(config).multiplies_here
        choose_matmul(model, seed, report, before, alone=alone, microbatch=microbatch)
    free = max(1, min(torch.get_num_threads(), numerics.cores() - workers))
    found, seen = probe(model, seed, [free], microbatch), [_shape(model)]
    if found.parity and not before and model.kernels.chosen == "fused":
        report(f"the compiled kernels are not exact here ({'; '.join(found.parity)}): not taken")
        model.kernels.use_matmul("plain")
        found = probe(model, seed, [free], microbatch)
    for other in others:
        if other.gap:
            found.thread_dependent.append(f"a model that is not exact, {other.gap}")
        elif _shape(other) not in seen:
            seen.append(_shape(other))
            alike = random_model(other, seed, placement(config).dtype)
            found.thread_dependent.extend(probe(alike, seed, [free]).thread_dependent)
    agree = "engine and trainer agree to the last bit at this model's shapes"
    parity = f"NOT exact on this machine: {'; '.join(found.parity)}" if found.parity else agree
    if found.thread_dependent:
        kept = f"bits depend on the thread count, {torch.get_num_threads()} are kept"
        report(f"exactness probe: {parity}; {kept} ({processor})")
    else:
        threads = ", with any number of threads" * (not found.parity)
        report(f"exactness probe: {parity}{threads} ({processor})")
        torch.set_num_threads(free)
    return replace(found, matmul=model.kernels.chosen)


def keep_kernels(model: ExactModel, before: str, report: Report) -> None:
    """Take the kernels of a CPU that a run took before, where they are here."""
    if before in model.kernels.matmuls:
        model.kernels.use_matmul(before)
    else:
        report(
            f"the run's {before} kernels are not here, so its bits are now of the plain ones: "
            "pip install builds them by a C++ compiler, TANDEM_KERNELS=plain leaves them out"
        )


def choose_matmul(
    model: ExactModel,
    seed: int,
    report: Report,
    before: str = "",
    *,
    alone: bool = True,
    microbatch: int = 0,
) -> None:
    """Take the kernel of the run before, or the fastest exact one on this GPU at the model's
    shapes. Processes that are not alone do not know each other's choice, so each takes one of those
    with the same bits. microbatch: tokens of an update's pass."""
    own = model.kernels
    kernels = own.matmuls if alone else own.own_matmuls
    if before in kernels:
        own.use_matmul(before)
        return
    trials = try_matmuls(model, seed, kernels=kernels, microbatch=microbatch)
    own.use_matmul(fastest_exact(trials))
    tried = ", ".join(map(str, trials))
    report(f"matmul kernel: {own.chosen}, the fastest exact one of {tried}")


def _shape(model: ExactModel) -> tuple[Any, ...]:
    config = model.config
    return (
        config.model_type,
        model.heads,
        config.hidden_size,
        inner_size(config),
        config.vocab_size,
    )


def build_engine(config: Config, model: ExactModel, renderer: ChatRenderer, **sizes: int) -> Engine:
    """Build the engine over a model. sizes: max_queue and chunk_tokens, if not the defaults."""
    check_tokenizer(config, model.config, renderer)
    rollout = config.rollout
    return make_engine(
        model,
        renderer.decode,
        cache_bytes=rollout.cache_mb << 20,
        max_batch=rollout.max_batch,
        record_experts=config.rl.router_replay,
        **{"max_queue": max(1024, config.env.concurrency), **sizes},
    )


def make_room(config: Config, engine: Engine) -> Callable[[], None]:
    """Return the function that makes room for an update: with rollout.release_cache it takes the
    memory of the engine's idle cache, which has it again at the engine's next step."""
    return engine.rest if releases_cache(config, placement(config)) else lambda: None


def load_engine(
    config: Config, renderer: ChatRenderer, longest_prompt: int, report: Report
) -> Generate:
    """Load the engine of a command that only generates; every prompt has room."""
    shape = check_model(config.model.path)
    check_parts(config, shape)
    foreign: Generate | None = engine_of(config).load(config, renderer, report)
    if foreign is not None:
        return foreign
    require_room(config, shape, longest_prompt)
    model = load_model(config.model.path, place=placement(config))
    probe_exactness(config, model, report)
    return build_engine(config, model, renderer)


def require_room(config: Config, shape: Any, longest_prompt: int) -> None:
    """Raise UserError if the longest prompt and its completion do not fit the cache: at the start,
    not once a step draws that prompt. shape: the transformers config."""
    size = page_bytes(shape, placement(config).dtype.itemsize)
    num_pages = (config.rollout.cache_mb << 20) // size
    check_room(shape, num_pages, size, longest_prompt + config.rollout.max_new_tokens)


@contextmanager
def open_envs_and_rewards(
    config: Config, machine: Here | None = None, report: Report = print
) -> Iterator[tuple[EnvPool, ScorePool[Any]]]:
    """Open environments and reward workers; check their needs before anything expensive is
    loaded. machine: where they run, if not here; those on other nodes report to `report`."""
    machine = machine or Here()
    make, renders = load_env(config.env, config.sandbox), config.rollout.renders
    local = EnvPool(make=make, limits=config.env, renders=renders)
    if config.reward.model:
        find("reward_models", "check", key="reward.model")(config.reward.model)
    with (
        build_reward_pool(config) as here,
        machine.open_envs(config, local, report) as envs,
        machine.open_rewards(config, here, report) as rewards,
    ):
        yield envs, rewards


def build_reward_pool(config: Config) -> RewardPool:
    """Build the pool of reward workers; raises UserError if one needs a sandbox and has none."""
    arguments = pool_arguments(config)
    if any("sandbox" in own for own in arguments["options"].values()):
        find("sandboxes", config.sandbox.kind, key="sandbox")(config.sandbox)
    return RewardPool(**arguments)


def pool_arguments(config: Config) -> dict[str, Any]:
    """Return the arguments of a RewardPool, which may be built in another process."""
    reward, options = config.reward, dict(config.reward.options)
    for name in filter(set(names("reward_options")).__contains__, reward.functions):
        of_run = find("reward_options", name, key="reward.function")(config)
        options[name] = {**options.get(name, {}), **of_run}
    return {
        "functions": reward.functions,
        "timeout_s": reward.timeout_s,
        "workers": reward.workers,
        "weights": reward.weights,
        "options": options,
    }


@contextmanager
def open_runner(
    config: Config, problems: Sequence[Problem], key: str, report: Report
) -> Iterator[tuple[RolloutRunner, list[Problem]]]:
    """Open what plays and scores episodes for a command that only generates, and return the
    problems whose prompts are short enough. key: that names the problems."""
    check_model(config.model.path)
    renderer = load_renderer(config.model.path, config.data.chat_template)
    problems, lengths = renderer.check_lengths(problems, config.data, key=key)
    with open_envs_and_rewards(config) as (envs, rewards):
        engine = load_engine(config, renderer, max(lengths), report)
        yield build_runner(config, engine, renderer, envs, rewards), problems


def build_runner(
    config: Config, engine: Generate, renderer: Renderer, envs: EnvPool, rewards: Reward
) -> RolloutRunner:
    """Put together the parts that generate and score episodes; load the reward model, if any."""
    if "format" in config.reward.names and isinstance(renderer, ChatRenderer):
        warn_of_hidden_tags(renderer, **config.reward.options.get("format", {}))
    reward_model = None
    if config.reward.model:
        reward_model = find("reward_models", "load", key="reward.model")(config)
    return RolloutRunner(
        engine=engine, renderer=renderer, envs=envs, rewards=rewards, reward_model=reward_model
    )


def warn_of_hidden_tags(
    renderer: ChatRenderer, tags: Sequence[str] = ("think",), opened: bool = False, **others: Any
) -> None:
    """Say it if the reward `format` can never find its tags: where the prompt has opened the first
    of them, or where a text does not show one. It takes the options of that reward."""
    [prompt] = renderer.prompts([[{"role": "user", "content": "a"}]])
    if tags and not opened and renderer.decode(prompt).rstrip().endswith(f"<{tags[0]}>"):
        logger.warning(
            "the chat template opens <%s> in the prompt, so `format` would be 0 in every episode: "
            "set reward.options.format={opened = true}",
            tags[0],
        )
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    if hidden := [mark for mark in marks if mark not in renderer.decode(renderer.encode(mark))]:
        logger.warning(
            "%s are special tokens, which no text shows, so `format` would be 0 in every episode: "
            "take other reward.options.format.tags",
            ", ".join(hidden),
        )
