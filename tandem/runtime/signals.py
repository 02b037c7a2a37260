"""Ctrl-C and a polite kill (SIGTERM): the first ends a run in good order within EXIT_S, a second
one at once.

    the system    main thread, between two lines of Python   the thread "signals"
    ----------    ----------------------------------------   --------------------
    a signal  ->  _Section.handle: KeyboardInterrupt, or, -> reads the signal from a pipe, also
                  inside defer_interrupts(), at the          while the main thread is in C; after a
                  section's end or limit_s later,            second one, or EXIT_S: all processes
                  whichever comes first                      that were started are killed, exit 130

A handler of Python runs in the main thread only, when that is between two lines: a call in C that
takes a minute delays the KeyboardInterrupt by a minute, and nothing can raise it sooner. Hence the
thread. It does not know what a run saves; a kill harms nothing that is saved (see runtime/disk.py).
"""

import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType

from tandem.runtime.processes import kill_descendants, write_report

EXIT_CODE = 130
EXIT_S = 10.0  # from the first signal to the end of the process
DEFER_S = 5.0  # from the first signal to its KeyboardInterrupt, at most
# a shell or a launcher may repeat the terminal's signal: not a second one
AGAIN_S = 0.2
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def handle_signals() -> Iterator[None]:
    """Handle the signals of a run, with SIGALRM and its timer.

    Does nothing outside the main thread, where no signal arrives. After a signal the handlers stay
    when the context ends: EXIT_S and the second signal are about the whole process, the
    interpreter's own end included, which waits for threads.
    """
    if not _in_main_thread():
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    thread = threading.Thread(target=_kill_at_second, args=(reading,), name="signals", daemon=True)
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


def defer_interrupts(limit_s: float = DEFER_S) -> AbstractContextManager[None]:
    """Defer the KeyboardInterrupt of a first signal to the end of the section, or to limit_s after
    the signal.

    Example: with defer_interrupts(): optimizer.update(); progress.steps += 1
    """
    return _section.within((*_section.limits, limit_s)) if _in_main_thread() else nullcontext()


def allow_interrupts() -> AbstractContextManager[None]:
    """Allow interrupts again inside a deferring section, for a wait that leaves nothing half
    done."""
    return _section.within(()) if _in_main_thread() else nullcontext()


def _in_main_thread() -> bool:
    """Tell whether this is the main thread, the only one with a KeyboardInterrupt."""
    return threading.current_thread() is threading.main_thread()


class _Section:
    """The main thread's current section.

    limits: seconds of the deferring sections, the innermost last; signalled: a first signal came.
    """

    def __init__(self) -> None:
        self.limits: tuple[float, ...] = ()
        self.signalled = False
        self._pending = False

    @contextmanager
    def within(self, limits: tuple[float, ...]) -> Iterator[None]:
        before, self.limits = self.limits, limits
        try:
            self.deliver()
            yield
        finally:
            self.limits = before
            self.deliver()

    def handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGALRM:
            self._raise()
        elif not self.signalled:  # the thread takes care of a second one
            self.signalled = self._pending = True
            if self.limits:
                signal.setitimer(signal.ITIMER_REAL, min(self.limits))
            else:
                self._raise()

    def deliver(self) -> None:
        """Raise the deferred interrupt, unless an outer section still defers it."""
        if not self.limits:
            self._raise()

    def _raise(self) -> None:
        if self._pending:
            self._pending = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt


_section = _Section()  # one, because signals are the process's


def _kill_at_second(pipe: int) -> None:
    """Read signals from the pipe until it is closed; each one with a handler is a byte in it."""
    first = 0.0
    while True:
        left = first + EXIT_S - time.monotonic() if first else None
        if not select.select([pipe], [], [], None if left is None else max(0.0, left))[0]:
            _kill(f"not ended {EXIT_S:.0f} s after the signal")
        received = os.read(pipe, 1)
        if not received:
            return
        if received[0] in SIGNALS:
            if first and time.monotonic() - first > AGAIN_S:
                _kill("a second signal")
            first = first or time.monotonic()


def _kill(reason: str) -> None:
    write_report(f"\n{reason}: ended; the same command resumes from the last checkpoint\n", None)
    kill_descendants(os.getpid())
    os._exit(EXIT_CODE)
