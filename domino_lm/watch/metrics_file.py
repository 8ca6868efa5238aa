"""Steps and evaluations as JSON lines, for scripts. Nothing here imports torch."""

import json
import math
import os
import warnings
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

from domino_lm.config.foreign_text import parse_json
from domino_lm.schedule.timeline import whole_file


class MetricsFile:
    """One JSON object per line: a step has ``lm_loss``, an evaluation ``validation_loss``; both have ``iteration``.

    A number that is not finite is null. A disk that fails turns the file off with a warning.
    """

    def __init__(self, file: IO[str]) -> None:
        self._file: IO[str] | None = file

    @classmethod
    def open(cls, path: str, iteration: int) -> Self | None:
        """Go on in ``path``, without its lines beyond ``iteration``, which are of a run that is now resumed; None, with a warning,
        if it cannot be written."""
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            kept = [line for line in read_lines(path) if line.get("iteration", 0) <= iteration] if iteration else []
            with whole_file(path) as unfinished:
                unfinished.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
            return cls(open(path, "a", encoding="utf-8"))
        except OSError as error:
            warnings.warn(f"--metrics-file {path} cannot be written ({error}); training goes on without it.", stacklevel=2)
            return None

    def write(self, values: dict[str, Any]) -> None:
        """Append one line, at once."""
        if self._file is None:
            return
        finite = {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()}
        try:
            self._file.write(json.dumps(finite) + "\n")
            self._file.flush()
        except OSError as error:
            warnings.warn(f"the metrics file can no longer be written ({error}); training goes on without it.", stacklevel=2)
            with suppress(OSError):
                self._file.close()
            self._file = None

    def close(self) -> None:
        """Nothing can be written afterwards."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """What a metrics file holds; a last line that was cut off by a crash is left out. A missing file holds nothing."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            found.append(parse_json(line))
        except ValueError:
            continue
    return found
