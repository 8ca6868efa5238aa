"""Two nodes, as network namespaces whose host names resolve as Debian has it; the scripts of the examples on both."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.training_runs import REPOSITORY, TINY, heed_signals, write_tokens

PATIENCE_S = 300
ADDRESS = "10.78.0.1"
TOOLS = [name for name in ("ip", "unshare") if shutil.which(name) is None]
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0 or bool(TOOLS), reason="network namespaces need root, and ip and unshare"),
]


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=20)


class Nodes:
    """Two hosts named node-0 and node-1, joined by one link; each knows its own name as 127.0.1.1 alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.names = [f"domino-test-{os.getpid()}-{node}" for node in range(2)]
        self._hosts = [Path("/etc/netns") / name for name in self.names]
        self.started: list[subprocess.Popen[str]] = []

    def make(self) -> None:
        for node, (name, hosts) in enumerate(zip(self.names, self._hosts, strict=True)):
            run("ip", "netns", "add", name)
            hosts.mkdir(parents=True)
            (hosts / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 node-{node}\n")
        run("ip", "link", "add", "up0", "netns", self.names[0], "type", "veth", "peer", "name", "up0", "netns", self.names[1])
        for node, name in enumerate(self.names):
            run("ip", "-n", name, "addr", "add", f"10.78.0.{node + 1}/24", "dev", "up0")
            for link in ("lo", "up0"):
                run("ip", "-n", name, "link", "set", link, "up")

    def launch(self, node: int, flags: str, master: str = ADDRESS, **variables: str) -> subprocess.Popen[str]:
        """launch.sh on a node, with its output in a file."""
        environment = {
            **os.environ,
            "PYTHON": sys.executable,
            "PYTHONPATH": str(REPOSITORY),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
        }
        environment |= {"NNODES": "2", "NODE_RANK": str(node), "NPROC": "1", "MASTER_ADDR": master, "MASTER_PORT": "29700", **variables}
        environment.pop("GLOO_SOCKET_IFNAME", None)
        script = f"hostname node-{node}; exec {REPOSITORY}/examples/launch.sh {flags}"
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.names[node], "unshare", "--uts", "bash", "-c", script],
            env=environment,
            text=True,
            stdout=self.output(node).open("w"),
            stderr=subprocess.STDOUT,
            preexec_fn=heed_signals,
        )
        self.started.append(process)
        return process

    def output(self, node: int) -> Path:
        return self._folder / f"node-{node}.txt"

    def said(self, node: int = 0) -> str:
        return self.output(node).read_text()

    def until(self, text: str) -> None:
        """Wait until node 0 has printed a text."""
        until_s = time.monotonic() + PATIENCE_S
        while text not in self.said():
            assert time.monotonic() < until_s, self.said(0) + self.said(1)
            assert self.started[0].poll() is None, self.said(0) + self.said(1)
            time.sleep(0.2)

    def codes(self) -> list[int]:
        return [process.wait(PATIENCE_S) for process in self.started]

    def remove(self) -> None:
        for process in self.started:
            process.terminate()
        for process in self.started:
            process.wait(60)
        for name, hosts in zip(self.names, self._hosts, strict=True):
            run("ip", "netns", "del", name)
            shutil.rmtree(hosts)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    try:
        made.make()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
    yield made
    made.remove()


def flags_of(folder: Path, more: str) -> str:
    return f"{TINY} --data-path {write_tokens(folder)} --eval-interval 0 --save {folder}/saved --load {folder}/saved {more}"


def test_hosts_whose_names_lead_nowhere_train_and_a_signal_to_one_launcher_ends_both_with_0(nodes: Nodes, tmp_path: Path) -> None:
    flags = flags_of(tmp_path, "--tensor-model-parallel-size 2 --train-iters 100000")
    launchers = [nodes.launch(node, flags, PREFLIGHT=str(tmp_path), PREFLIGHT_FREE_GIB="0") for node in range(2)]
    nodes.until("iteration        3/")
    launchers[1].send_signal(signal.SIGTERM)
    assert nodes.codes() == [0, 0], nodes.said(0) + nodes.said(1)
    assert "preflight: fit" in nodes.said()
    assert nodes.said().count("successfully saved checkpoint") == 1
    assert "training ended: SIGTERM" in nodes.said()


def test_a_wrong_address_and_a_port_of_a_stranger_are_said_in_seconds(nodes: Nodes, tmp_path: Path) -> None:
    begin_s = time.monotonic()
    for node, master in ((0, "10.78.0.9"), (1, "no-such-node.invalid")):
        nodes.launch(node, "--mock-data", master, JOIN_SECONDS="5")
    assert nodes.codes() == [2, 2]
    assert time.monotonic() - begin_s < 60
    assert (
        "error: node 0: MASTER_ADDR 10.78.0.9 does not lead to node-0, which is started as node 0; its addresses are 10.78.0.1 (up0)"
        in nodes.said(0)
    )
    assert "error: node 1: MASTER_ADDR no-such-node.invalid does not resolve on node-1" in nodes.said(1)
