"""Signals that reach this process at once, whatever its main thread waits for."""

import os
import signal
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self


class SignalWatch:
    """While entered, each of ``signals`` calls ``received`` with its number, from a thread.

    A handler of Python's runs once the main thread is back in the interpreter, which a collective or a write to disk may keep it
    from for minutes; the thread is told by the system's own handler. Processes forked meanwhile ignore the signals, since a
    terminal sends them to all of its processes; SIGTERM ends such a process as ever. Signals that were ignored before stay so,
    as ``nohup`` wants it, unless they are among ``always``. Does nothing outside the main thread.
    """

    def __init__(self, signals: Sequence[int], received: Callable[[int], None], always: Sequence[int] = ()) -> None:
        self._signals, self._received, self._always = signals, received, always
        self._before: dict[int, Any] = {}
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        taken = [number for number in self._signals if signal.getsignal(number) is not signal.SIG_IGN or number in self._always]
        self._told, self._tell = os.pipe()
        os.set_blocking(self._tell, False)
        self._thread = threading.Thread(target=self._run, name="signals", daemon=True)
        self._thread.start()
        self._wakeup_before = signal.set_wakeup_fd(self._tell, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, _do_nothing) for number in taken}
        watch = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _leave_to_parent(watch()))
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is None:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.write(self._tell, b"\0")
        self._thread.join()
        self._thread = None
        for descriptor in (self._told, self._tell):
            os.close(descriptor)

    def _run(self) -> None:
        while number := os.read(self._told, 1)[0]:
            if number in self._before:
                self._received(number)

    def _ignore(self) -> None:
        if self._thread is None:
            return
        signal.set_wakeup_fd(-1)
        for number in self._before:
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)


def _leave_to_parent(watch: SignalWatch | None) -> None:
    if watch is not None:
        watch._ignore()


def _do_nothing(*_: object) -> None:
    """A handler has to be there for the system to tell of a signal."""
