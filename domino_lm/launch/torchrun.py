"""torchrun on one node of a job, behind a process that answers signals for it.

    python -m domino_lm.launch.torchrun --nproc-per-node 8 -- -m domino_lm.pretrain --preset gpt3-1.3b ...

starts what stands after ``--`` on each rank. torchrun itself answers a signal by ending the ranks, with SIGKILL
after 30 s. Here it stands in a session of its own, which no terminal reaches, and signals go to the ranks: SIGINT, SIGHUP and
SIGTERM have them save and end, SIGUSR1 has them save and go on. The exit code is the ranks', not torchrun's.
"""

import argparse
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

from domino_lm.config.foreign_text import int_of_flag
from domino_lm.launch.exit_code import EXIT_FAILED_RUN, EXIT_NOT_SAVED, EXIT_WRONG_SETTINGS, FOLDER, code_of_ranks
from domino_lm.launch.meeting import MeetingError, OtherProgramError, meet
from domino_lm.launch.signal_watch import SignalWatch
from domino_lm.parallel.interface import InterfaceError, addresses_by_interface, addresses_of_host, interface_towards
from domino_lm.parallel.store_file import STORE_FILE

PREFLIGHT = ("-m", "domino_lm.tools.preflight")
CUT_S = 300
"""How long the link between nodes that restart may be cut, or a node be late, before torchrun counts it as dead (by default 60 and 15 s)."""

PATIENCE = f"read_timeout={CUT_S},keep_alive_interval=5,keep_alive_max_attempt={CUT_S // 5}"
JOIN_S = 300.0
LOOPBACK = "lo"
SHUTDOWN_TIMEOUT_S = 600
"""What torchrun waits before SIGKILL if a signal reaches it all the same, as Slurm's do; where PyTorch knows the variable."""

POLL_S = 0.2
KILLED_AFTER_S = 10.0
"""How long after a second Ctrl-C ranks that are still there are killed."""

_DEATH_SIGNAL = 1


