"""Dispatch of requests and weights to rollout workers: no process, no clock."""

import itertools
from dataclasses import dataclass, field

import numpy as np

from tandem.engine.dispatch import Dispatcher
from tandem.types import Completion, Request, SamplingParams


@dataclass(eq=False)
class FakeWorker:
    """A worker by hand: it has loaded what it was told when `runs_target` is set."""

    number: int
    target: int = -1
    runs_target: bool = False
    ready: bool = True
    tickets: dict = field(default_factory=dict)


class Play:
    """A dispatcher with workers that do what a test says."""

    def __init__(self, count, max_batch=16, version=-1):
        self.dispatcher = Dispatcher(max_batch, longest=2)
        self.keys = itertools.count()
        self.workers = [FakeWorker(n, version, version >= 0) for n in range(count)]

    def ask(self, queue, count, prompt=0, key=None):
        """Let that many requests of a prompt wait."""
        params = SamplingParams(max_new_tokens=1)
        for _ in range(count):
            own = next(self.keys) if key is None else key
            request = Request(key=own, prompt=np.array([prompt]), params=params)
            self.dispatcher.add(self.dispatcher.ticket(request, queue))

    def dispatch(self, loads=True):
        """Let the pool act; loads: weights are there at once."""
        for version, movers in self.dispatcher.switches(self.workers).items():
            for worker in movers:
                assert not worker.tickets
                worker.target, worker.runs_target = version, loads
        given = self.dispatcher.assign(self.workers)
        for worker, ticket in given:
            assert worker.runs_target and worker.target == ticket.queue.version
        return [(worker.number, ticket.number) for worker, ticket in given]

    def end(self, worker, number=None):
        """End one ticket of a worker, or all."""
        for one in [*worker.tickets] if number is None else [number]:
            worker.tickets.pop(one).completion = "any"

    def loads(self):
        return [len(worker.tickets) for worker in self.workers]

    def targets(self):
        return [worker.target for worker in self.workers]


def test_tickets_are_spread_evenly_over_the_workers_of_their_version():
    play = Play(4)
    queue = play.dispatcher.open(0)
    play.dispatch()
    assert play.targets() == [0, 0, 0, 0]  # before there is a request
    for prompt in range(8):
        play.ask(queue, 1, prompt)
    play.dispatch()
    assert play.loads() == [2, 2, 2, 2] and not play.dispatcher.num_waiting


