"""Draw a recorded timeline: ``python tools/plot_timeline.py step.json`` writes ``step.png`` beside it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from domino_lm.schedule.render import MissingMatplotlibError, draw
from domino_lm.schedule.timeline import TimelineError, read_trace


def main(arguments: list[str] | None = None) -> int:
    """Parse, draw, and return the exit status."""
    parser = argparse.ArgumentParser(description="Draw the timeline that a training run recorded with --timeline.")
    parser.add_argument("trace", type=Path, help="Chrome trace that --timeline wrote")
    parser.add_argument("--output", type=Path, help="picture to write; default: the trace's name with .png")
    chosen = parser.parse_args(arguments)
    output = chosen.output or chosen.trace.with_suffix(".png")
    try:
        draw(read_trace(chosen.trace), output)
    except (TimelineError, MissingMatplotlibError) as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{output}: cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
