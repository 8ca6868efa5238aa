"""Small faults, planted one at a time in a copy of the tree: does any test notice?

``python tests/mutants.py`` plants each fault of ``mutants.toml`` and runs the tests that `TESTS` names for its folder, until the first one
fails; first of all the one test that caught the fault before, which ``caught_by.json`` names (``--record`` writes it anew from the
results). A fault that none notices survives, and shows which claim has no test. Results are kept in a JSON file
(``runs/mutants.json``, or ``--results``): a second call goes on where the first one stopped, and asks again about what survived or
has changed. ``--only NAME`` plants one, or those of a folder, ``--list`` names all. A folder's tests first have to pass without a fault, in three
quarters of the time that a fault is given, so that one which makes them hang is known by it. Takes up to an hour on two cores that do nothing
else; it is no part of `make test`, where `unit/test_mutants.py` checks only that every fault can still be planted.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CAUGHT_BY = ROOT / "tests" / "caught_by.json"
LIMIT_S, SOUND_SHARE = 120, 0.75
QUICK = "not slow and not exhaustive and not long"
CAUGHT, HUNG, SURVIVED, BROKEN = "caught", "caught (did not end)", "survived", "broken: the tests could not be collected"

TESTS: dict[str, str] = {
    "schedule": "unit/test_plan.py distributed/test_executor.py distributed/test_collectives.py distributed/test_schedules.py",
    "simulate": "unit/test_prices.py unit/test_costs.py unit/test_simulator.py unit/test_muon.py",
    "model": "unit/test_random.py unit/test_head.py golden/test_model.py distributed/test_schedules.py",
    "parallel": "unit/test_parameter.py unit/test_random.py distributed/test_pair.py distributed/test_executor.py distributed/test_collectives.py "
    "distributed/test_any_transformer.py distributed/test_cores.py distributed/test_distributed_optimizer.py",
    "training": "unit/test_lr_schedule.py unit/test_loss_scale.py unit/test_optimizer.py unit/test_muon.py unit/test_skipped_steps.py unit/data/test_run_data.py "
    "distributed/test_optimizer.py distributed/test_muon.py distributed/test_loss_average.py distributed/test_failed_saves.py distributed/test_training.py distributed/test_precision.py",
    "data": "unit/data/test_gpt_dataset.py unit/data/test_continued.py unit/data/test_loader.py unit/data/test_indexed.py "
    "unit/data/test_blended.py unit/data/test_index_cache.py golden/test_data_indices.py golden/test_data_blends.py",
    "checkpoint": "unit/test_blocks.py unit/test_publish.py unit/test_retention.py unit/test_checkpoint.py unit/test_narrow_checkpoints.py distributed/test_checkpoint.py unit/test_convert.py golden/test_checkpoints.py",
}
"""Tests of each folder of the package, the quick ones first, without those that start programs; paths below tests/."""


class Mutant(NamedTuple):
    """A fault: in ``file`` of the package, ``new`` in place of ``old``, which stands there once."""

    name: str
    file: str
    old: str
    new: str
    survives: str = ""
    """Why no test has to notice it; empty if one must."""

    @property
    def folder(self) -> str:
        """The folder of the package, which names the tests."""
        return self.file.partition("/")[0]

    def planted(self, text: str) -> str:
        """The file's ``text`` with the fault in it."""
        found = text.count(self.old)
        assert found == 1, f"{self.name}: domino_lm/{self.file} holds {self.old!r} {found} times, not once"
        return text.replace(self.old, self.new)


MUTANTS = [Mutant(**fault) for fault in tomllib.loads((ROOT / "tests" / "mutants.toml").read_text())["fault"]]


