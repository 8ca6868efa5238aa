"""A slow network on one machine: one rank a network namespace, links limited to a rate, nothing left behind.

    python benchmarks/shaped_network.py --ranks 2 --gbit 1                      # make it, measure it, take it down
    python benchmarks/shaped_network.py --ranks 2 --gbit 1 -- python train.py   # run a command on every rank

Two ranks are joined by one veth pair, more by a bridge. ``tc tbf`` limits what each end sends, so a link carries its
rate in both directions at once. Every rank is pinned to a core. Needs root, and ``ip`` and ``tc`` of iproute2.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

PREFIX = "domino-bench"
INTERFACE = "shaped0"
SUBNET = "10.77.0"
LARGEST_MTU = 65535
ETHERNET_HEADER_BYTES = 14
# A bucket of two packets: enough for the kernel's timers at these rates, little enough that a message does not jump the queue.
BURST_PACKETS = 2
QUEUE_BYTES = 8 << 20
GIGA = 1e9
STREAM_SECONDS = 1.0
STREAM_PORT = 29470
ORPHAN_SECONDS = 5.0


class NetworkError(RuntimeError):
    """The network cannot be made here; the message says what is missing and what to do."""


@dataclass(frozen=True)
class Link:
    """What every rank's end of the network is limited to."""

    gbit_per_s: float
    mtu: int = LARGEST_MTU
    delay_ms: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        """The rate in one direction."""
        return self.gbit_per_s * GIGA / 8

    def __str__(self) -> str:
        delay = f", {self.delay_ms:g} ms" if self.delay_ms else ""
        return f"{self.gbit_per_s:g} Gbit/s, MTU {self.mtu}{delay}"


class ShapedNetwork:
    """``ranks`` namespaces named after this process; use it as a context manager.

    Raises NetworkError without root, without iproute2, or where the kernel refuses. What an earlier, killed run left is
    removed first. SIGTERM leaves the ``with`` block as an exception, so the network goes then too.
    """

    def __init__(self, ranks: int, link: Link) -> None:
        check_tools()
        if not 1 <= ranks <= 200:
            raise NetworkError(f"--ranks {ranks}: use 1 to 200, one subnet's worth")
        self.ranks = ranks
        self.link = link
        self._names = [f"{PREFIX}-{os.getpid()}-{rank}" for rank in range(ranks)]
        self._switch = f"{PREFIX}-{os.getpid()}-switch"

    def __enter__(self) -> ShapedNetwork:
        remove_leftovers()
        self._previous = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
        try:
            self._join()
            self.shape(self.link)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End what still runs in the namespaces and delete them; a link goes with its namespace."""
        for name in (*self._names, self._switch):
            _delete_namespace(name)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def shape(self, link: Link) -> None:
        """Limit every link anew, also while ranks are connected over it."""
        for name in self._names:
            _run("ip", "-n", name, "link", "set", INTERFACE, "mtu", str(link.mtu))
            burst = BURST_PACKETS * (link.mtu + ETHERNET_HEADER_BYTES)
            limit = ("rate", f"{round(link.gbit_per_s * GIGA)}bit", "burst", str(burst), "limit", str(QUEUE_BYTES))
            _run("tc", "-n", name, "qdisc", "replace", "dev", INTERFACE, "root", "handle", "1:", "tbf", *limit)
            if link.delay_ms:
                self._delay(name, link.delay_ms)
        self.link = link

    def address(self, rank: int) -> str:
        """The rank's address inside the network."""
        return f"{SUBNET}.{rank + 1}"

    def environment(self, rank: int, world_size: int | None = None, port: int = 29400) -> dict[str, str]:
        """What torchrun would set for this rank, with gloo on the shaped link and one thread a rank."""
        return {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size or self.ranks),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": "1",
        }

    def start(self, rank: int, command: Sequence[str], env: dict[str, str] | None = None, **popen: Any) -> subprocess.Popen[str]:
        """Run ``command`` in the rank's namespace, pinned to its core; further arguments go to Popen."""
        inside = ["ip", "netns", "exec", self._names[rank], "taskset", "--cpu-list", str(self.core(rank)), *command]
        return subprocess.Popen(inside, env=env or self.environment(rank), text=True, **popen)

    @staticmethod
    def core(rank: int) -> int:
        """The core that a rank is pinned to; ranks share cores where there are too few."""
        cores = sorted(os.sched_getaffinity(0))
        return cores[rank % len(cores)]

    def measure(self) -> float:
        """Bits per second that one TCP stream from rank 1 to rank 0 really gets."""
        script = [sys.executable, str(Path(__file__).resolve()), "--stream"]
        receiver = self.start(0, [*script, self.address(0)], stdout=subprocess.PIPE)
        sender = self.start(1, [*script, self.address(0), "--send"])
        bits_per_s = receiver.communicate(timeout=60)[0]
        if sender.wait(timeout=60) or receiver.returncode:
            raise NetworkError(f"no stream from rank 1 to rank 0 ({self.address(0)}): the link does not carry data")
        return float(bits_per_s)

    def _join(self) -> None:
        for name in self._names:
            _run("ip", "netns", "add", name)
        if self.ranks == 2:
            first, second = self._names
            _run("ip", "link", "add", INTERFACE, "netns", first, "type", "veth", "peer", "name", INTERFACE, "netns", second)
        else:
            self._join_bridge()
        for rank, name in enumerate(self._names):
            _run("ip", "-n", name, "addr", "add", f"{self.address(rank)}/24", "dev", INTERFACE)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "set", INTERFACE, "mtu", str(self.link.mtu), "up")

    def _join_bridge(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "bridge0", "type", "bridge")
        for rank, name in enumerate(self._names):
            port = f"port{rank}"
            _run("ip", "link", "add", INTERFACE, "netns", name, "type", "veth", "peer", "name", port, "netns", self._switch)
            _run("ip", "-n", self._switch, "link", "set", port, "mtu", str(LARGEST_MTU), "master", "bridge0", "up")
        _run("ip", "-n", self._switch, "link", "set", "bridge0", "mtu", str(LARGEST_MTU), "up")

    def _delay(self, name: str, delay_ms: float) -> None:
        try:
            _run("tc", "-n", name, "qdisc", "replace", "dev", INTERFACE, "parent", "1:1", "netem", "delay", f"{delay_ms}ms")
        except NetworkError as error:
            raise NetworkError(f"--delay-ms {delay_ms:g}: this kernel has no netem queue; leave the delay out. {error}") from error


