"""Workers that join and leave (`tandem scale`): processes without a model."""

import os
import signal

from tandem.runtime.processes import state_of
from tests.support.working import all_idle, bits, groups, odd_workers, processes, run, until


def test_workers_join_and_leave_between_requests_with_the_same_bits():
    with odd_workers(count=1) as workers:
        expected = [bits(completion) for completion in run(workers, groups(4))]
        pids = [worker.pid for worker in processes(workers)]
        workers.resize(3)
        until(workers, lambda: all_idle(workers))
        assert workers.count == 3 and processes(workers)[0].pid == pids[0]
        done = run(workers, groups(4))
        assert [bits(completion) for completion in done] == expected
        assert len({completion.text for completion in done}) > 1  # who made it
        left = [worker.pid for worker in processes(workers)][1:]
        workers.resize(1)
        assert [worker.pid for worker in processes(workers)] == pids
        until(workers, lambda: not any(state_of(pid) for pid in left))
        assert [bits(completion) for completion in run(workers, groups(4))] == expected


def test_who_leaves_hands_on_its_requests_with_the_same_bits():
    with odd_workers(count=3) as workers:
        until(workers, lambda: all_idle(workers))
        expected = [bits(completion) for completion in run(workers, groups(6))]
        tickets = [workers.submit(request) for request in groups(6)]
        until(workers, lambda: all(worker.tickets for worker in processes(workers)))
        workers.resize(1)
        until(workers, lambda: all(ticket.completion is not None for ticket in tickets))
        assert [bits(ticket.completion) for ticket in tickets] == expected
        assert workers.restarts.used == 0 and len(processes(workers)) == 1


def test_the_status_tells_who_runs_where_and_what_was_lost():
    with odd_workers(count=2, restarts=1) as workers:
        until(workers, lambda: all_idle(workers))
        run(workers, groups(2))
        first, second = workers.status()
        assert (first["role"], second["role"]) == ("rollout worker 0", "rollout worker 1")
        assert first["requests"] + second["requests"] == 8
        assert {first["state"], second["state"]} == {"idle"} and first["version"] == 0
        os.kill(second["pid"], signal.SIGKILL)
        until(workers, lambda: workers.status()[1]["restarts"] == 1)
        assert workers.status()[0] == first and workers.status()[1]["pid"] != second["pid"]
