"""A run on the terminal: a bar that moves, above which Megatron's lines scroll."""

import sys
from typing import Any

from domino_lm.watch.metrics import StepReport


class ProgressBar:
    """Steps done, loss and tokens per second. Lines must be printed through `print`, so that they do not tear the bar."""

    def __init__(self, begin: int, end: int) -> None:
        from tqdm import tqdm  # one rank needs it, and only on a terminal

        self._bar: Any = tqdm(total=end, initial=begin, unit="step", dynamic_ncols=True, leave=False, file=sys.stderr)

    @staticmethod
    def fits() -> bool:
        """Whether both output streams are a terminal."""
        return sys.stdout.isatty() and sys.stderr.isatty()

    def step(self, report: StepReport, tokens_per_s: float) -> None:
        """One step is done."""
        loss = "step skipped" if report.skipped else f"loss {report.loss:.4f}"
        self._bar.set_postfix_str(f"{loss}, {tokens_per_s:,.0f} tokens/s", refresh=False)
        self._bar.update()

    def print(self, line: str) -> None:
        """A line above the bar."""
        self._bar.write(line, file=sys.stdout)

    def close(self) -> None:
        """Take the bar away."""
        self._bar.close()