def check_tools() -> None:
    """Raise NetworkError, with what to install, where namespaces and shaping cannot work."""
    missing = [tool for tool in ("ip", "tc", "taskset") if shutil.which(tool) is None]
    if missing:
        raise NetworkError(f"{' and '.join(missing)} not found; install them: apt-get install iproute2 util-linux")
    if os.geteuid() != 0:
        raise NetworkError("network namespaces need root; run this as root (sudo), or in a container with --cap-add NET_ADMIN,SYS_ADMIN")


def remove_leftovers() -> list[str]:
    """Delete namespaces whose maker is gone, and end what still runs in them; returns their names."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    stale = []
    for name in (line.split()[0] for line in listed.splitlines() if line.startswith(f"{PREFIX}-")):
        maker = re.fullmatch(rf"{PREFIX}-(\d+)-\w+", name)
        if maker and not _is_ours(int(maker[1])):
            _delete_namespace(name)
            stale.append(name)
    return stale


def _is_ours(process: int) -> bool:
    """Whether that process lives and is a Python program; numbers of ended processes are given out again."""
    try:
        return b"python" in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


def _delete_namespace(name: str) -> None:
    def inside() -> list[int]:
        listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
        return [int(number) for number in listed.split()]

    deadline_s = time.monotonic() + ORPHAN_SECONDS
    while (running := inside()) and time.monotonic() < deadline_s:
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.02)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NetworkError(f"'{' '.join(command)}' failed: {done.stderr.strip()}")


def _receive(address: str) -> None:
    with socket.create_server((address, STREAM_PORT)) as server:
        connection, _ = server.accept()
        buffer, received, start_s = bytearray(1 << 20), 0, time.perf_counter()
        while count := connection.recv_into(buffer):
            received += count
        print(received * 8 / (time.perf_counter() - start_s))


def _send(address: str) -> None:
    for _ in range(100):
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection((address, STREAM_PORT)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)
            end_s = time.perf_counter() + STREAM_SECONDS
            while time.perf_counter() < end_s:
                connection.sendall(b"\0" * (1 << 17))
            return
        time.sleep(0.05)
    raise NetworkError(f"nobody listens on {address}:{STREAM_PORT}")


def _all_reduce_rate() -> None:
    """What one rank prints for `bus_bandwidth`."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=dist.FileStore(os.environ["DOMINO_BENCH_STORE"], size), rank=rank, world_size=size)
    buffer = torch.ones(4 << 20)
    dist.all_reduce(buffer)
    seconds = []
    for _ in range(5):
        dist.barrier()
        start_s = time.perf_counter()
        dist.all_reduce(buffer.fill_(1))
        seconds.append(time.perf_counter() - start_s)
    dist.destroy_process_group()
    print(2 * (size - 1) / size * buffer.nbytes * 8 / sorted(seconds)[len(seconds) // 2])


def bus_bandwidth(network: ShapedNetwork) -> float:
    """Bits per second that gloo's all-reduce of 16 MiB moves over each link: 2 (n - 1) / n of the buffer over its time."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        command = [sys.executable, str(Path(__file__).resolve()), "--all-reduce"]
        ranks = [
            network.start(rank, command, {**network.environment(rank), "DOMINO_BENCH_STORE": store}, stdout=subprocess.PIPE)
            for rank in range(network.ranks)
        ]
        answers = [rank.communicate(timeout=300)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise NetworkError("the all-reduce over the shaped link failed; see the rank's message above")
    return min(map(float, answers))


def run_command(network: ShapedNetwork, command: Sequence[str]) -> int:
    """Run ``command`` on every rank and print their lines with the rank before them; returns the worst exit status."""
    ranks = [network.start(r, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for r in range(network.ranks)]
    for rank, line in _lines([process.stdout for process in ranks]):
        print(f"[{rank}] {line}", end="", flush=True)
    return max(abs(process.wait()) for process in ranks)


def _lines(streams: Sequence[IO[str] | None]) -> Iterator[tuple[int, str]]:
    """Lines of all streams as they come."""
    import queue
    import threading

    lines: queue.Queue[tuple[int, str | None]] = queue.Queue()

    def read(rank: int, stream: IO[str]) -> None:
        for line in stream:
            lines.put((rank, line))
        lines.put((rank, None))

    open_streams = [stream for stream in streams if stream is not None]
    for rank, stream in enumerate(open_streams):
        threading.Thread(target=read, args=(rank, stream), daemon=True).start()
    ended = 0
    while ended < len(open_streams):
        rank, line = lines.get()
        if line is None:
            ended += 1
        else:
            yield rank, line


def main(arguments: list[str] | None = None) -> int:
    """Parse, make the network, and measure it or run the command; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="namespaces, each with one rank")
    parser.add_argument("--gbit", type=float, default=1.0, help="rate of each link in Gbit/s, in each direction")
    parser.add_argument("--mtu", type=int, default=LARGEST_MTU, help="largest packet; small ones cost the ranks' CPU")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="latency of each link, where the kernel has netem")
    parser.add_argument("--stream", metavar="ADDRESS", help=argparse.SUPPRESS)
    parser.add_argument("--send", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--all-reduce", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs="*", help="runs on every rank, after --")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.all_reduce:
            _all_reduce_rate()
        elif chosen.stream:
            _send(chosen.stream) if chosen.send else _receive(chosen.stream)
        else:
            with ShapedNetwork(chosen.ranks, Link(chosen.gbit, chosen.mtu, chosen.delay_ms)) as network:
                if chosen.command:
                    return run_command(network, chosen.command)
                report = {**asdict(network.link), "ranks": network.ranks, "all_reduce_busbw_bits_per_s": bus_bandwidth(network)}
                print(json.dumps({**report, "tcp_bits_per_s": network.measure()} if network.ranks > 1 else report))
    except NetworkError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
