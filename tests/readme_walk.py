"""Walk through the README as a newcomer does: a fresh clone, a fresh environment, each command as it is typed.

``make walk`` clones the last commit into a temporary folder, sets up an environment there, and types the commands of `README.md` in their
order into one shell after another; the user's own text is 50 paragraphs of the clone's documents. `docs/readme-walk.md` is the
record: exit status, seconds and last line of each command, and every warning. Ends with 1 if a command ended otherwise than it has to,
or the demo does not keep what the README says of it. `LEFT_OUT` names what is not typed and why; ``--all`` types that too where it can be.
Takes about twenty minutes on two cores; nothing but Python and git is needed to start it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.documents import OF_MAKE, ROOT, typed

DOCUMENTS, DEMO_LIMIT_S = 50, 240
NEVER = "Megatron's own command, which the next one replaces"
LEFT_OUT = {
    r"^make test$": "as long as all other commands together; `.ci/run` runs it on each commit",
    r"^make setup TORCH": "downloads gigabytes; a test runs it with a stand-in for torch",
    r"pretrain_gpt\.py": NEVER,
}
"""Patterns of commands that are not typed, and why."""
ANSWERS = {
    r"^(domino-lm-pretrain|python -m domino_lm\.pretrain)$": ("{} --help", "the name of a program"),
    r"^torchrun --nproc-per-node 8": ("{} --dry-run", "eight GPUs are not here"),
    r"^make setup VENV=": ("python3 -m venv another && make setup VENV=another", "an environment of its own stands for the reader's"),
}
"""Patterns of commands that stand for what the reader has, what is typed instead of each, and why."""
MAY_FAIL = r"^make gpu-check$"
"""Commands that say so, and fail, on a machine without a GPU."""


class Step(NamedTuple):
    """A command of the document, what was typed for it, and what came of that."""

    command: str
    typed: str
    why: str
    status: int | None
    """Exit status; None if it was left out."""
    seconds: float
    cpu_seconds: float
    """What all its processes computed: less depends on what else the machine does."""
    output: str

    def faults(self) -> list[str]:
        """What did not come out as it has to."""
        if self.status is None:
            return []
        found = [f"ended with {self.status}"] if self.status and not re.search(MAY_FAIL, self.command) else []
        if "Traceback" in self.output:
            found.append("printed a traceback")
        if self.command == "make demo":
            found += demo_faults(self.output, min(self.seconds, self.cpu_seconds / (os.cpu_count() or 1)))
        return found

    def warnings(self) -> list[str]:
        """Lines that warn, each once."""
        return list(dict.fromkeys(line.strip() for line in self.output.splitlines() if re.search(r"\bwarning", line, re.I)))


def demo_faults(output: str, seconds: float) -> list[str]:
    """What the demo does not keep of: a line that the model wrote at its end, under four minutes, no warning.

    ``seconds`` are those that it takes if nothing else wants its cores: its own, or its share of CPU seconds if others did.
    """
    lines = output.strip().splitlines()
    command = next((line for line in reversed(lines) if line.startswith("$ domino-lm-generate")), "")
    prompt = re.search(r"--prompt '([^']+)'", command)
    found = (
        [] if prompt and lines[-1].startswith(prompt[1]) and len(lines[-1]) > len(prompt[1]) + 20 else ["ended without a generated line"]
    )
    found += [f"took {seconds:.0f} s, more than {DEMO_LIMIT_S}"] if seconds > DEMO_LIMIT_S else []
    return found + (["printed a warning"] if re.search("warning", output, re.I) else [])


def newcomers_environment() -> dict[str, str]:
    """This environment without what names a Python environment or comes from a make that runs this."""
    ours = {*OF_MAKE, "VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "OMP_NUM_THREADS", "MAKE_TERMOUT", "MAKE_TERMERR"}
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    mine = str(Path(sys.prefix) / "bin") if sys.prefix != sys.base_prefix else None
    return kept | {"PATH": os.pathsep.join(folder for folder in kept["PATH"].split(os.pathsep) if folder != mine)}


def type_in(folder: Path, command: str) -> tuple[int, float, float, str]:
    """Exit status, seconds, CPU seconds and output of a line that is typed into a new shell in ``folder``."""
    print(f"$ {command}", flush=True)
    began, computed = time.monotonic(), children_cpu_s()
    words = ["bash", "-c", command]
    done = subprocess.run(
        words,
        cwd=folder,
        env=newcomers_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    seconds = time.monotonic() - began
    print(f"  exit status {done.returncode} after {seconds:.0f} s", flush=True)
    return done.returncode, seconds, children_cpu_s() - computed, done.stdout


def children_cpu_s() -> float:
    """CPU seconds of all processes that this one has waited for, and theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def write_own_text(clone: Path) -> None:
    """What the reader of the README has: ``my.jsonl`` of 50 documents, a tokenizer, a vocabulary for Megatron's command."""
    texts = "\n\n".join(path.read_text() for path in sorted(clone.glob("docs/*.md"))).split("\n\n")
    longest = sorted(dict.fromkeys(text.strip() for text in texts), key=len, reverse=True)[:DOCUMENTS]
    (clone / "my.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in longest))
    (clone / "tokenizer.model").write_bytes((clone / "examples/data/sp4096.model").read_bytes())
    signs = [chr(code if 33 <= code <= 126 or 161 <= code <= 172 or code >= 174 else 256 + code) for code in range(256)]
    (clone / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate([*signs, "<|endoftext|>"])}))
    (clone / "merges.txt").write_text("#version: 0.2\n")