def main(words: Sequence[str] | None = None) -> int:
    """Plant what has no result yet; returns 1 if a fault survives that should not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "mutants.json", help="file that keeps the results")
    parser.add_argument("--only", metavar="NAME", action="append", help="plant this fault, or all whose folder this is")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="S", help="seconds that the tests of one fault may take")
    parser.add_argument("--record", action="store_true", help=f"write {CAUGHT_BY.name} from the results and stop")
    parser.add_argument("--list", action="store_true", help="name all faults with what is known of them")
    options = parser.parse_args(words)
    known: dict[str, Any] = json.loads(options.results.read_text()) if options.results.exists() else {}
    chosen = [mutant for mutant in MUTANTS if not options.only or mutant.name in options.only or mutant.folder in options.only]
    if not chosen:
        parser.error(f"--only {' '.join(options.only)} names no fault and no folder; --list shows all")
    if options.record:
        CAUGHT_BY.write_text(json.dumps({m.name: known[m.name]["by"] for m in MUTANTS if known.get(m.name, {}).get("by")}, indent=1) + "\n")
        return 0
    if options.list:
        print("\n".join(described(mutant, known.get(mutant.name)) for mutant in chosen))
        return 0
    options.results.parent.mkdir(parents=True, exist_ok=True)
    sound: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = copy_of_package(Path(folder) / "tree")
        for mutant in chosen:
            key = state_of(mutant)
            found = known.get(mutant.name)
            if found is None or found["key"] != key or not found["result"].startswith(CAUGHT):
                if mutant.folder not in sound:
                    require_sound(mutant.folder, tree, options.limit)
                    sound.add(mutant.folder)
                known[mutant.name] = {"key": key, **plant(mutant, tree, options.limit)}
                options.results.write_text(json.dumps(known, indent=1) + "\n")
            print(described(mutant, known[mutant.name]), flush=True)
    survivors = [m for m in chosen if not known[m.name]["result"].startswith(CAUGHT) and not m.survives]
    print(
        f"{len(chosen) - len(survivors)} of {len(chosen)} faults are caught or allowed, in {sum(known[m.name]['seconds'] for m in chosen):.0f} s"
    )
    return bool(survivors)


def described(mutant: Mutant, found: dict[str, Any] | None) -> str:
    """One line on a fault."""
    if found is None:
        return f"{mutant.folder:<10} {mutant.name}: not planted yet"
    reason = f" ({mutant.survives})" if mutant.survives else ""
    by = f" by {found['by']}" if found["by"] else ""
    return f"{mutant.folder:<10} {mutant.name}: {found['result']}{by}{reason} [{found['seconds']:.0f} s]"


def state_of(mutant: Mutant) -> str:
    """What the result depends on and can be known cheaply: the file with the fault, and the names of its tests."""
    text = mutant.planted((ROOT / "domino_lm" / mutant.file).read_text())
    return hashlib.sha256(f"{text}\n{TESTS[mutant.folder]}".encode()).hexdigest()[:16]


def copy_of_package(tree: Path) -> Path:
    """A copy of everything that tests read, without what they wrote."""
    leave_out = shutil.ignore_patterns(
        ".git", ".venv", "runs", "__pycache__", ".mypy_cache", ".ruff_cache", ".hypothesis", "build", "*.egg-info"
    )
    shutil.copytree(ROOT, tree, ignore=leave_out, symlinks=True)
    return tree


def tests_of(folder: str) -> list[str]:
    """Files that `TESTS` names for a folder of the package."""
    return [f"tests/{name}" for name in TESTS[folder].split()]


def require_sound(folder: str, tree: Path, limit_s: float) -> None:
    """End the program if the tests of a folder fail without any fault, or take so long that a fault could not be told from it."""
    result, by = run_tests(tests_of(folder), tree, SOUND_SHARE * limit_s)
    if result == HUNG:
        sys.exit(f"the tests of {folder} alone take more than {SOUND_SHARE * limit_s:.0f} s; name fewer in TESTS, or give a higher --limit")
    if result != SURVIVED:
        sys.exit(f"the tests of {folder} fail without any fault: {by}; mend them first")


def plant(mutant: Mutant, tree: Path, limit_s: float) -> dict[str, Any]:
    """Run the folder's tests on the copy with the fault in it, and take it out again."""
    path = tree / "domino_lm" / mutant.file
    sound, begin_s = path.read_text(), time.monotonic()
    path.write_text(mutant.planted(sound))
    try:
        result, by = run_tests([f"tests/{caught_by()[mutant.name]}"], tree, limit_s) if mutant.name in caught_by() else (SURVIVED, "")
        if result != CAUGHT:
            result, by = run_tests(tests_of(mutant.folder), tree, limit_s)
    finally:
        path.write_text(sound)
    return {"result": result, "by": by, "seconds": round(time.monotonic() - begin_s, 1)}


def caught_by() -> dict[str, str]:
    """The test that caught each fault when `CAUGHT_BY` was written, by the fault's name."""
    found: dict[str, str] = json.loads(CAUGHT_BY.read_text()) if CAUGHT_BY.exists() else {}
    return found


def run_tests(files: Sequence[str], tree: Path, limit_s: float) -> tuple[str, str]:
    """What becomes of a run of ``files`` up to the first failure, and the test that fails."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-m", QUICK, *files]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        out, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return HUNG, ""
    finally:
        with contextlib.suppress(ProcessLookupError):  # ranks that wait for each other outlive pytest
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    failed = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(\S+)", out, re.M)
    if process.returncode == 0:
        return SURVIVED, ""
    by = failed[1] if failed else ""
    return (CAUGHT if process.returncode == 1 and "::" in by else BROKEN), by


if __name__ == "__main__":
    sys.exit(main())
