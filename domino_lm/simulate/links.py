"""How long a collective takes: links, groups of ranks on them, and the algorithms that libraries choose among."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

from domino_lm.config.settings import ConfigError

# Full passes of the buffer over the links, as a multiple of (n - 1) / n: a reduction and a distribution, or one of them.
PASSES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}

MOST_COMPUTE_TAKEN = 0.95
"""Compute keeps at least this share, so that an op beside a long transfer ends."""


def _require_known(traffic: str) -> None:
    if traffic not in PASSES:
        raise ConfigError(f"no cost is known for the traffic {traffic!r} of a collective; known are {', '.join(PASSES)}.")


@dataclass(frozen=True)
class Group:
    """Ranks of one communicator: ``ranks`` in all, ``per_node`` of them in each NVLink domain."""

    ranks: int
    per_node: int

    @property
    def nodes(self) -> int:
        """NVLink domains that the group spans."""
        return -(-self.ranks // self.per_node)


@dataclass(frozen=True, kw_only=True)
class Link:
    """One device's port on a fabric, one direction."""

    bytes_per_s: float
    """Datasheet rate of one direction."""

    efficiency: float
    """Share of it that a large transfer reaches."""

    latency_s: float
    """One hop, synchronisation included."""

    @property
    def rate(self) -> float:
        """Bytes per second that a large transfer reaches."""
        return self.bytes_per_s * self.efficiency


class Transfer(NamedTuple):
    """A collective on its link: how long alone, what share of compute it takes while it runs, and of a wait for it afterwards."""

    seconds: float
    compute_share: float
    wait_share: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """Devices in NVLink domains of ``node_size`` that a network joins, one network port per device."""

    node_size: int
    local: Link
    """Inside a domain: NVLink, Infinity Fabric."""

    network: Link
    """Between domains."""

    overhead_s: float
    """Fixed cost of one collective: kernel start and rendezvous of the ranks."""

    switch_bytes_per_s: float | None = None
    """Bus bandwidth of an all-reduce that the NVLink switch sums (NVLS); None if no switch can."""

    compute_share: float = 0.0
    """Share of a device's compute units that a collective occupies while it runs."""

    def groups(self, tensor_parallel: int, data_parallel: int) -> tuple[Group, Group]:
        """Tensor-parallel ranks are neighbours, data-parallel ones stand ``tensor_parallel`` apart."""
        tp = Group(tensor_parallel, min(tensor_parallel, self.node_size))
        return tp, Group(data_parallel, min(data_parallel, max(1, self.node_size // tensor_parallel)))

    def transfer(self, traffic: str, size_bytes: float, group: Group) -> Transfer:
        """The fastest algorithm for this size, as NCCL's tuner takes it. Raises ConfigError on unknown traffic."""
        _require_known(traffic)
        if group.ranks == 1:
            return Transfer(0.0, 0.0)
        times = [self.flat_ring_s(traffic, size_bytes, group)]
        if group.nodes > 1 and group.per_node > 1:
            times.append(self.hierarchical_s(traffic, size_bytes, group))
        if traffic == "all_reduce":
            times.append(self.tree_s(size_bytes, group))
            if self.switch_bytes_per_s is not None and group.nodes == 1 and group.ranks > 2:
                times.append(self.switch_s(size_bytes, group))
        return Transfer(self.overhead_s + min(times), self.compute_share)

    def flat_ring_s(self, name: str, size_bytes: float, group: Group) -> float:
        """Ring: every rank passes on (n - 1) / n of the buffer once or twice (Patarasuk and Yuan, 2009).

        If it leaves a node, the rings of all the node's ports share the traffic, so that a rank's share of the network
        carries 1 / per_node of it; the slower of both fabrics sets the pace.
        """
        travelled = PASSES[name] * (group.ranks - 1) / group.ranks * size_bytes
        hops = PASSES[name] * (group.ranks - 1)
        if group.nodes == 1:
            return travelled / self.local.rate + hops * self.local.latency_s
        inside = travelled / self.local.rate if group.per_node > 1 else 0.0
        across_hops = PASSES[name] * group.nodes
        latency_s = (hops - across_hops) * self.local.latency_s + across_hops * self.network.latency_s
        return max(inside, travelled / (self.network.rate * group.per_node)) + max(latency_s, 0.0)

    def hierarchical_s(self, name: str, size_bytes: float, group: Group) -> float:
        """Inside the node, then each port its share across nodes, then inside again; the steps follow each other."""
        inside = PASSES[name] * (group.per_node - 1)
        across = PASSES[name] * (group.nodes - 1)
        inside_s = inside / group.per_node * size_bytes / self.local.rate + inside * self.local.latency_s
        shard = size_bytes / group.per_node
        return inside_s + across / group.nodes * shard / self.network.rate + across * self.network.latency_s

    def tree_s(self, size_bytes: float, group: Group) -> float:
        """Double binary tree (Sanders et al., 2009): twice the buffer over a port, and a depth that grows with the logarithm."""
        depth = (group.nodes - 1).bit_length()
        inside = 2 * (group.per_node - 1) * self.local.latency_s
        rate = self.local.rate if group.nodes == 1 else min(self.local.rate, self.network.rate * group.per_node)
        return 2 * size_bytes / rate + inside + 2 * depth * self.network.latency_s

    def switch_s(self, size_bytes: float, group: Group) -> float:
        """NVLS: the switch sums what it reads from all ranks and writes the result to all of them."""
        assert self.switch_bytes_per_s is not None
        return 2 * (group.ranks - 1) / group.ranks * size_bytes / self.switch_bytes_per_s + 2 * self.local.latency_s


@dataclass(frozen=True, kw_only=True)
class MeasuredFabric:
    """Collectives of one machine as calibration saw them, on groups of one size."""

    points: tuple[tuple[float, float, float], ...]
    """All-reduces by size: bytes, seconds alone, seconds of compute that the transport takes on the rank's own core."""

    ranks: int
    """Group that was measured."""

    def groups(self, tensor_parallel: int, data_parallel: int) -> tuple[Group, Group]:
        """One link joins all ranks."""
        return Group(tensor_parallel, 1), Group(data_parallel, 1)

    def transfer(self, traffic: str, size_bytes: float, group: Group) -> Transfer:
        """Between measured sizes by straight lines. Raises ConfigError on unknown traffic.

        The transport takes the same compute time after a wait: the sum is yet to be added, and caches hold its buffers.
        """
        _require_known(traffic)
        if group.ranks == 1:
            return Transfer(0.0, 0.0)
        travelled, measured = (group.ranks - 1) / group.ranks, (self.ranks - 1) / self.ranks
        equal_bytes = size_bytes * PASSES[traffic] / PASSES["all_reduce"] * travelled / measured
        seconds, compute_s = (self._between(equal_bytes, column) for column in (1, 2))
        share = min(compute_s / seconds, MOST_COMPUTE_TAKEN)
        return Transfer(seconds, share, share)

    def _between(self, size_bytes: float, column: int) -> float:
        sizes = [point[0] for point in self.points]
        after = min(max(bisect_right(sizes, size_bytes), 1), len(sizes) - 1)
        low, high = self.points[after - 1], self.points[after]
        slope = (high[column] - low[column]) / (high[0] - low[0])
        return max(low[column] + (size_bytes - low[0]) * slope, min(low[column], high[column]) * 0.5)