def steps(clone: Path, everything: bool, type_in: Callable[[Path, str], tuple[int, float, float, str]] = type_in) -> Iterator[Step]:
    """Type the commands of the clone's README, each once, in their order; an environment that was activated stays so."""
    activated = ""
    for command in dict.fromkeys(["make setup", *typed(str(clone / "README.md"))]):
        left_out = next((why for pattern, why in LEFT_OUT.items() if re.search(pattern, command)), None)
        if left_out and not (everything and left_out != NEVER):
            yield Step(command, "", left_out, None, 0.0, 0.0, "")
            continue
        pattern, why = next(((form, why) for wanted, (form, why) in ANSWERS.items() if re.search(wanted, command)), ("{}", ""))
        line = pattern.format(command)
        step = Step(command, line if why else "", why, *type_in(clone, activated + line))
        if command.endswith("activate"):
            activated = f"{command} && "
        yield step


def page(found: Sequence[Step], about: str) -> str:
    """The record, as a document."""
    rows = []
    for step in found:
        typed_for_it = f"`{step.command}`" + (f"; typed: `{step.typed}`, {step.why}" if step.typed else "")
        lines = [line for line in step.output.splitlines() if line.strip()]
        said = step.why if step.status is None else (lines[-1].strip()[:160] if lines else "")
        status = "not typed" if step.status is None else str(step.status)
        took = " | " if step.status is None else f"{step.seconds:.0f} | {step.cpu_seconds:.0f}"
        rows.append(f"| {cell(typed_for_it)} | {status} | {took} | {cell(said)} |")
    warned = [f"- `{step.command.split(' --')[0]}`: {line}" for step in found for line in step.warnings()]
    total = sum(step.seconds for step in found)
    return "\n".join(
        [
            "# The README, walked through",
            "",
            "`make walk` wrote this: a fresh clone, a fresh environment, and the README's commands in their order, each as a newcomer types it",
            f"(`tests/readme_walk.py`). The text of one's own was {DOCUMENTS} paragraphs of these documents. {about}",
            "",
            "| command | exit status | seconds | CPU seconds | its last line |",
            "|---|---|---|---|---|",
            *rows,
            "",
            f"{total / 60:.0f} minutes in all. " + ("Warnings that were printed:" if warned else "No warning was printed."),
            *(["", *warned] if warned else []),
            "",
        ]
    )


def cell(text: str) -> str:
    """Text that may stand in a table."""
    return text.replace("|", "\\|")


def about(load: float) -> str:
    """Where and when the walk was made; ``load`` is the mean number of processes that wanted a core during its last quarter of an hour."""
    date = time.strftime("%d %B %Y", time.gmtime())
    return f"{os.cpu_count()} CPU cores, load average {load:.1f}, Python {platform.python_version()}, {date}."


def main(argv: Sequence[str] | None = None) -> int:
    """Clone, walk, write the record; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repository", type=Path, default=ROOT, help="what is cloned (default: this checkout, its last commit)")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/readme-walk.md", help="the record")
    parser.add_argument("--all", action="store_true", help="type the commands too that take long or download much")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="readme-walk-") as folder:
        clone = Path(folder) / "domino_lm"
        subprocess.run(["git", "clone", "-q", str(arguments.repository), str(clone)], check=True)
        write_own_text(clone)
        found, load = list(steps(clone, arguments.all)), os.getloadavg()[2]
    arguments.output.write_text(page(found, about(load)))
    faults = [f"{step.command}: {fault}\n{step.output[-2000:]}" for step in found for fault in step.faults()]
    print("\n".join(faults) or f"all {len(found)} commands did what they have to; the record is {arguments.output}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
