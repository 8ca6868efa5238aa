#!/usr/bin/env python3
"""Draw a recorded timeline: ``python tools/plot_timeline.py step.json`` writes ``step.png`` beside it, ``--html`` a page."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from domino_lm.tools.plot_timeline import main

if __name__ == "__main__":
    sys.exit(main())
