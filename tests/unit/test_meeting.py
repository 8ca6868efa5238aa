"""Launchers of several nodes meet, or say what is wrong, in time."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from domino_lm.launch import meeting
from domino_lm.launch.meeting import MeetingError, OtherProgramError, meet, resolve
from domino_lm.parallel.interface import InterfaceError, addresses_by_interface, choose_interface, interface_towards


@pytest.fixture
def port() -> int:
    with socket.create_server(("", 0)) as free:
        return int(free.getsockname()[1])


def silent(line: str) -> None:
    """Listens to nothing that is said."""


def test_nodes_go_once_all_are_there_whatever_their_order(port: int) -> None:
    said: list[str] = []
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(meet, 2, 3, "127.0.0.1", port, 20, silent)
        host = pool.submit(meet, 0, 3, "127.0.0.1", port, 20, said.append)
        time.sleep(0.3)
        assert not first.done()
        assert not host.done()
        pool.submit(meet, 1, 3, "127.0.0.1", port, 20, silent).result(20)
        host.result(20)
        first.result(20)
    assert said  # in an order that the nodes' attempts decide
    assert {line.split(", for up to ")[0] for line in said} <= {
        f"waiting for node(s) {who} of 3 at port {port}" for who in ("1, 2", "1", "2")
    }


def test_the_last_node_to_come_hears_that_it_is_known_before_it_goes(port: int) -> None:
    for _ in range(20):
        with ThreadPoolExecutor(2) as pool:
            host = pool.submit(meet, 0, 2, "127.0.0.1", port, 20, silent)
            pool.submit(meet, 1, 2, "127.0.0.1", port, 20, silent).result(20)
            host.result(20)


def test_a_node_that_does_not_come_is_named_in_the_stated_time(port: int) -> None:
    with pytest.raises(MeetingError, match=rf"^node\(s\) 1 of 2 at port {port} did not come within 0.5 s"):
        meet(0, 2, "127.0.0.1", port, 0.5, silent)


def test_a_node_0_that_does_not_listen_is_named_in_the_stated_time(port: int) -> None:
    said: list[str] = []
    with pytest.raises(MeetingError, match=rf"^node 0 was not found at 127.0.0.1:{port} within 0.7 s \(Connection refused\)"):
        meet(1, 2, "127.0.0.1", port, 0.7, said.append)
    assert said == [f"waiting for node 0 at 127.0.0.1:{port}, for up to 1 s (Connection refused)"]


def test_a_name_that_does_not_resolve_is_said_at_once_and_given_up(port: int) -> None:
    said: list[str] = []
    with pytest.raises(MeetingError, match=r"^MASTER_ADDR no-such-node\.invalid does not resolve on "):
        meet(1, 2, "no-such-node.invalid", port, 0.1, said.append)
    assert said[0].endswith("trying for 0.1 s")
    assert resolve("127.0.0.1", 0, silent) == "127.0.0.1"


def test_an_address_of_another_host_on_node_0_is_refused_with_those_of_this_one(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "PROBE_S", 0.3)
    with pytest.raises(MeetingError, match=r"^MASTER_ADDR 192\.0\.2\.1 does not lead to .*, which is started as node 0; its addresses are"):
        meet(0, 2, "192.0.2.1", port, 5, silent)


@pytest.fixture
def stranger() -> Iterator[Callable[[bytes], int]]:
    """Listens on a port, says something to who comes, and closes."""
    listeners: list[socket.socket] = []

    def serve(listener: socket.socket, banner: bytes) -> None:
        try:
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(banner)
                    connection.recv(100)
        except OSError:
            return

    def listen(banner: bytes) -> int:
        listeners.append(socket.create_server(("", 0)))
        threading.Thread(target=serve, args=(listeners[-1], banner), daemon=True).start()
        return int(listeners[-1].getsockname()[1])

    yield listen
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def test_a_port_that_a_stranger_holds_is_said_on_both_sides(stranger: Callable[[bytes], int]) -> None:
    port = stranger(b"SSH-2.0-OpenSSH\n")
    with pytest.raises(
        MeetingError, match=rf"^MASTER_PORT {port} cannot be opened on .*: Address already in use. Another program may hold it"
    ):
        meet(0, 2, "127.0.0.1", port, 5, silent)
    with pytest.raises(MeetingError, match=rf"^what listens at 127.0.0.1:{port} is not the launcher of node 0: it says 'SSH-2.0"):
        meet(1, 2, "127.0.0.1", port, 5, silent)
    with pytest.raises(OtherProgramError, match="it gave no answer"):
        meet(1, 2, "127.0.0.1", stranger(b""), 5, silent)


@pytest.mark.parametrize(
    ("node", "nodes", "why"), [(1, 3, "NODE_RANK 1 of .* is another launcher's"), (1, 4, "NNODES is 4 on .* and 3 on node 0")]
)
def test_two_launchers_that_contradict_each_other_are_refused(port: int, node: int, nodes: int, why: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        host = pool.submit(meet, 0, 3, "127.0.0.1", port, 1, silent)
        first = pool.submit(meet, 1, 3, "127.0.0.1", port, 5, silent)
        time.sleep(0.3)
        with pytest.raises(MeetingError, match=why):
            meet(node, nodes, "127.0.0.1", port, 5, silent)
        with pytest.raises(MeetingError, match="did not come"):
            host.result(20)
        with pytest.raises(MeetingError, match="has ended; its own output says why"):
            first.result(20)


TWO = {"eth0": "10.0.0.1", "ib0": "10.1.0.1"}


def towards(host: list[str], interfaces: dict[str, str], source: str | None, default: str | None) -> str | None:
    return interface_towards("node-0", host, lambda: interfaces, lambda master: source, lambda: default)


@pytest.mark.parametrize(
    ("host", "source", "default", "found"),
    [
        (["10.1.0.1"], "10.0.0.1", "eth0", None),
        (["127.0.1.1"], "10.1.0.1", "eth0", "ib0"),
        ([], "10.0.0.1", None, "eth0"),
        (["127.0.1.1"], "127.0.0.1", "eth0", "eth0"),
        (["10.9.9.9"], "10.0.0.1", "ib0", "eth0"),
    ],
    ids=["gloo is right", "as Debian has it", "no name", "node 0 itself", "an address of another host"],
)
def test_the_interface_is_the_one_that_other_nodes_reach(host: list[str], source: str, default: str, found: str | None) -> None:
    assert towards(host, TWO, source, default) == found


def test_an_interface_that_is_not_clear_is_asked_for_by_the_variable() -> None:
    with pytest.raises(
        InterfaceError, match=r"leads to 127.0.1.1, .* it has eth0 \(10.0.0.1\), ib0 \(10.1.0.1\). Name it in GLOO_SOCKET_IFNAME"
    ):
        towards(["127.0.1.1"], TWO, "127.0.0.1", None)
    with pytest.raises(InterfaceError, match=r"does not resolve, .* no interface with an IPv4 address but loopback"):
        towards([], {}, None, None)
    assert towards(["127.0.1.1"], {"eth0": "10.0.0.1"}, None, None) == "eth0"


def test_a_variable_that_names_no_interface_of_this_host_is_refused_on_several_nodes_alone() -> None:
    wrong = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "nowhere0", "MASTER_ADDR": "127.0.0.1"}
    choose_interface(wrong)
    with pytest.raises(InterfaceError, match=r"GLOO_SOCKET_IFNAME names nowhere0, which .* does not have"):
        choose_interface({**wrong, "LOCAL_WORLD_SIZE": "1"})
    assert not any(address.startswith("127.") for address in addresses_by_interface().values())
