"""The network interface by which other nodes reach this one, where its host name does not lead there."""

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

from domino_lm.config.settings import ConfigError

VARIABLE = "GLOO_SOCKET_IFNAME"
_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR
_DEFAULT_ROUTE = "00000000"


class InterfaceError(ConfigError):
    """No interface, or more than one, by which other nodes may reach this one; the message lists them."""


def choose_interface(environment: MutableMapping[str, str]) -> None:
    """Name the interface in ``GLOO_SOCKET_IFNAME`` if ranks on other nodes could not reach the one that gloo would take.

    gloo takes the address of the host's own name, which Debian sets to 127.0.1.1. Reads ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE`` and
    ``MASTER_ADDR``; does nothing on a job of one node. Raises InterfaceError if which interface it is cannot be known, or if the
    variable names one that is not there.
    """
    world, here = (int(environment.get(name, "0")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if world <= 1 or here == world:
        return
    if VARIABLE not in environment:
        found = interface_towards(environment.get("MASTER_ADDR", ""), addresses_of_host())
        if found is not None:
            environment[VARIABLE] = found
        return
    known = addresses_by_interface()
    missing = [name for name in environment[VARIABLE].split(",") if name not in known]
    if missing:
        raise InterfaceError(f"{VARIABLE} names {missing[0]}, which {socket.gethostname()} does not have; it has {_listed(known)}.")


def interface_towards(
    master: str,
    host_addresses: list[str],
    interfaces: Callable[[], Mapping[str, str]] | None = None,
    source: Callable[[str], str | None] | None = None,
    default: Callable[[], str | None] | None = None,
) -> str | None:
    """The interface by which the node ``master`` is reached; None if one of ``host_addresses``, which gloo takes, will do.

    Raises InterfaceError if it is not clear. The last three look at this host: its interfaces and their addresses, the address
    that packets to ``master`` leave from, and the interface of the default route.
    """
    known = (interfaces or addresses_by_interface)()
    if host_addresses and host_addresses[0] in known.values():
        return None
    leaving = (source or source_address)(master)
    routed = (default or default_interface)()
    for name, address in known.items():
        if address == leaving:
            return name
    if routed in known:  # on node 0 the way to itself is no way to the others
        return routed
    if len(known) == 1:
        return next(iter(known))
    leads = f"leads to {host_addresses[0]}" if host_addresses else "does not resolve"
    raise InterfaceError(
        f"the name of this host, {socket.gethostname()}, {leads}, where no other node finds it, and which interface they reach is "
        f"not clear: it has {_listed(known)}. Name it in {VARIABLE}, on GPUs in NCCL_SOCKET_IFNAME too, on every node."
    )


def addresses_of_host() -> list[str]:
    """What this host's own name resolves to, in the order in which gloo tries them; empty if to nothing."""
    with suppress(OSError):
        return [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    return []


def addresses_by_interface() -> dict[str, str]:
    """The interfaces with an IPv4 address that is not of this host alone, and that address."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(asking, _ADDRESS_OF_INTERFACE, struct.pack("256s", name[:15].encode()))
                found[name] = socket.inet_ntoa(answer[20:24])
    return {name: address for name, address in found.items() if not ipaddress.ip_address(address).is_loopback}


def source_address(master: str) -> str | None:
    """The address from which packets to ``master`` leave this host; None if there is no way."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((master, 9))  # sends nothing
        return str(way.getsockname()[0])
    return None


def default_interface(routes: Path = Path("/proc/net/route")) -> str | None:
    """The interface of the default route, if there is one."""
    with suppress(OSError):
        rows = [line.split() for line in routes.read_text().splitlines()[1:]]
        return next((row[0] for row in rows if row[1] == _DEFAULT_ROUTE), None)
    return None


def _listed(interfaces: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({address})" for name, address in interfaces.items()) or "no interface with an IPv4 address but loopback"
