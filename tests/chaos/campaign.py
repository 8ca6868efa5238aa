"""Faults, injected one after another; what came of each is kept on disk, so that a campaign that was interrupted goes on."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.rig import Rig

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Fault:
    """One kind of fault. ``inject`` makes it happen once, and raises if anything was lost, silently wrong, or hung."""

    title: str
    tries: int
    inject: Callable[[Rig, random.Random], None]
    kills: bool = False
    """Whether it kills a program that trains."""


@dataclass
class Campaign:
    """The results so far in ``file``; those of another state of the sources do not count."""

    file: Path
    sources: str
    results: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    soak: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, file: Path, sources: str) -> Campaign:
        """Go on with what ``file`` holds, or begin."""
        try:
            kept = json.loads(file.read_text())
        except (OSError, ValueError):
            kept = {}
        if kept.get("sources") != sources:
            return cls(file, sources)
        return cls(file, sources, kept["results"], kept["soak"])

    def run(self, faults: Sequence[Fault], rig: Rig, say: Callable[[str], None], until_s: float = float("inf")) -> None:
        """Make all tries that are still to be made, in an order that spreads over the faults, until the clock stands at ``until_s``."""
        for number in range(max((fault.tries for fault in faults), default=0)):
            for fault in faults:
                done = self.results.setdefault(fault.title, [])
                if number == len(done) < fault.tries and time.monotonic() < until_s:
                    done.append(attempt(fault, rig, number))
                    self.save()
                    say(f"{done[-1]['seconds']:5.1f} s  {fault.title}, {number + 1} of {fault.tries}: {done[-1]['lost'] or 'survived'}")

    def save(self) -> None:
        """Bring the results to the disk, whole or not at all."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.file.with_suffix(".tmp")
        unfinished.write_text(json.dumps({"sources": self.sources, "results": self.results, "soak": self.soak}, indent=1))
        os.replace(unfinished, self.file)

    def lost(self) -> int:
        """How many tries were not survived."""
        return sum(bool(one["lost"]) for tries in self.results.values() for one in tries)


def attempt(fault: Fault, rig: Rig, number: int) -> dict[str, Any]:
    """Inject once, in a folder of its own, which stays if something was lost."""
    begin_s, lost = time.monotonic(), ""
    folder = rig.new_folder(f"{re.sub('[^a-z]+', '-', fault.title.lower())}-{number}")
    try:
        fault.inject(rig, random.Random(f"{fault.title} {number}"))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        lost = text if len(text) < 2000 else f"{text[:500]} ... {text[-1500:]}"
        (folder / "lost.txt").write_text(traceback.format_exc())
    else:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        rig.clear()
    return {"lost": lost, "seconds": round(time.monotonic() - begin_s, 2)}


def state_of_sources() -> str:
    """A hash of the program and of this campaign."""
    digest = hashlib.sha256()
    for path in sorted([*(ROOT / "domino_lm").rglob("*.py"), *(ROOT / "tests" / "chaos").rglob("*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def table(faults: Sequence[Fault], results: dict[str, list[dict[str, Any]]]) -> str:
    """Rows of fault, times tried, survived, lost, and their sum."""
    rows = [(fault.title, [bool(one["lost"]) for one in results.get(fault.title, ())], fault.kills) for fault in faults]
    lines = ["| fault | tried | survived | lost |", "|---|---|---|---|"]
    lines += [f"| {title} | {len(lost)} | {len(lost) - sum(lost)} | {sum(lost)} |" for title, lost, _ in rows]
    tried, gone = sum(len(lost) for _, lost, _ in rows), sum(sum(lost) for _, lost, _ in rows)
    killed = sum(len(lost) for _, lost, kills in rows if kills)
    return "\n".join([*lines, f"| all, {killed} of which killed a program that trains | {tried} | {tried - gone} | {gone} |"])


def write_between(path: Path, name: str, text: str) -> None:
    """Put ``text`` between the marks ``<!-- name -->`` and ``<!-- end of name -->`` of a document."""
    content = path.read_text()
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.S)
    assert pattern.search(content), f"{path} has no marks of {name}"
    path.write_text(pattern.sub(lambda match: f"{match[1]}{text}\n{match[2]}", content))
