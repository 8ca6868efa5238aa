"""Inject every fault of the list, and write the table of docs/reliability.md.

    python -m tests.chaos                    all of them; begun again, it goes on where it was
    python -m tests.chaos --tries 1 --only SIGKILL --no-page

Results lie in runs/chaos/results.json, those of another state of the sources are dropped. Exit code 1: something was lost.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.chaos import files, folders, kills
from tests.chaos.campaign import ROOT, Campaign, state_of_sources, table, write_between
from tests.chaos.rig import Rig
from tests.chaos.soak import ITERATIONS, soak, soak_table

FAULTS = [*kills.FAULTS, *folders.FAULTS, *files.FAULTS]


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is still to be run; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="PATTERN", help="faults whose title matches")
    parser.add_argument("--tries", type=int, default=None, help="of each fault, at most")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which no new try begins")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "chaos", help="for results and runs (default runs/chaos)")
    parser.add_argument("--soak-iterations", type=int, default=ITERATIONS, help=f"of the soak; 0 leaves it out (default {ITERATIONS})")
    parser.add_argument("--no-page", action="store_true", help="leave docs/reliability.md as it is")
    own = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    until_s = time.monotonic() + own.minutes * 60
    campaign = Campaign.open(own.folder / "results.json", state_of_sources())
    chosen = [replace(fault, tries=min(fault.tries, own.tries or fault.tries)) for fault in FAULTS if re.search(own.only, fault.title)]
    say = lambda line: print(line, flush=True)  # noqa: E731
    campaign.run(chosen, Rig(own.folder, campaign.sources), say, until_s)
    if own.soak_iterations and not campaign.soak and time.monotonic() < until_s:
        campaign.soak = soak(own.folder, own.soak_iterations)
        campaign.save()
    page = [table(chosen, campaign.results), *([soak_table(campaign.soak)] if campaign.soak else [])]
    print("\n\n".join(page))
    if not own.no_page:
        for name, text in zip(("faults", "soak"), page, strict=False):
            write_between(ROOT / "docs" / "reliability.md", name, text)
    return int(bool(campaign.lost()) or bool(campaign.soak and campaign.soak["faults"]))


if __name__ == "__main__":
    sys.exit(main())
