"""Ctrl-C and a polite kill (SIGTERM): the first ends a run in good order within EXIT_S, a second
one at once.

    the system            main thread, between two lines of Python          the thread "signals"
    ----------            ----------------------------------------          --------------------
    a signal   ------->   _Signals._handle: KeyboardInterrupt, or,     ->   reads the same signal from a pipe,
                          inside held(), at the section's end or            also while the main thread is in C:
                          limit_s later, whichever comes first              a second one, or EXIT_S: all processes
                                                                            that were started are killed, exit 130

A handler of Python runs in the main thread only, when that is between two lines: a call in C that
takes a minute delays the KeyboardInterrupt by a minute, and nothing can raise it sooner. That is
what the thread is for. It does not know what a run saves; nothing that a kill can harm is left to
it (see runtime/disk.py).
"""

import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from tandem.runtime.processes import end_descendants, tell

EXIT_CODE = 130
EXIT_S = 10.0  # from the first signal to the end of the process
# a shell or a launcher that passes on what the terminal has sent already is no second signal
AGAIN_S = 0.2
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def on_signals() -> Iterator[None]:
    """Around a run, in the main thread; elsewhere no signal arrives and nothing is done. Uses
    SIGALRM and its timer.

    After a signal all stays as it is when the context ends: EXIT_S and the second signal are about
    the whole process, the interpreter's own end included, which waits for threads.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    thread = threading.Thread(
        target=_end_at_the_second, args=(reading,), name="signals", daemon=True
    )
    thread.start()
    handlers = {
        number: signal.signal(number, _section.handle) for number in (*SIGNALS, signal.SIGALRM)
    }
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield
    finally:
        if not _section.signalled:
            signal.set_wakeup_fd(before)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            os.close(writing)
            thread.join()
            os.close(reading)


@contextmanager
def held(limit_s: float = 5.0) -> Iterator[None]:
    """A section that a first signal does not cut in two: KeyboardInterrupt comes at its end, or
    limit_s after the signal.

    Example: with held(): optimizer.update(); progress.steps += 1
    """
    if threading.current_thread() is not threading.main_thread():  # there is no KeyboardInterrupt
        yield
        return
    with _section.within((*_section.limits, limit_s)):
        yield


@contextmanager
def interruptible() -> Iterator[None]:
    """A part of a held section that a signal does cut, at once: nothing there is half done, however
    long it takes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _section.within(()):
        _section.deliver()
        yield


class _Section:
    """What the main thread is in. limits: of the held sections, the innermost last; signalled: the
    first one has come."""

    def __init__(self) -> None:
        self.limits: tuple[float, ...] = ()
        self.signalled = False
        self._pending = False

    @contextmanager
    def within(self, limits: tuple[float, ...]) -> Iterator[None]:
        before, self.limits = self.limits, limits
        try:
            yield
        finally:
            self.limits = before
            self.deliver()

    def handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGALRM:
            self._raise()
        elif not self.signalled:  # of a second one the thread takes care
            self.signalled = self._pending = True
            if self.limits:
                signal.setitimer(signal.ITIMER_REAL, min(self.limits))
            else:
                self._raise()

    def deliver(self) -> None:
        """Raise what was held back, unless it still is."""
        if not self.limits:
            self._raise()

    def _raise(self) -> None:
        if self._pending:
            self._pending = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt


_section = _Section()  # signals are the process's


def _end_at_the_second(pipe: int) -> None:
    """Until the pipe is closed, every signal that has a handler is a byte in it."""
    first = 0.0
    while True:
        left = first + EXIT_S - time.monotonic() if first else None
        if not select.select([pipe], [], [], None if left is None else max(0.0, left))[0]:
            _end(f"not ended {EXIT_S:.0f} s after the signal")
        received = os.read(pipe, 1)
        if not received:
            return
        if received[0] in SIGNALS:
            if first and time.monotonic() - first > AGAIN_S:
                _end("a second signal")
            first = first or time.monotonic()


def _end(why: str) -> None:
    tell(f"\n{why}: ended; the same command resumes from the last checkpoint\n", None)
    end_descendants(os.getpid())
    os._exit(EXIT_CODE)
