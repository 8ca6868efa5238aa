"""A small process that kills ranks of its node that cannot run, for nodes on which no other rank could: takes descriptors of their cells.

Started by `start_guard` where a job has several nodes. It ends with the last rank.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from domino_lm.parallel.board import mapped, process_of
from domino_lm.parallel.progress import Cell, Cells
from domino_lm.watch.hang_timeout import HangTimeout

LOOK_EVERY_S = 0.5
GRACE_S = 3.0
"""Beyond a rank's own limit: the ranks of other nodes say first why the job ends."""


def start_guard(descriptors: Sequence[int], timeout: HangTimeout) -> None:
    """Start the process for ranks whose cells are behind ``descriptors``; signals for the ranks do not reach it."""
    numbers = [repr(timeout.seconds), repr(timeout.collectives_s), repr(timeout.collectives_after_start_s), repr(timeout.least_s)]
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    subprocess.Popen(
        [sys.executable, "-m", "domino_lm.watch.guard", *numbers, *map(str, descriptors)],
        env=environment,
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def watch(ranks: Sequence[Cells], timeout: HangTimeout, every_s: float = LOOK_EVERY_S) -> None:
    """Kill each of ``ranks`` whose beat stands still for longer than ``timeout`` lets it; returns when all have ended."""
    beats, silent_s = [cells[Cell.BEAT] for cells in ranks], [0.0] * len(ranks)
    while any(process_of(cells) for cells in ranks):
        time.sleep(every_s)
        for number, cells in enumerate(ranks):
            moved = cells[Cell.BEAT] != beats[number]
            beats[number] = cells[Cell.BEAT]
            silent_s[number] = 0.0 if moved or cells[Cell.ENDED] else silent_s[number] + every_s
            if silent_s[number] > timeout.silent_s(cells) + GRACE_S and process_of(cells):
                os.kill(cells[Cell.PID], signal.SIGKILL)


def main(words: Sequence[str]) -> int:
    """Watch the cells behind the descriptors in ``words``, which begin with the four numbers of a `HangTimeout`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    seconds = None if words[0] == "None" else float(words[0])
    whole_s, after_start_s, least_s = map(float, words[1:4])
    watch([mapped(int(each)) for each in words[4:]], HangTimeout(seconds, whole_s, after_start_s, least_s))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
