#!/usr/bin/env python3
"""Measure this machine for tools/simulate.py: ``--hardware FILE.json``."""

from launcher import launch

if __name__ == "__main__":
    launch("calibrate")