def test_one_prefix_goes_to_one_worker_as_long_as_that_is_even():
    play = Play(2)
    queue = play.dispatcher.open(0)
    for prompt in range(4):
        play.ask(queue, 4, prompt)
    given = play.dispatch()
    home = {}
    for worker, ticket in given:
        home.setdefault(ticket // 4, set()).add(worker)
    assert all(len(workers) == 1 for workers in home.values()) and play.loads() == [8, 8]
    play = Play(2)
    play.ask(play.dispatcher.open(0), 8, prompt=7)
    play.dispatch()
    assert play.loads() == [4, 4]


def test_a_worker_has_no_more_tickets_than_it_runs_at_once():
    play = Play(2, max_batch=3)
    play.ask(play.dispatcher.open(0), 10)
    play.dispatch()
    assert play.loads() == [3, 3] and play.dispatcher.num_waiting == 4
    play.end(play.workers[1], next(iter(play.workers[1].tickets)))
    assert len(play.dispatch()) == 1 and play.loads() == [3, 3]


def test_a_straggler_keeps_its_worker_and_no_other():
    play = Play(3, version=0)
    old = play.dispatcher.open(0)
    play.ask(old, 6)
    play.dispatch()
    for worker in play.workers[:2]:
        play.end(worker)
    play.end(play.workers[2], next(iter(play.workers[2].tickets)))
    new = play.dispatcher.open(1)
    play.dispatch()
    assert play.targets().count(1) == 1  # its first worker loads before the requests come
    play.ask(new, 8)
    play.dispatch()
    assert play.targets() == [1, 1, 0] and play.loads() == [4, 4, 1]
    play.end(play.workers[2])
    play.dispatcher.close(old)
    play.ask(new, 3)
    play.dispatch()
    assert play.targets() == [1, 1, 1] and sorted(play.loads()) == [3, 4, 4]


def test_a_version_keeps_a_worker_until_its_queue_is_closed():
    """The next turn of an episode may come."""
    play = Play(1, version=0)
    old = play.dispatcher.open(0)
    play.ask(old, 1, key=5)
    play.dispatch()
    play.end(play.workers[0])
    new = play.dispatcher.open(1)
    play.ask(new, 4)
    assert play.dispatch() == [] and play.targets() == [0]
    play.ask(old, 1, key=5)
    assert len(play.dispatch()) == 1 and play.targets() == [0]
    play.end(play.workers[0])
    play.dispatcher.close(old)
    assert len(play.dispatch()) == 4 and play.targets() == [1]


def test_with_one_worker_for_two_versions_the_older_comes_first():
    play = Play(2)
    old, new = play.dispatcher.open(3), play.dispatcher.open(4)
    play.ask(new, 4)
    play.ask(old, 4)
    play.workers[1].ready = False
    play.dispatch()
    assert play.targets() == [3, -1] and play.loads() == [2, 0]  # the other starts


def test_a_later_turn_goes_to_a_worker_of_its_version_that_has_room():
    """It draws no worker from newer requests."""
    play = Play(3, version=0)
    old = play.dispatcher.open(0)
    play.ask(old, 1, key=5)
    play.dispatch()
    new = play.dispatcher.open(1)
    play.ask(new, 2)
    play.dispatch()
    assert sorted(play.targets()) == [0, 1, 1]
    home = next(worker for worker in play.workers if worker.target == 0)
    for worker in play.workers:
        if worker is not home:
            play.end(worker)
    play.ask(old, 1, key=6)
    assert [worker for worker, _ in play.dispatch()] == [home.number]
    assert sorted(play.targets()) == [0, 1, 1]


def test_a_worker_whose_tickets_wait_is_not_taken_by_a_newer_version():
    play = Play(2, version=0)
    play.ask(play.dispatcher.open(0), 2)
    play.dispatcher.open(1)
    assert len(play.dispatch()) == 2 and play.targets() == [0, 0]


def test_a_version_without_a_worker_takes_the_only_one_of_a_newer():
    play = Play(1, version=1)
    old = play.dispatcher.open(0)
    play.ask(play.dispatcher.open(1), 1)
    play.dispatch()
    assert play.targets() == [0] and play.loads() == [0]
    play.ask(old, 1)
    assert len(play.dispatch()) == 1


def test_tickets_of_a_lost_worker_are_the_next_of_their_queues():
    play = Play(2, max_batch=2)
    queue = play.dispatcher.open(0)
    play.ask(queue, 8)
    play.dispatch()
    lost = play.workers.pop(0)
    numbers = list(lost.tickets)
    next(iter(lost.tickets.values())).completion = Completion  # it was cancelled
    assert play.dispatcher.put_back(lost) == 1
    assert [ticket.number for ticket in queue.waiting][:1] == numbers[1:]
    assert lost not in queue.affinity.values()


def test_a_lost_workers_version_takes_another_from_newer_requests():
    play = Play(3, version=0)
    old, new = play.dispatcher.open(0), play.dispatcher.open(1)
    play.ask(old, 1)
    play.dispatch()
    play.ask(new, 2)
    play.dispatch()
    lost = next(worker for worker in play.workers if worker.target == 0)
    play.workers.remove(lost)
    play.dispatcher.put_back(lost)
    first = play.workers[0]
    play.dispatch()
    assert play.dispatcher.num_waiting == 1  # both have requests of the newer version
    play.end(first)
    play.dispatch()
    assert first.target == 0 and not play.dispatcher.num_waiting
