#!/usr/bin/env python3
"""Is my parallel run right? Takes the flags of training, under the same torchrun, and compares with a single rank."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from domino_lm.tools.verify import main

if __name__ == "__main__":
    sys.exit(main())
