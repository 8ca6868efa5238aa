#!/usr/bin/env python3
"""Predict a training step on a machine that you do not have. No GPU, no torch: it takes a fraction of a second."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from domino_lm.tools.simulate import main

if __name__ == "__main__":
    sys.exit(main())
