#!/usr/bin/env python3
"""Make token files (.bin and .idx) from JSON lines; flags as in Megatron's tool of the same name."""

from launcher import launch

if __name__ == "__main__":
    launch("preprocess_data")
