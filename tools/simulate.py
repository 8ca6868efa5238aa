#!/usr/bin/env python3
"""Predict a training step on a machine that you do not have. No GPU, no torch: it takes a fraction of a second."""

from launcher import launch

if __name__ == "__main__":
    launch("simulate")
