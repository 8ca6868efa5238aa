#!/usr/bin/env python3
"""Are these nodes fit for a job? Started on all ranks like the job itself, in the minute before it."""

from launcher import launch

if __name__ == "__main__":
    launch("preflight")
