#!/usr/bin/env python3
"""Are these nodes fit for a job? Started on all ranks like the job itself, in the minute before it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from domino_lm.tools.preflight import main

if __name__ == "__main__":
    sys.exit(main())
