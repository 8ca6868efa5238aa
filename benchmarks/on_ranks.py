"""The frame of a benchmark that measures itself on one rank and on two: it starts itself under torchrun and writes what rank 0 found."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.data_speed import machine

Row = dict[str, Any]


def run_on_ranks(
    script: str, description: str | None, rounds: int, measure: Callable[[Path, int], Row], markdown: Callable[[dict[str, Any]], str]
) -> None:
    """The whole program ``script``: ``measure(folder, rounds)`` runs on every rank, ``markdown`` makes OUTPUT.md of OUTPUT.json's content.

    ``folder`` is one for the whole run. The files lie beside each other in benchmarks/results, named as ``script`` is.
    """
    output = Path(script).resolve().parent / "results" / Path(script).stem
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--folder", default=None, help="where checkpoints are written; a temporary folder by default")
    parser.add_argument("--output", type=Path, default=output, help="where OUTPUT.json and .md go")
    chosen = parser.parse_args()
    if "RANK" in os.environ:
        row = json.dumps(measure(Path(chosen.folder), chosen.rounds))
        print(row if os.environ["RANK"] == "0" else "", flush=True)
        return
    results: dict[str, Any] = {"machine": machine(), "command": " ".join(sys.argv), "rounds": chosen.rounds, "rows": []}
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        for ranks in (1, 2):
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            command = [*launch, script, "--folder", folder, "--rounds", str(chosen.rounds)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            results["rows"].append({"ranks": ranks, **json.loads(done.stdout.strip().splitlines()[-1])})
    chosen.output.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    text = markdown(results)
    chosen.output.with_suffix(".md").write_text(text)
    print(text)
