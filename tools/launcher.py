"""Starts the commands of this folder from a checkout, whether the package is installed or not."""

import sys
from importlib import import_module
from pathlib import Path


def launch(command: str) -> None:
    """Run ``main`` of ``domino_lm.tools.<command>`` and end with the exit status that it returns."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.exit(import_module(f"domino_lm.tools.{command}").main())
