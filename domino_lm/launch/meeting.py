"""The launchers of a job's nodes meet before torchrun starts, so that a wrong name, address or port is found and said at once.

Node 0 listens at the job's port. Every other node says which it is, and hears ``go`` once all are there; then the port is free
for torchrun. torchrun by itself waits for minutes without a word, or fails inside C++.
"""

import errno
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress

from domino_lm.parallel.interface import addresses_by_interface

HELLO = "domino-lm"
NAME_S = 60.0
"""How long the name of node 0 may not resolve: names of a cluster may appear only when their nodes do."""

PROBE_S = 10.0
SAY_EVERY_S = 60.0
RETRY_S = 0.5
_LINE_BYTES = 256

Say = Callable[[str], None]


class MeetingError(RuntimeError):
    """Nodes that do not meet; the message says where, and what to change."""


class OtherProgramError(MeetingError):
    """Something that is no launcher answers, and says nothing."""


def resolve(name: str, seconds: float, say: Say) -> str:
    """The address of ``name``, which may take ``seconds`` to be known; raises MeetingError after that."""
    until_s, said = time.monotonic() + seconds, False
    while True:
        try:
            return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as error:
            if not said:
                say(f"MASTER_ADDR {name} does not resolve on {socket.gethostname()} ({error.strerror}); trying for {seconds:g} s")
            said = True
            if time.monotonic() >= until_s:
                raise MeetingError(
                    f"MASTER_ADDR {name} does not resolve on {socket.gethostname()}; give an address of node 0, or make its name known here."
                ) from error
            time.sleep(min(RETRY_S, max(0.0, until_s - time.monotonic())))


def meet(node: int, nodes: int, master: str, port: int, seconds: float, say: Say) -> None:
    """Return on each of ``nodes`` once all are there; ``say`` is told what is waited for.

    Raises MeetingError if the address or the port is wrong, if two launchers are the same node, or after ``seconds``;
    OtherProgramError if node 0's port is another program's, which torchrun of a job that runs already would be too.
    """
    address = resolve(master, min(NAME_S, seconds), say)
    if node == 0:
        with Host(nodes, port) as host:
            host.require_address(master, address)
            host.wait(seconds, say)
    else:
        join(node, nodes, f"{master}:{port}", (address, port), seconds, say)


