"""On one node the examples' launcher opens no port that another host reaches."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.training_runs import REPOSITORY, TINY, heed_signals, ranks_of, write_tokens

LISTENING = "0A"
LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


def addresses_of(pid: int) -> set[str]:
    """Addresses, as /proc spells them, at which a process listens."""
    open_files = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == LISTENING and f"socket:[{row[9]}]" in open_files}


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="listening sockets are found in /proc")
def test_nothing_listens_beyond_loopback_on_one_node(tmp_path: Path) -> None:
    flags = f"{TINY} --data-path {write_tokens(tmp_path)} --train-iters 100000 --tensor-model-parallel-size 2 --save {tmp_path}/saved"
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1", "NPROC": "2"}
    words = [str(REPOSITORY / "examples" / "launch.sh"), *flags.split()]
    process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=heed_signals)
    assert process.stdout is not None
    for line in process.stdout:
        if re.search(r"iteration +1/", line):
            break
    ranks = ranks_of(process.pid)
    torchrun = int(re.search(r"PPid:\s+(\d+)", Path(f"/proc/{ranks[0]}/status").read_text())[1])  # type: ignore[index]
    found = {pid: addresses_of(pid) for pid in (process.pid, torchrun, *ranks)}
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert set().union(*found.values()) <= set(LOOPBACK), found
    assert found[process.pid] == found[torchrun] == set()
    assert all(found[rank] for rank in ranks)