@dataclass(frozen=True, kw_only=True)
class Node:
    """One node of a job."""

    nproc_per_node: int = 8
    """Ranks on this node."""

    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "localhost"
    master_port: int = 29500
    max_restarts: int = 0
    """How often all ranks are started again after one has failed."""

    def torchrun(self, port: int, restarts: int, store: Path) -> list[str]:
        """The command that starts ranks on this node, up to the program; nodes meet at ``port`` of node 0, a single one in the file ``store``."""
        words = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(self.nproc_per_node),
            "--max-restarts",
            str(restarts),
        ]
        if self.nnodes == 1:
            # Not --standalone, which listens on all interfaces.
            words += ["--rdzv-backend", "c10d", "--rdzv-id", "alone", "--rdzv-endpoint", str(store), "--rdzv-conf", "store_type=file"]
            return [*words, "--local-addr", "127.0.0.1"]
        words += ["--nnodes", str(self.nnodes)]
        if not self.max_restarts:
            return [*words, "--node-rank", str(self.node_rank), "--master-addr", self.master_addr, "--master-port", str(port)]
        # Nodes that start again together must meet again, which a fixed list of ranks cannot.
        settings = f"is_host={str(self.node_rank == 0).lower()},{PATIENCE}"
        meeting = ["--rdzv-backend", "c10d", "--rdzv-id", f"port-{port}", "--rdzv-endpoint", f"{self.master_addr}:{port}"]
        return [*words, *meeting, "--rdzv-conf", settings, *self._own_address()]

    def meeting_in(self, store: Path, environment: Mapping[str, str]) -> Mapping[str, str]:
        """``environment`` in which the ranks of a single node meet in a file beside ``store``, and none of them listens for the others."""
        return {**environment, STORE_FILE: f"{store}-ranks"} if self.nnodes == 1 else environment

    def _own_address(self) -> list[str]:
        """Where the other nodes' ranks find those of this node, if its host name does not lead there."""
        interface = interface_towards(self.master_addr, addresses_of_host())
        return [] if interface is None else ["--local-addr", addresses_by_interface()[interface]]

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """What torchrun and its ranks get of the environment; what is ``given`` stays."""
        defaults = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_TIMEOUT_S), "OMP_NUM_THREADS": "1"}
        if (
            self.max_restarts or self.nnodes == 1
        ):  # or restarted ranks would find the addresses of those that died; nor does torchrun listen then
            defaults["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        if self.nnodes == 1 and LOOPBACK in [name for _, name in socket.if_nameindex()]:
            defaults |= {"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": LOOPBACK}
        return {**defaults, **given}


class Relay:
    """What signals do to one torchrun and its ranks, whose exit codes appear in ``codes``."""

    def __init__(self, torchrun: "subprocess.Popen[bytes]", codes: Path | None) -> None:
        self._torchrun, self._codes = torchrun, codes
        self._interrupted = False
        self._stopping: list[int] = []
        self.left = ""
        """The signal that ended torchrun before it had ranks."""

    def received(self, number: int) -> None:
        """Pass a signal on, to the ranks alone and not to what they have started.

        The second SIGINT goes as SIGTERM, as torchrun has it, since terminals and Slurm may double the first.
        """
        ranks = children_of(self._torchrun.pid)
        if number == signal.SIGUSR1:
            _send(ranks, number)
            return
        second = number == signal.SIGINT and self._interrupted
        self._interrupted |= number == signal.SIGINT
        if not ranks:
            self.left = signal.Signals(number).name
        elif not self._stopping:
            self._stopping = ranks
            threading.Thread(target=self._end_with_ranks, daemon=True).start()
        _send(ranks, signal.SIGTERM if second else number)
        if second or not ranks:
            self._torchrun.kill()  # it has nothing to do any more, and would start failed ranks again

    def settle(self) -> None:
        """Return when no rank that was asked to leave is there; those that do not leave are killed."""
        until_s = time.monotonic() + KILLED_AFTER_S
        while any(map(_is_alive, self._stopping)) and time.monotonic() < until_s:
            time.sleep(POLL_S)
        _send([pid for pid in self._stopping if _is_alive(pid)], signal.SIGKILL)

    def _end_with_ranks(self) -> None:
        """A run that was asked to end is not started again if it could not save."""
        while any(map(_is_alive, self._stopping)):
            time.sleep(POLL_S)
        if self._codes is not None and code_of_ranks(self._codes, len(self._stopping)) != 0:
            _send(children_of(self._torchrun.pid), signal.SIGKILL)
            self._torchrun.kill()


def run(words: Sequence[str], environment: Mapping[str, str], codes: Path | None = None) -> tuple[int, str]:
    """Run the torchrun command ``words``, and give its exit code, and the signal that ended it before it had ranks, if one did."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    environment = environment if codes is None else {**environment, FOLDER: str(codes)}
    torchrun = subprocess.Popen(words, env=environment, start_new_session=True, preexec_fn=lambda: _prepare(libc))
    relay = Relay(torchrun, codes)
    with SignalWatch((signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1), relay.received, always=(signal.SIGUSR1,)):
        code = torchrun.wait()
        relay.settle()
    return code, relay.left


def children_of(pid: int) -> list[int]:
    """The processes that a process has started and that run now."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _state(entry)[1] == pid]


def _state(entry: Path) -> tuple[str, int]:
    """State and parent of a process, by its folder in /proc; Z and 0 if it is gone."""
    try:
        state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return "Z", 0
    return state, int(parent)


def _is_alive(pid: int) -> bool:
    return _state(Path(f"/proc/{pid}"))[0] != "Z"


def _send(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _prepare(libc: ctypes.CDLL | None) -> None:
    """In the child: SIGUSR1 must not kill torchrun, nor ranks that do not listen yet; and it ends with this process."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if libc is not None:
        libc.prctl(_DEATH_SIGNAL, signal.SIGKILL)  # at which the ranks end too, and save nothing: a new job may begin beside them


def train(node: Node, program: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run ``program``, which is ``-m domino_lm.pretrain`` and flags, on this node; returns 0 only if each rank ended so."""
    with tempfile.TemporaryDirectory(prefix="domino-lm-") as folder:
        store, codes = Path(folder) / "store", Path(folder) / "codes"
        codes.mkdir()
        words = [*node.torchrun(node.master_port, node.max_restarts, store), *program]
        code, left = run(words, node.meeting_in(store, environment), codes)
        ended = code_of_ranks(codes, node.nproc_per_node)
    if left:
        _say(f"{left}: left before the ranks had started.")
        return EXIT_NOT_SAVED
    if ended is None:
        _say(f"error: node {node.node_rank}: torchrun ended with code {code}, and not every rank of this node ended its run.")
        return code or EXIT_FAILED_RUN
    return ended


def gather(node: Node, seconds: float) -> None:
    """Return once all nodes are there; raises MeetingError as `meet`. With restarts it says what they do not cover."""
    name = f"node {node.node_rank}"
    try:
        meet(node.node_rank, node.nnodes, node.master_addr, node.master_port, seconds, lambda line: _say(f"{name}: {line}"))
    except OtherProgramError as error:
        if not node.max_restarts:
            raise
        _say(f"{name}: {error} If it is torchrun, the job runs already, and this node joins it.")
    if node.max_restarts and node.node_rank == 0:
        _say(
            f"{name}: a rank or another node that dies has all ranks start again, {node.max_restarts} time(s); the death of this node, or a link "
            f"that is cut for over {CUT_S} s, ends the job, which then has to be started again on all nodes."
        )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def check_nodes(node: Node, own: argparse.Namespace, flags: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the preflight of all nodes; returns its exit code."""
    with tempfile.TemporaryDirectory(prefix="domino-lm-") as folder:
        store = Path(folder) / "store"
        # A port of its own, which no node can still hold when the next one asks for it.
        words = [*node.torchrun(node.master_port + 1, 0, store), *PREFLIGHT, "--min-free-gib", str(own.min_free_gib)]
        words += ["--tensor-model-parallel-size", tensor_parallel_of(flags), "--shared", *own.preflight, "--", *flags[2:]]
        code, left = run(words, node.meeting_in(store, environment))
    return EXIT_NOT_SAVED if left else code


def tensor_parallel_of(flags: Sequence[str]) -> str:
    """The tensor-parallel size that a command line asks for."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--tensor-model-parallel-size", default="1")
    return str(parser.parse_known_args(list(flags))[0].tensor_model_parallel_size)


def flag_parser() -> argparse.ArgumentParser:
    """The flags of this program, before ``--``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--nproc-per-node", type=int_of_flag, default=8, help="ranks on this node (default 8)")
    parser.add_argument("--nnodes", type=int_of_flag, default=1, help="nodes of the job (default 1)")
    parser.add_argument("--node-rank", type=int_of_flag, default=0, help="which of them this is (default 0)")
    parser.add_argument("--master-addr", default="localhost", help="address of node 0")
    parser.add_argument("--master-port", type=int_of_flag, default=29500, help="port at which the nodes meet (default 29500)")
    parser.add_argument(
        "--max-restarts", type=int_of_flag, default=0, help="how often all ranks are started again after one has failed (default 0)"
    )
    parser.add_argument("--join-seconds", type=float, default=JOIN_S, help=f"how long nodes wait for each other (default {JOIN_S:g})")
    parser.add_argument("--preflight", nargs="*", default=[], metavar="FOLDER", help="check the nodes first, which share these folders")
    parser.add_argument("--min-free-gib", type=float, default=10.0, help="free disk that each of these folders needs (default 10)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Check the nodes if asked to, train, and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until there are ranks
    own, program = flag_parser().parse_args(words[:end]), words[end + 1 :]
    node = Node(**{item.name: getattr(own, item.name) for item in fields(Node)})
    environment = node.environment(os.environ)
    try:
        if node.nnodes > 1:
            gather(node, own.join_seconds)
    except (MeetingError, InterfaceError) as error:
        _say(f"error: node {node.node_rank}: {error}")
        return EXIT_WRONG_SETTINGS
    except KeyboardInterrupt:
        _say(f"SIGINT: node {node.node_rank} left before the ranks had started.")
        return EXIT_NOT_SAVED
    return (own.preflight and check_nodes(node, own, program, environment)) or train(node, program, environment)


if __name__ == "__main__":
    sys.exit(main())
