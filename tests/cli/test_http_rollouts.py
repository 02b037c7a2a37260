"""`tandem train` with rollouts by `tandem serve`, both as a user runs them."""

import re
import subprocess
import sys
from contextlib import contextmanager

from tests.support.command import tandem
from tests.support.runs import prepare
from tests.support.waiting import WAIT_S

WEIGHTS = "checkpoints/step_000002/policy.safetensors"


@contextmanager
def serving(model, log, *options):
    """The URL of `tandem serve` over a model; its log is in a file."""
    command = [sys.executable, "-m", "tandem", "serve", model, "--port", "0", "--cache-mb", "16"]
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            [*command, *options], stdout=subprocess.PIPE, stderr=stderr, text=True
        ) as it,
    ):
        try:
            line = it.stdout.readline()
            assert line, log.read_text()
            yield re.search(r"http://127\.0\.0\.1:\d+", line).group()
            it.terminate()
            assert it.wait(WAIT_S) == 0
        finally:
            it.kill()


def test_a_server_that_keeps_its_weights_is_refused_before_anything_is_evaluated(tmp_path):
    command = prepare(tmp_path, steps=2)
    with serving(tmp_path / "model", tmp_path / "log") as url:
        options = [f"rollout.engine={url}/v1", f"run.folder={tmp_path / 'run'}"]
        code, _, stderr = tandem(*command[3:], *options, cwd=tmp_path)
    assert code == 2 and "it keeps its weights" in stderr and "--allow-weight-updates" in stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
