"""Draw a recorded timeline: ``domino-lm-plot-timeline step.json`` writes ``step.png`` beside it, ``--html`` a page.

Several traces, a measured and a predicted one say, share a page: ``domino-lm-plot-timeline measured.json predicted.json --html``.
"""

import argparse
import sys
from pathlib import Path

from domino_lm.schedule.render import MissingMatplotlibError, draw
from domino_lm.schedule.timeline import TimelineError, read_trace
from domino_lm.watch.report import write_report


def flag_parser() -> argparse.ArgumentParser:
    """The flags of this tool."""
    parser = argparse.ArgumentParser(description="Draw the timeline that a training run recorded with --timeline.")
    parser.add_argument("traces", type=Path, nargs="+", metavar="trace", help="Chrome traces that --timeline wrote")
    parser.add_argument("--html", action="store_true", help="write one page that pans, zooms and shows each op, instead of a picture")
    parser.add_argument("--output", type=Path, help="file to write; default: the first trace's name with .png or .html")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Parse, draw, and return the exit status."""
    parser = flag_parser()
    chosen = parser.parse_args(arguments)
    if len(chosen.traces) > 1 and not chosen.html:
        parser.error(f"{len(chosen.traces)} traces share a page only, not a picture; add --html")
    output = chosen.output or chosen.traces[0].with_suffix(".html" if chosen.html else ".png")
    try:
        timelines = [read_trace(trace) for trace in chosen.traces]
        if chosen.html:
            write_report(timelines, output)
        else:
            draw(timelines[0], output)
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
