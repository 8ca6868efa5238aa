"""The program of the process that writes checkpoints beside a rank: ``python -m ... DESCRIPTOR MEMORY PARENT``."""

import ctypes
import os
import signal
import sys
from multiprocessing.connection import Connection

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""What asks the run to save or to end goes to its rank alone, which waits for this process."""

_PR_SET_PDEATHSIG = 1


def main(descriptor: int, memory: int, parent: int) -> None:
    """Serve the process ``parent`` over the socket ``descriptor`` until it ends."""
    shield(parent)
    from domino_lm.checkpoint.background_writing import serve  # from here on, since torch takes seconds

    serve(Connection(descriptor), memory)


def shield(parent: int) -> None:
    """Ignore signals that are meant for the run, and be killed when ``parent`` dies, however it does."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before this was asked for
        os._exit(1)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
