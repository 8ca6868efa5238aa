#!/usr/bin/env python3
"""Perplexity of files under a trained model: ``python tools/evaluate.py --load checkpoints/my held_out.jsonl``."""

from launcher import launch

if __name__ == "__main__":
    launch("evaluate")
