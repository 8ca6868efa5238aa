#!/usr/bin/env python3
"""Draw the curves of one or several runs: ``python tools/plot_run.py runs/a/metrics.jsonl runs/b --output curves.png``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from domino_lm.tools.plot_run import main

if __name__ == "__main__":
    sys.exit(main())
