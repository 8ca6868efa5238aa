#!/usr/bin/env python3
"""Convert a checkpoint: native, Megatron's two formats and Hugging Face's safetensors, any of them to any other."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from domino_lm.tools.convert_checkpoint import main

if __name__ == "__main__":
    sys.exit(main())
