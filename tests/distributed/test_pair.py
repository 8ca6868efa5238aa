"""Two CPU ranks on one-way connections get what gloo's own collectives give."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from domino_lm.parallel.collectives import Communicator
from domino_lm.parallel.gloo_pair import PairCommunicator
from domino_lm.parallel.mesh import ParallelMesh
from tests.rank_pool import RankPool

Ranks = Callable[[int], RankPool]
COLLECTIVES = ("all_reduce_start", "all_gather_start", "all_gather_tokens_start", "reduce_scatter_start")


def kinds(mesh: ParallelMesh) -> tuple[type[Communicator], type[Communicator]]:
    return type(mesh.tp), type(mesh.dp)


@pytest.mark.parametrize(("size", "tp", "expected"), [(2, 2, PairCommunicator), (4, 2, PairCommunicator), (4, 4, Communicator)])
def test_pairs_of_tensor_parallel_cpu_ranks_have_one_way_connections(
    ranks: Ranks, size: int, tp: int, expected: type[Communicator]
) -> None:
    assert set(ranks(size).run(kinds, tp=tp)) == {(expected, Communicator)}


def both(mesh: ParallelMesh, collective: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """What the pair gives, and what gloo gives."""
    gloo = Communicator(mesh.tp.rank, mesh.tp.size, mesh.tp.group)
    mine = torch.randn(6, 50, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(mesh.tp.rank)).to(dtype)
    pair, reference = (getattr(group, collective)(mine.clone()).wait() for group in (mesh.tp, gloo))
    return pair, reference


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_the_result_is_gloos_to_the_bit(ranks: Ranks, collective: str, dtype: torch.dtype) -> None:
    for pair, gloo in ranks(2).run(both, collective, dtype):
        assert pair.dtype == gloo.dtype
        assert torch.equal(pair, gloo)


def in_flight_together(mesh: ParallelMesh) -> list[float]:
    """Collectives of equal shape, begun before the first is redeemed, twice so that buffers are used again."""
    sums = []
    for start in (1.0, 10.0):
        pending = [mesh.tp.all_reduce_start(torch.full((1000,), start * (piece + mesh.tp.rank))) for piece in range(3)]
        sums += [float(each.wait().unique()) for each in pending]
    return sums


def test_collectives_in_flight_together_keep_apart(ranks: Ranks) -> None:
    assert ranks(2).run(in_flight_together) == [[1.0, 3.0, 5.0, 10.0, 30.0, 50.0]] * 2


def sum_into(mesh: ParallelMesh) -> torch.Tensor:
    whole = torch.arange(8.0)
    returned = mesh.tp.reduce_scatter_start(whole, out=whole.view(2, 4)[mesh.tp.rank]).wait()
    assert returned.data_ptr() == whole.view(2, 4)[mesh.tp.rank].data_ptr()
    return returned


def test_a_share_of_a_sum_can_take_its_own_place(ranks: Ranks) -> None:
    assert torch.cat(ranks(2).run(sum_into)).tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0]


def completes_after_both_messages(mesh: ParallelMesh) -> bool:
    """Whether one notice came, and none before the other rank had begun."""
    ended = threading.Event()
    if mesh.tp.rank == 0:
        pending = mesh.tp.all_reduce_start(torch.ones(1000))
        pending.on_completion(ended.set)
        early = ended.wait(0.1) or pending.done
        mesh.tp.barrier()
    else:
        mesh.tp.barrier()
        pending, early = mesh.tp.all_reduce_start(torch.ones(1000)), False
        pending.on_completion(ended.set)
    ended.wait(10.0)
    until_s = time.monotonic() + 10.0
    while not pending.done and time.monotonic() < until_s:  # gloo gives notice a moment before a message counts as complete
        time.sleep(0.001)
    done = ended.is_set() and pending.done
    pending.wait()
    return done and not early


def test_a_collective_has_ended_when_both_messages_have(ranks: Ranks) -> None:
    assert ranks(2).run(completes_after_both_messages) == [True, True]


def start_strided(mesh: ParallelMesh) -> str:
    with pytest.raises(AssertionError) as caught:
        mesh.tp.all_reduce_start(torch.zeros(4, 6).t())
    return str(caught.value)


def test_a_strided_buffer_is_refused(ranks: Ranks) -> None:
    assert all("contiguous" in message for message in ranks(2).run(start_strided))
