"""The engine of a command, its environments and rewards, and whether engine and trainer agree."""

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tandem.config.schema import Config
from tandem.data.renderer import ChatRenderer, load_renderer
from tandem.engine.engine import Engine, check_room, make_engine
from tandem.engine.page_cache import page_bytes
from tandem.engine.sync_check import Probe, make_probe
from tandem.engine.worker_pool.client import Client, PoolThread
from tandem.engine.worker_pool.pool import COMMAND, Workers
from tandem.engine.worker_pool.process import Published, Spawn
from tandem.envs.load import load_env
from tandem.jobs.env_workers import open_env_workers
from tandem.jobs.http_engines import (
    is_http,
    load_http_engines,
    open_http_rollouts,
    require_starting_weights,
)
from tandem.jobs.models import (
    check_parts,
    check_reward_model,
    check_tokenizer,
    placement,
    releases_cache,
    rests_in_updates,
)
from tandem.jobs.reward_workers import build_reward_pool, open_reward_workers
from tandem.model import custom_code
from tandem.model.config_file import check_model, inner_size
from tandem.model.load import ExactModel, load_model
from tandem.model.paths import Gap
from tandem.model.placement import place_models
from tandem.model.probe import Exactness, fastest_exact, probe, try_matmuls
from tandem.model.schedule import random_model
from tandem.plugins.cluster.job import open_hosts, worker_device
from tandem.plugins.vllm import worker as vllm_worker
from tandem.rewards.pool.pool import TaskPool
from tandem.rollout.collect import steps_at_once
from tandem.rollout.env_pool import EnvPool
from tandem.rollout.score import RewardModel, RolloutRunner
from tandem.run_folder.folder import read_matmul
from tandem.runtime import numerics
from tandem.runtime.errors import UserError
from tandem.train.engine_gap import gap_limit
from tandem.train.supervised import scores
from tandem.types import Episode, Generate, Problem, Renderer, Reward, Sync
from tandem.weights.in_process import InlineSync
from tandem.weights.worker_sync import ProcessSync

if TYPE_CHECKING:
    from tandem.plugins.cluster.ray_cluster import RayCluster

Report = Callable[[str], None]

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
    on_gpu = model.device.type == "cuda"
    if isinstance(model.exactness, Gap):
        found = _not_exact(model.exactness, report, processor)
        return replace(found, matmul=model.kernels.chosen if on_gpu else "")
    seed, microbatch = config.run.seed, config.train.tokens_per_microbatch
    if on_gpu:
        before = "" if folder is None else read_matmul(folder, processor)
        alone = alone and config.parallel.processes == 1 and not is_http(config)
        choose_matmul(model, seed, report, before, alone=alone, microbatch=microbatch)
    free = max(1, min(torch.get_num_threads(), numerics.cores() - workers))
    found, seen = probe(model, seed, [free], microbatch), [_shape(model)]
    for other in others:
        if isinstance(other.exactness, Gap):
            found.thread_dependent.append(f"a model that is not exact, {other.exactness.gap}")
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
    return replace(found, matmul=model.kernels.chosen if on_gpu else "")


def _not_exact(gap: Gap, report: Report, processor: str) -> Exactness:
    """Report a model of the inexact path, whose operators nobody probes."""
    report(
        f"NOT exact: engine and trainer compute differently ({gap.gap}), gap measured each "
        f"step; bits depend on the thread count, {torch.get_num_threads()} are kept; {processor}"
    )
    return Exactness(parity=[], thread_dependent=[gap.gap], inexact=gap.gap)


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


def rollout_command(config: Config) -> Sequence[str]:
    """Return the command of a rollout worker with the engine of the config. Raises UserError if it
    is vLLM and there is none."""
    return vllm_worker.command() if config.rollout.engine == "vllm" else COMMAND


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
    if is_http(config):
        engines = load_http_engines(config, renderer, report)
        require_starting_weights(engines)
        return engines
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
    config: Config, cluster: "RayCluster | None" = None, report: Report = print
) -> Iterator[tuple[EnvPool, TaskPool]]:
    """Open environments and reward workers; check their needs before anything expensive is
    loaded. cluster: for those on other nodes, which report to `report`."""
    local = EnvPool(make=load_env(config.env, config.sandbox), limits=config.env)
    if config.reward.model:
        check_reward_model(config.reward.model)
    with (
        build_reward_pool(config) as here,
        open_env_workers(config, cluster, local, report) as envs,
        open_reward_workers(config, cluster, here, report) as rewards,
    ):
        yield envs, rewards


Lane = tuple[RolloutRunner, Sync]  # of a step's rollouts: what plays them, and gives it weights


