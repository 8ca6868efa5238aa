#!/usr/bin/env python3
"""Is my parallel run right? Takes the flags of training, under the same torchrun, and compares with a single rank."""

from launcher import launch

if __name__ == "__main__":
    launch("verify")
