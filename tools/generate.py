#!/usr/bin/env python3
"""Continue a text with a trained model: ``python tools/generate.py --load checkpoints/my --prompt "To be, or"``."""

from launcher import launch

if __name__ == "__main__":
    launch("generate")
