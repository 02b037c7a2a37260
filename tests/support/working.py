"""Requests, and workers without a model to serve them (odd_worker.py), for tests of Workers.
Imports no torch."""

import time
from contextlib import closing, contextmanager

import numpy as np

from tandem.rollout_workers.client import Client
from tandem.rollout_workers.pool import COMMAND, ENVIRONMENT, EngineSpec, Workers
from tandem.runtime.rng import address
from tandem.types import Request, SamplingParams
from tandem.workers.host import LocalHosts
from tandem.workers.pool import Limits
from tests.support.odd_worker import LightEngine, LightWeights, odd_command
from tests.support.waiting import WAIT_S

LONGEST = 256
LIMITS = Limits(silent_s=60.0, restarts=2)


def request(number, prompt=(5, 9, 2), **params):
    return Request(
        key=address("workers", number),
        prompt=np.array(prompt, np.int64),
        params=SamplingParams(**{"max_new_tokens": 20, **params}),
    )


def groups(count, size=4, **params):
    """Requests of count prompts, size of each."""
    return [request(n, (5, 9, 2, n // size), **params) for n in range(count * size)]


def bits(completion, *, text=False):
    """Everything of a completion; an odd worker's text says who made it."""
    names = "tokens", "logprobs", "weight_versions", "top_tokens", "top_logprobs", "experts"
    arrays = [getattr(completion, name) for name in names]
    held = [(array.tobytes(), array.shape) for array in arrays]
    return held, completion.stop_reason, completion.text * text


def run(workers, requests):
    return finish(workers, [workers.submit(request) for request in requests])


def finish(workers, tickets, *others):
    """Completions of the tickets."""
    until(workers, lambda: all(ticket.completion for ticket in tickets), *others)
    return [ticket.completion for ticket in tickets]


def until(workers, condition, *others):
    """Step until it holds; others: clients that step beside it."""
    ends = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < ends
        for one in (workers, *others):
            one.step()


def processes(workers):
    return sorted(workers._workers.copy().values(), key=lambda worker: worker.number)


def all_idle(workers):
    return {worker.state for worker in processes(workers)} == {"idle"}


def requests_served_again(reports):
    """Count the requests of lost workers, by the reports of the losses."""
    return sum(int(report.rpartition(" of its requests")[0].split()[-1]) for report in reports)


class PoolOfOne(Client):
    """A pool with one client: it has the attributes of both."""

    def apply(self, version):
        """Return once the workers that are up are told."""
        super().apply(version)
        self._pool.call(self._pool._dispatch)

    def __getattr__(self, name):
        return getattr(self._pool, name)


@contextmanager
def open_workers(spec, weights, reports, command=COMMAND, *, count=1, limits=LIMITS, forks=True):
    """Workers of this machine."""
    preload = spec.model_path if forks else None
    with (
        closing(LocalHosts(command, ENVIRONMENT, preload)) as local,
        Workers(
            spec, weights, local.open, count=count, limits=limits, report=reports.append
        ) as pool,
    ):
        workers = PoolOfOne(pool, checks=False)
        workers.reports = reports
        yield workers


def expected_of(workers, version, requests):
    """The results of one engine in this process for the same requests, by that version."""
    engine = LightEngine()
    engine.version, engine.weights = version, workers.published.hash_of(version)
    running = [engine.submit(request) for request in requests]
    while engine.has_work:
        for one in list(engine.running):
            engine.sample(one)
    return [bits(one.completion) for one in running]


@contextmanager
def odd_workers(
    *,
    fault="none",
    file="",
    count=2,
    heartbeat_s=30.0,
    restarts=0,
    max_batch=16,
    version=0,
    idle=False,
):
    """reports: lines about lost workers; published: the weights, of versions 0 and 1; version: that
    they run, None for none yet; idle: once they are up."""
    weights, reports = LightWeights(), []
    weights.publish(0, b"weights of version 0")
    weights.publish(1, b"weights of version 1")
    spec = EngineSpec(model_path="", cache_mb=1, max_batch=max_batch, longest=LONGEST)
    limits = Limits(silent_s=heartbeat_s, restarts=restarts)
    with open_workers(
        spec, weights, reports, odd_command(fault, file), count=count, limits=limits
    ) as workers:
        workers.published = weights
        if version is not None:
            workers.apply(version)
        if idle:
            until(workers, lambda: all_idle(workers))
        yield workers
