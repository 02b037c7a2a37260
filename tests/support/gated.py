"""A run that does as many steps as tests allow: its reward (plugins/cluster/conftest.py) waits."""

import json
from contextlib import contextmanager

from tandem.run_folder.status import read_status
from tandem.runtime.processes import started_at
from tests.support.waiting import eventually

DEADLINE_S = 240.0


def until(condition):
    found = eventually(condition, within_s=DEADLINE_S)
    assert found
    return found


@contextmanager
def gated(run):
    """Yields allow(steps): lets the run do so many steps, and waits for them. The next one is held
    where its episodes are scored, so what happens then is seen in the step behind it, in any case.
    Afterwards the run goes on."""
    gate = run.parent / "gate.json"

    def write(steps):
        temporary = gate.with_suffix(".tmp")
        temporary.write_text(json.dumps({"run": str(run), "steps": steps}))
        temporary.replace(gate)

    def allow(steps):
        write(steps)
        until(lambda: (read_status(run) or {"step": 0})["step"] == steps)

    write(0)
    try:
        yield allow
    finally:
        write(1 << 30)


def until_gone(pid):
    until(lambda: not started_at(pid))
