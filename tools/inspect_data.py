#!/usr/bin/env python3
"""Show what a model will see of its data: documents, splits, shares of a blend, samples as text, masks."""

from launcher import launch

if __name__ == "__main__":
    launch("inspect_data")
