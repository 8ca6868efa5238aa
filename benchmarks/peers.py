"""The peers' own virtual environment, built from PyPI the first time it is needed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from benchmarks.case import DEEPSPEED, MEGATRON

FOLDER = Path(__file__).resolve().parent / ".venv"
REQUIREMENTS = {MEGATRON: "megatron-core==0.16.1", DEEPSPEED: "deepspeed==0.19.8"}


class PeerError(RuntimeError):
    """The peers cannot be installed; the message says what failed and how to go on without them."""


def peer_python() -> Path:
    """The interpreter that can import the peers."""
    return FOLDER / "bin" / "python"


def install_peers() -> None:
    """Build the environment unless it stands; it holds the same torch as ours, so that both run the same kernels.

    Raises PeerError.
    """
    wanted = [f"torch=={version('torch').split('+')[0]}", *REQUIREMENTS.values()]
    stamp = FOLDER / "installed.txt"
    if stamp.exists() and stamp.read_text().split() == wanted:
        return
    print(f"building the peers' environment in {FOLDER} ({', '.join(wanted)}); this takes minutes, once", flush=True)
    shutil.rmtree(FOLDER, ignore_errors=True)
    _run(sys.executable, "-m", "venv", str(FOLDER))
    _run(str(peer_python()), "-m", "pip", "--disable-pip-version-check", "install", "-q", *wanted)
    stamp.write_text("\n".join(wanted))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeerError(f"'{' '.join(command)}' failed; --programs domino_lm measures without peers.\n{done.stderr.strip()}")
