#!/usr/bin/env python3
"""Draw a recorded timeline: ``python tools/plot_timeline.py step.json`` writes ``step.png`` beside it, ``--html`` a page."""

from launcher import launch

if __name__ == "__main__":
    launch("plot_timeline")
