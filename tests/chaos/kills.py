"""Programs that train and are killed, stopped or asked to stop at moments that nobody chose."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.chaos.campaign import Fault
from tests.chaos.rig import STEPS, Rig, children, gone_within, kill, last_saved, read_until, rest_of, resumed_from

Victims = Callable[[list[int], random.Random], list[int]]
"""Which of the processes that torchrun started, and which else, are killed."""

IN_A_SAVE, IN_A_STEP, AT_THE_START = r"^saving checkpoint", r" iteration +\d+/", ""


def killed(rig: Rig, rng: random.Random, moment: str, ranks: int = 1, which: str = "all") -> None:
    """SIGKILL, then the same command again: it goes on from no earlier than the last save, and ends to the bit as if nothing had been."""
    save = rig.work / "save"
    process = rig.start(save, ranks)
    text = wait_for(moment, process, rng)
    mine = children(process.pid) if ranks > 1 else []
    victims = {"all": [*mine, process.pid], "one": [rng.choice(mine or [process.pid])], "launcher": [process.pid]}[which]
    kill(victims)
    out, _ = rest_of(process)
    assert gone_within([*mine, process.pid], 30), f"processes stayed: {mine}"
    go_on(rig, save, ranks, last_saved(text + out))


def wait_for(moment: str, process: object, rng: random.Random) -> str:
    """Let the program run to one of the moments, and a little further; gives what it printed."""
    if moment == AT_THE_START:
        time.sleep(rng.uniform(0, 4))
        return ""
    text = "".join(read_until(process, moment) for _ in range(rng.randint(1, 8)))  # type: ignore[arg-type]
    time.sleep(rng.uniform(0, 0.03))
    return text


def go_on(rig: Rig, save: Path, ranks: int, saved: int) -> None:
    """The command again, after an end that ``saved`` iterations were known to be saved at."""
    if save.exists():
        rig.require_whole(save, ranks)
    code, text = rig.train(save, ranks)
    assert code == 0, text
    assert resumed_from(text) >= saved, f"iteration {saved} was saved, and the run went on from {resumed_from(text)}"
    assert "warning" not in text, text
    rig.require_end(save, ranks)


def killed_again_and_again(rig: Rig, rng: random.Random) -> None:
    """The run that goes on is killed too, and the one after it."""
    save, saved = rig.work / "save", 0
    for _ in range(3):
        process = rig.start(save)
        text = read_until(process, rng.choice([IN_A_SAVE, IN_A_STEP]))
        time.sleep(rng.uniform(0, 0.1))
        kill([process.pid])
        out, _ = rest_of(process)
        assert resumed_from(text + out) >= saved or "resumed" not in text + out
        saved = max(saved, last_saved(text + out))
    go_on(rig, save, 1, saved)


def asked_to_stop(rig: Rig, rng: random.Random, ranks: int = 1) -> None:
    """SIGTERM at a step: saved once, exit code 0, and the next run goes on where it ended."""
    save = rig.work / "save"
    process = rig.start(save, ranks)
    text = "".join(read_until(process, IN_A_STEP) for _ in range(rng.randint(1, 8)))
    process.send_signal(signal.SIGTERM)
    out, error = rest_of(process)
    assert "/domino_lm/" not in error, error  # torchrun prints a traceback of its own
    text += out
    if ranks == 1:
        assert process.returncode == 0, text + error
    go_on(rig, save, ranks, last_saved(text))


def stood_still(rig: Rig, rng: random.Random) -> None:
    """SIGSTOP for a moment, SIGCONT: nothing happens."""
    save = rig.work / "save"
    process = rig.start(save)
    for _ in range(rng.randint(1, 5)):
        read_until(process, IN_A_STEP)
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(rng.uniform(0.1, 1))
    os.kill(process.pid, signal.SIGCONT)
    _, error = rest_of(process)
    assert process.returncode == 0, error
    rig.require_end(save)


def launcher_killed(rig: Rig, rng: random.Random) -> None:
    """torchrun alone is killed: its ranks end within seconds and save nothing more, and the next job goes on."""
    save = rig.work / "save"
    process = rig.start(save, 2, "--train-iters 100000")
    text = "".join(read_until(process, IN_A_STEP) for _ in range(rng.randint(1, 6)))
    ranks = children(process.pid)
    kill([process.pid])
    assert gone_within(ranks, 20), "ranks without a launcher trained on"
    tracker = save / "latest_checkpointed_iteration.txt"
    before = tracker.read_text() if tracker.exists() else "0"
    out, error = rest_of(process)
    assert error.count("torchrun, which started this rank, is gone") == 1, error
    assert int(before) >= last_saved(text + out)
    if tracker.exists():
        last = int(before)
        code, said = rig.train(save, 2, f"--train-iters {max(last + 1, STEPS)} --override-opt-param-scheduler")
        assert (code, resumed_from(said)) == (0, last), said


FAULTS = [
    Fault("SIGKILL during a save, one process", 20, partial(killed, moment=IN_A_SAVE), kills=True),
    Fault("SIGKILL during a step, one process", 14, partial(killed, moment=IN_A_STEP), kills=True),
    Fault("SIGKILL while the program starts", 4, partial(killed, moment=AT_THE_START), kills=True),
    Fault("SIGKILL three times in a row, one process", 4, killed_again_and_again, kills=True),
    Fault("SIGKILL to torchrun and both of its ranks, during a save", 10, partial(killed, moment=IN_A_SAVE, ranks=2), kills=True),
    Fault("SIGKILL to one rank of two", 8, partial(killed, moment=IN_A_STEP, ranks=2, which="one"), kills=True),
    Fault("SIGKILL to torchrun alone", 6, launcher_killed, kills=True),
    Fault("SIGTERM, one process", 4, asked_to_stop),
    Fault("SIGTERM to torchrun with two ranks", 3, partial(asked_to_stop, ranks=2)),
    Fault("SIGSTOP and SIGCONT", 3, stood_still),
]
