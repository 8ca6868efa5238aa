"""Are these nodes fit for a job? Started on all ranks like the job itself, in the minute before it.

    torchrun --nnodes 4 --nproc-per-node 8 ... -m domino_lm.tools.preflight --tensor-model-parallel-size 8 --shared /data/run

Looks at the layout of ranks, versions (Python, PyTorch, this package, CUDA, NCCL), clocks, whether all ranks reach each
other, latency and bandwidth of every group, what these mean for a step of the run whose flags follow ``--``, whether folders are shared, and free disk. Prints one table. Exit code 0: fit;
1: not, and the last line says why; 2: wrong flags. No stage takes longer than --timeout-seconds.
"""

import argparse
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from domino_lm.config.arguments import parse_arguments
from domino_lm.config.foreign_text import int_of_flag
from domino_lm.config.settings import ConfigError, ParallelConfig
from domino_lm.launch.traffic import Traffic, traffic_of
from domino_lm.parallel.interface import VARIABLE, InterfaceError, choose_interface
from domino_lm.parallel.mesh import ParallelMesh, check_layout, default_device
from domino_lm.parallel.rendezvous import Rendezvous
from domino_lm.tools.node_checks import Limits, Report, check

EXIT_UNFIT, EXIT_WRONG_SETTINGS = 1, 2


class Watchdog:
    """Ends this process with one line if a stage exceeds its time, even if a library call hangs."""

    def __init__(self, seconds: float, rank: int) -> None:
        self._seconds, self._rank = seconds, rank
        self._timer: threading.Timer | None = None
        self.stage = ""

    def begin(self, stage: str) -> None:
        """A stage begins, and the one before has ended."""
        self.end()
        self.stage = stage
        self._timer = threading.Timer(self._seconds, self._expire)
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        """Every stage has ended."""
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self) -> None:
        print(f"error: {late(self.stage, self._rank, self._seconds)}", file=sys.stderr, flush=True)
        os._exit(EXIT_UNFIT)


def late(stage: str, rank: int, seconds: float) -> str:
    """The line that says that others did not answer."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    what = f"not all {ranks} ranks joined" if stage == "start" else f"the check of {stage} did not end"
    interface = os.environ.get(VARIABLE)
    by = f"over {interface} ({VARIABLE})" if interface else f"by the addresses of their host names (or {VARIABLE}, NCCL_SOCKET_IFNAME)"
    return (
        f"preflight: rank {rank} on {socket.gethostname()}: {what} within {seconds:g} s; look at the ranks that printed nothing, "
        f"at whether nodes reach each other {by}, and at firewalls."
    )


@contextmanager
def joined(tensor_parallel: int, backend: str | None, seconds: float) -> Iterator[ParallelMesh]:
    """The mesh of all ranks; on GPUs beside gloo, by which ranks talk from the host."""
    device = torch.device("cpu") if backend == "gloo" else default_device()
    size = int(os.environ.get("WORLD_SIZE", "1"))
    check_layout(ParallelConfig(tensor_model_parallel_size=tensor_parallel), size)
    if size == 1:
        yield ParallelMesh.single(device)
        return
    choose_interface(os.environ)
    timeout = timedelta(seconds=seconds)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    met = Rendezvous.join(timeout)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timeout, store=met.part("default_pg"), rank=met.rank, world_size=met.size)
    with ParallelMesh.from_world(tensor_parallel, device, timeout) as mesh:
        yield mesh


def flag_parser() -> argparse.ArgumentParser:
    """The flags of this tool; a wrong one ends with exit code 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--tensor-model-parallel-size", type=int_of_flag, default=1, help="as in the job (default 1)")
    parser.add_argument("--shared", nargs="*", default=[], metavar="FOLDER", help="folders that all ranks must see: data, checkpoints")
    parser.add_argument("--min-free-gib", type=float, default=10.0, help="free disk that each of them needs (default 10)")
    parser.add_argument("--max-clock-offset-seconds", type=float, default=1.0, help="between rank 0 and any other (default 1)")
    parser.add_argument(
        "--min-gbytes-per-second", type=float, default=0.0, help="bus bandwidth that tensor-parallel groups need (default 0)"
    )
    parser.add_argument("--distributed-backend", choices=["gloo", "nccl"], default=None, help="gloo looks at CPUs alone")
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="the run's own flags: what the links mean for its step is said")
    parser.add_argument("--timeout-seconds", type=float, default=60.0, help="of each stage (default 60)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Check, print on rank 0, and return the exit code."""
    own, rank = flag_parser().parse_args(argv), int(os.environ.get("RANK", "0"))
    limits = Limits(
        shared=tuple(own.shared),
        min_free_gib=own.min_free_gib,
        max_clock_offset_s=own.max_clock_offset_seconds,
        min_gbytes_per_s=own.min_gbytes_per_second,
        traffic=_traffic(own.flags),
    )
    watchdog = Watchdog(own.timeout_seconds + limits.patience_s, rank)
    watchdog.begin("start")
    try:
        with joined(own.tensor_model_parallel_size, own.distributed_backend, own.timeout_seconds) as mesh:
            report = check(mesh, limits, stage=watchdog.begin)
            watchdog.begin("leaving")
    except InterfaceError as error:  # of this node alone
        return _fail(f"preflight: {error}", EXIT_UNFIT, os.environ.get("LOCAL_RANK", "0") == "0")
    except ConfigError as error:
        return _fail(f"preflight: {error}", EXIT_WRONG_SETTINGS, rank == 0)
    except (RuntimeError, ValueError, OSError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        return _fail(f"{late(watchdog.stage, rank, own.timeout_seconds)} ({first})", EXIT_UNFIT, True)
    finally:
        watchdog.end()
    return _conclude(report, rank)


def _traffic(flags: Sequence[str]) -> Traffic | None:
    """What a step of the run with these flags sends; None without any, or if they are wrong, which the run itself will say."""
    if not flags:
        return None
    try:
        return traffic_of(parse_arguments(flags), int(os.environ.get("WORLD_SIZE", "1")))
    except ConfigError:
        return None


def _conclude(report: Report, rank: int) -> int:
    if rank == 0:
        print(report, flush=True)
    if not report.faults:
        if rank == 0:
            print("preflight: fit", flush=True)
        return 0
    more = f" (and {len(report.faults) - 1} more above)" if len(report.faults) > 1 else ""
    return _fail(f"preflight: {report.faults[0]}{more}", EXIT_UNFIT, rank == 0)


def _fail(line: str, code: int, speaks: bool) -> int:
    if speaks:
        print(f"error: {line}", file=sys.stderr, flush=True)
    else:
        time.sleep(1.0)  # torchrun ends all ranks when the first one is gone, and rank 0 has to speak
    return code


if __name__ == "__main__":
    sys.exit(main())