@contextmanager
def open_rollouts(
    config: Config,
    engine: Engine,
    local: RolloutRunner,
    report: Report,
    folder: Path,
    exact: bool,
    cluster: "RayCluster | None",
) -> Iterator[tuple[list[Lane], Workers | PoolThread | None, Callable[[], None]]]:
    """Open the engine that samples for training: the trainer's own, rollout workers, or servers.

    Yields a lane for each step that is rolled out at once, the workers, and a function that ends
    rollouts under way. folder: of the run. exact: rollouts check their log-probs. cluster: of
    rollout workers, if they are not of this machine.
    """
    if is_http(config):
        with open_http_rollouts(config, engine, local, report, folder / "weights") as opened:
            runner, sync, stop = opened
            yield [(runner, sync)], None, stop
        return
    rollout, model = config.rollout, engine.model
    by_vllm = rollout.engine == "vllm"
    for device in rollout.devices:
        place_models(device, config.model.dtype)
    if not rollout.workers:
        yield [(local, InlineSync(engine))], None, lambda: None
        return
    with (
        open_hosts(config, model.merged_weights(), cluster) as (shared, spawn),
        _start_workers(config, engine, shared, spawn, report) as workers,
    ):
        if by_vllm:
            shared.publish(0, model.merged_weights(), _probe(config, engine))
            gap = workers.try_out(0)
            shared.release(below=1)
            report(f"vLLM runs the model: log-probs of a fixed sequence differ by {gap:.1e} nats")

        def lane(client: Workers | Client, **options: Any) -> Lane:
            weights = model.merged_weights
            probe = partial(_probe, config, engine)
            sync = ProcessSync(client, engine, shared, weights, rollout.staleness, probe)
            return replace(local, engine=client, **options), sync

        if (count := steps_at_once(config)) == 1:
            yield [lane(workers)], workers, workers.close
            return
        with PoolThread(workers, checks=exact or by_vllm) as pool:
            clients = [pool.client(number) for number in range(count)]
            lanes = [lane(client, after_generation=client.rest) for client in clients]
            yield lanes, pool, workers.close


def _start_workers(
    config: Config, engine: Engine, weights: Published, spawn: Spawn | None, report: Report
) -> Workers:
    """Start rollout workers of the trainer's model; they close as a context."""
    rollout, model = config.rollout, engine.model
    devices = rollout.devices or [worker_device(config, str(model.device))]
    return Workers(
        model_path=config.model.path,
        devices=devices,
        dtype=placement(config).dtype_name,
        splits=model.splits,
        tensor_parallel=rollout.tensor_parallel,
        matmul=model.kernels.chosen,
        cache_mb=rollout.cache_mb,
        max_batch=rollout.max_batch,
        longest=engine.longest,
        count=rollout.workers,
        heartbeat_s=config.run.stall_s / 2,
        restarts=rollout.restarts,
        weights=weights,
        record_experts=config.rl.router_replay,
        release_cache=rests_in_updates(config),
        report=report,
        command=rollout_command(config),
        # CUDA does not survive a fork, should an import have started it
        forks=rollout.engine == "tandem" and set(devices) == {"cpu"},
        spawn=spawn,
    )


def _probe(config: Config, engine: Engine) -> Probe | None:
    """Score what workers of other kernels compare themselves with, by the weights in use."""
    if config.rollout.engine == "tandem":
        return None
    model, limit = engine.model, gap_limit(config, engine.model.dtype)
    return make_probe(engine.score, model.config.vocab_size, engine.longest, limit)


def build_runner(
    config: Config, engine: Generate, renderer: Renderer, envs: EnvPool, rewards: Reward
) -> RolloutRunner:
    """Put together the parts that generate and score episodes; load the reward model, if any."""
    return RolloutRunner(
        engine=engine,
        renderer=renderer,
        envs=envs,
        rewards=rewards,
        reward_model=_load_reward_model(config),
    )


def _load_reward_model(config: Config) -> RewardModel | None:
    """Load the reward model, if the config names one. It scores each chat up to the last turn of
    the model, and stores the score in `env_rewards`."""
    if not config.reward.model:
        return None
    scorer = load_model(config.reward.model, head="value", place=placement(config))
    renderer = load_renderer(config.reward.model)
    lock = threading.Lock()  # rollouts ahead and an evaluation may ask at once

    def score(
        problems: Sequence[Problem], episodes: Sequence[tuple[Episode, ...]]
    ) -> list[tuple[Episode, ...]]:
        rendered = {}
        for row, group in enumerate(episodes):
            for episode in group:
                if not episode.num_turns:
                    continue
                chat = episode.chat(problems[row])
                end = max(i for i, message in enumerate(chat) if message["role"] == "assistant")
                # a chat that its template refuses has no score, and `reward_model` says so
                with suppress(UserError):
                    [rendered[row, episode.sample_index]] = renderer.chats([chat[: end + 1]])
        with lock:
            values = scores(scorer, list(rendered.values()), config.train.tokens_per_microbatch)
        by_key = dict(zip(rendered, values, strict=True))

        def with_score(row: int, episode: Episode) -> Episode:
            if (score := by_key.get((row, episode.sample_index))) is None:
                return episode
            return replace(episode, env_rewards={**episode.env_rewards, "reward_model": score})

        return [
            tuple(with_score(row, episode) for episode in group)
            for row, group in enumerate(episodes)
        ]

    return score
