#!/usr/bin/env python3
"""Merge all pairs of token files (.bin and .idx) of a folder into one; flags as in Megatron's tool of the same name."""

from launcher import launch

if __name__ == "__main__":
    launch("merge_datasets")
