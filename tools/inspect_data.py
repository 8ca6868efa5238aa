#!/usr/bin/env python3
"""Show what a model will see of its data: documents, splits, shares of a blend, samples as text, masks."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from domino_lm.tools.inspect_data import main

if __name__ == "__main__":
    sys.exit(main())
