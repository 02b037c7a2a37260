"""Saves beside training: the moment of `save` is what is saved, one at a time, and errors reach the
trainer."""

import errno
import threading

import pytest
import torch

from chaos.checkpoints import at_once, beside, content, contents, names, newest, what_is
from tandem.run_folder.checkpoint import Saver, latest_checkpoint, load_checkpoint
from tandem.runtime.disk import Disk
from tandem.runtime.errors import UserError
from tests.support.faults import RefusingDisk

SECONDS = 60  # a generous deadline: reached only by what hangs


@pytest.fixture
def journal():
    """Durable when set; a save waits for it, and a test that fails does not leave the saver
    waiting."""
    event = threading.Event()
    yield event
    event.set()


def begin(saver, folder, step, journal=None):
    saver.save(folder, contents(step, *content(step), before_write=lambda: waited(journal)))


def waited(event):
    assert event is None or event.wait(SECONDS)


def savers():
    return [thread for thread in threading.enumerate() if thread.name == "saver"]


def expected(place, step):
    return what_is(at_once(place / "expected", step))


def test_save_holds_the_moment_of_the_call(tmp_path, journal):
    tensors, state = content(12)
    with Saver() as saver:
        saver.save(
            tmp_path / "a", contents(12, tensors, state, before_write=lambda: waited(journal))
        )
        for named in tensors.values():
            for tensor in named.values():
                tensor.zero_()
        state["cursor"].append("later")
        tensors["policy"].clear()
        journal.set()
    assert newest(tmp_path / "a") == expected(tmp_path, 12)


def test_the_bytes_are_those_of_a_save_that_training_waits_for(tmp_path):
    beside(tmp_path / "beside", 7)
    at_once(tmp_path / "at_once", 7)
    paths = [tmp_path / name / "step_000007" for name in ("beside", "at_once")]
    assert names(paths[0]) == names(paths[1])
    assert all(
        (paths[0] / name).read_bytes() == (paths[1] / name).read_bytes() for name in names(paths[0])
    )


def test_a_save_waits_for_the_one_before(tmp_path, journal):
    events = []

    class Recorder(Disk):
        def write(self, path, save):
            events.append(path.parent.name)
            super().write(path, save)

        def rename(self, source, target):
            events.append(target.name)
            super().rename(source, target)

    with Saver(Recorder()) as saver:
        begin(saver, tmp_path, 1, journal)
        threading.Timer(0.2, journal.set).start()
        begin(saver, tmp_path, 2)
        assert latest_checkpoint(tmp_path, print) is not None and len(savers()) <= 1
    assert events == [".tmp-step_000001"] * 4 + ["step_000001"] + [".tmp-step_000002"] * 4 + [
        "step_000002"
    ]


def full():
    return RefusingDisk(1, errno.ENOSPC)


def test_error_of_a_save_is_raised_once_by_the_next_one(tmp_path):
    at_once(tmp_path, 10)
    saver = Saver(full())
    begin(saver, tmp_path, 20)
    with pytest.raises(UserError, match="the disk is full") as caught:
        begin(saver, tmp_path, 30)
    assert "No space left" in caught.value.found and caught.value.next
    saver.wait()
    assert names(tmp_path) == ["step_000010"]
    assert newest(tmp_path) == expected(tmp_path, 10)


def test_leaving_by_an_exception_finishes_the_save(tmp_path, journal):
    with pytest.raises(KeyboardInterrupt), Saver() as saver:
        begin(saver, tmp_path, 20, journal)
        threading.Timer(0.2, journal.set).start()
        raise KeyboardInterrupt
    assert newest(tmp_path) == expected(tmp_path, 20)


def test_exception_in_training_comes_before_that_of_the_save(tmp_path):
    with pytest.raises(ZeroDivisionError) as caught, Saver(full()) as saver:
        begin(saver, tmp_path, 20)
        raise ZeroDivisionError
    assert "the disk is full" in caught.value.__notes__[0]


def test_before_write_runs_in_the_saver_and_its_error_is_raised(tmp_path):
    threads = []

    def before_write():
        threads.append(threading.current_thread().name)
        raise UserError("the journal is gone")

    saver = Saver()
    saver.save(tmp_path, contents(1, *content(1), before_write=before_write))
    with pytest.raises(UserError, match="journal"):
        saver.wait()
    assert threads == ["saver"] and names(tmp_path) == []


def test_saver_thread_that_dies_is_an_error(tmp_path):
    class Panic(BaseException):
        """An error such as a library in Rust raises."""

    def before_write():
        raise Panic

    hook, threading.excepthook = threading.excepthook, lambda _: None
    try:
        saver = Saver()
        saver.save(tmp_path, contents(1, *content(1), before_write=before_write))
        with pytest.raises(RuntimeError, match="step 1 died"):
            saver.wait()
    finally:
        threading.excepthook = hook


def test_gradients_strides_and_types_are_kept(tmp_path):
    weight = torch.randn(4, 3).T.requires_grad_()
    with Saver() as saver:
        saver.save(tmp_path, contents(1, {"policy": {"w": weight, "n": torch.tensor(3)}}, {}))
    loaded = load_checkpoint(tmp_path / "step_000001")[0]["policy"]
    assert torch.equal(loaded["w"], weight) and torch.equal(loaded["n"], torch.tensor(3))
