#!/usr/bin/env python3
"""Measure this machine for tools/simulate.py: ``--hardware FILE.json``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from domino_lm.tools.calibrate import main

if __name__ == "__main__":
    sys.exit(main())
