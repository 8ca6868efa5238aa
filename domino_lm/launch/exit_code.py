"""How a run ends, as numbers: to its caller, and from each rank to the launcher of its node, which torchrun tells only of failures."""

import os
from contextlib import suppress
from pathlib import Path

EXIT_FAILED_RUN, EXIT_WRONG_SETTINGS = 1, 2
EXIT_NOT_SAVED = 3
"""A run that was ended, or ended by itself, without its last state on disk."""

FOLDER = "DOMINO_LM_EXIT_CODES"
"""The variable that names the folder in which the ranks of a node leave their exit codes."""


def forget_exit_code() -> None:
    """This rank begins: what it left before a restart holds no more."""
    path = _path()
    if path is not None:
        path.unlink(missing_ok=True)


def leave_exit_code(code: int) -> int:
    """Leave this rank's exit code where the launcher looks for it, and return it."""
    path = _path()
    if path is not None:
        with suppress(OSError):
            path.write_text(str(code))
    return code


def code_of_ranks(folder: Path, ranks: int) -> int | None:
    """The largest exit code that the ``ranks`` of a node left in ``folder``; None if one of them left none."""
    codes = [int(path.read_text() or EXIT_FAILED_RUN) for path in folder.iterdir()]
    return max(codes) if len(codes) == ranks else None


def _path() -> Path | None:
    folder = os.environ.get(FOLDER)
    return None if folder is None else Path(folder) / os.environ.get("LOCAL_RANK", "0")
