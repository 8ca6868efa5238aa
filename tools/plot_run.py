#!/usr/bin/env python3
"""Draw the curves of one or several runs: ``python tools/plot_run.py runs/a/metrics.jsonl runs/b --output curves.png``."""

from launcher import launch

if __name__ == "__main__":
    launch("plot_run")
