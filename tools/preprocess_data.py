#!/usr/bin/env python3
"""Make token files (.bin and .idx) from JSON lines; flags as in Megatron's tool of the same name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from domino_lm.tools.preprocess_data import main

if __name__ == "__main__":
    sys.exit(main())
