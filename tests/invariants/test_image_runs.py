"""P2 for models that read images: a killed run, started again by the same command, ends with the
same bytes as one that was never stopped, its images and the state of its checkpoint among them.

More kinds of such runs are killed in test_same_bits.py.
"""

import hashlib
import signal
import time

import pytest

from tests.support.runs import IMAGES, Forks, fingerprint, prepare, run

STEPS = 5


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    command = prepare(folder, steps=STEPS, command="images")
    _, seconds = run(command, folder / "run")
    return command, left_by(folder / "run"), seconds


def left_by(folder):
    """Hashes of `fingerprint`, of the images and of the last checkpoint's state."""
    files = [max(folder.glob("checkpoints/step_*")) / "state.json", *kept(folder)]
    hashes = {f.relative_to(folder): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}
    return {**fingerprint(folder), **hashes}


def kept(folder):
    """Files of the image store; a kill may leave the beginning of one, whose name has a dot."""
    return sorted(folder.glob("images/[!.]*"))


def test_kill_while_images_are_stored_leaves_no_trace(undisturbed, tmp_path):
    command, expected, _ = undisturbed
    assert len([name for name in expected if "images" in str(name)]) == IMAGES
    folder = tmp_path / "killed"
    killed = Forks().start(command, folder)
    while killed.is_alive() and len(kept(folder)) < 3:
        time.sleep(0.0005)
    killed.kill()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL and 3 <= len(kept(folder)) < IMAGES
    run(command, folder)
    assert left_by(folder) == expected