class Host:
    """Node 0, listening while entered. Raises MeetingError if it cannot."""

    def __init__(self, nodes: int, port: int) -> None:
        self._nodes, self._port = nodes, port
        self._probe = uuid.uuid4().hex
        self._there: dict[int, socket.socket] = {}
        self._proved = False
        self._changed = threading.Condition()

    def __enter__(self) -> "Host":
        try:
            self._listener = socket.create_server(("", self._port), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError as error:
            self._listener = self._listen_v4(error)
        threading.Thread(target=self._accept, name="meeting", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._there.values():
            connection.close()

    def require_address(self, master: str, address: str) -> None:
        """Raise MeetingError unless ``address`` leads to this listener."""
        with suppress(OSError), socket.create_connection((address, self._port), timeout=PROBE_S) as way:
            way.sendall(f"{HELLO} probe {self._probe}\n".encode())
            with self._changed:
                self._changed.wait_for(lambda: self._proved, PROBE_S)
        if not self._proved:
            own = ", ".join(f"{one} ({name})" for name, one in addresses_by_interface().items()) or "none but loopback"
            shown = master if master == address else f"{master} ({address})"
            raise MeetingError(
                f"MASTER_ADDR {shown} does not lead to {socket.gethostname()}, which is started as node 0; its addresses are {own}. "
                "Give one of these as MASTER_ADDR on all nodes, or NODE_RANK=0 to the node that has it."
            )

    def wait(self, seconds: float, say: Say) -> None:
        """Wait for all other nodes, and have them go; raises MeetingError after ``seconds``."""
        until_s, said, said_s = time.monotonic() + seconds, "", 0.0
        with self._changed:
            while missing := [node for node in range(1, self._nodes) if node not in self._there]:
                left_s = until_s - time.monotonic()
                what = f"node(s) {', '.join(map(str, missing))} of {self._nodes} at port {self._port}"
                if left_s <= 0:
                    raise MeetingError(f"{what} did not come within {seconds:g} s; start their launchers with this node's MASTER_ADDR.")
                if what != said or time.monotonic() - said_s > SAY_EVERY_S:
                    say(f"waiting for {what}, for up to {left_s:.0f} s")
                    said, said_s = what, time.monotonic()
                self._changed.wait(min(SAY_EVERY_S, left_s))
            for connection in self._there.values():
                _send(connection, "go")

    def _listen_v4(self, error: OSError) -> socket.socket:
        if error.errno != errno.EADDRINUSE:  # a host without IPv6
            with suppress(OSError):
                return socket.create_server(("", self._port))
        raise MeetingError(
            f"MASTER_PORT {self._port} cannot be opened on {socket.gethostname()}: {os.strerror(error.errno or 0)}. Another program "
            f"may hold it (ss -ltnp names it); end that, or give another MASTER_PORT on all nodes."
        ) from error

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._hear, args=(connection,), daemon=True).start()

    def _hear(self, connection: socket.socket) -> None:
        connection.settimeout(PROBE_S)
        words = _receive(connection).split()
        with self._changed:
            answer = self._answer(words, connection)
            if answer:
                _send(connection, answer)  # before `wait` can have it go
            self._changed.notify_all()
        if answer != "wait":
            connection.close()

    def _answer(self, words: Sequence[str], connection: socket.socket) -> str:
        """What a connection is told; empty if it is nobody's."""
        if words == [HELLO, "probe", self._probe]:
            self._proved = True
            return ""
        if len(words) != 4 or words[0] != HELLO or not (words[1] + words[2]).isdigit():
            return ""
        node, nodes, host = int(words[1]), int(words[2]), words[3]
        if nodes != self._nodes:
            return f"no NNODES is {nodes} on {host} and {self._nodes} on node 0"
        if node in self._there or not 0 < node < nodes:
            return f"no NODE_RANK {node} of {host} is another launcher's already, or not one of 1 to {nodes - 1}"
        self._there[node] = connection
        return "wait"


def join(node: int, nodes: int, shown: str, where: tuple[str, int], seconds: float, say: Say) -> None:
    """Come to node 0 ``where`` it listens, and return when it says go; raises MeetingError if it does not within ``seconds``."""
    until_s = time.monotonic() + seconds
    reason, said_s = "", float("-inf")
    while (left_s := until_s - time.monotonic()) > 0:
        try:
            with socket.create_connection(where, timeout=min(left_s, PROBE_S)) as connection:
                if said_s < 0:
                    say(f"waiting for the other nodes at {shown}, for up to {left_s:.0f} s")
                    said_s = time.monotonic()
                _come(connection, node, nodes, shown, left_s)
                return
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() - said_s >= SAY_EVERY_S:
            said_s = time.monotonic()
            say(f"waiting for node 0 at {shown}, for up to {left_s:.0f} s ({reason})")
        time.sleep(min(RETRY_S, left_s))
    raise MeetingError(
        f"node 0 was not found at {shown} within {seconds:g} s ({reason}); MASTER_ADDR must be its address, MASTER_PORT the same on all nodes, "
        "its launcher must run, and no firewall stand between."
    )


def _come(connection: socket.socket, node: int, nodes: int, shown: str, seconds: float) -> None:
    connection.settimeout(PROBE_S)
    _send(connection, f"{HELLO} {node} {nodes} {socket.gethostname()}")
    answer = _receive(connection)
    connection.settimeout(seconds)
    if not answer:
        raise OtherProgramError(
            f"what listens at {shown} is not the launcher of node 0: it gave no answer. Give another MASTER_PORT on all nodes."
        )
    if answer.startswith("no "):
        raise MeetingError(f"{answer.removeprefix('no ')}; give each node its own NODE_RANK, from 0, and all the same NNODES.")
    if answer != "wait":
        raise MeetingError(
            f"what listens at {shown} is not the launcher of node 0: it says {answer[:40]!r}. Give another MASTER_PORT on all nodes."
        )
    if _receive(connection) != "go":
        raise MeetingError(f"node 0 at {shown} has ended; its own output says why.")


def _send(connection: socket.socket, line: str) -> None:
    with suppress(OSError):
        connection.sendall(f"{line}\n".encode())


def _receive(connection: socket.socket) -> str:
    """A line, without its end; empty if the other side says none in time, or closes."""
    line = b""
    with suppress(OSError):
        while not line.endswith(b"\n") and len(line) < _LINE_BYTES:
            byte = connection.recv(1)
            if not byte:
                break
            line += byte
    return line.decode(errors="replace").strip()
