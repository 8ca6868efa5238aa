#!/usr/bin/env python3
"""From text to a model that speaks, on two CPU processes: ``make demo`` runs this."""

from launcher import launch

if __name__ == "__main__":
    launch("demo")
