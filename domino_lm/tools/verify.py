"""Is my parallel run right? Takes the flags of training, under the same torchrun, and compares with a single rank.

    torchrun --standalone --nproc-per-node 2 -m domino_lm.tools.verify --preset debug-gpt --tensor-model-parallel-size 2 ...
    torchrun --standalone --nproc-per-node 2 -m domino_lm.tools.verify --replay DIR

Runs a few steps on one rank, on the requested layout in Megatron's order, and under the requested schedule, from the same
initial weights and on the same samples; prints loss, gradient norm and the tensors that differ most, and what is normal.
With --replay it runs a step again that --dump-on-nan has written, on as many ranks, and shows the first op that is not finite.
Exit code 0: all is normal, or the replayed step did the same again; 3: it is not, or did not; 2: wrong flags.
"""

import argparse
import dataclasses
import os
import sys
import warnings

from domino_lm.config.arguments import parse_arguments
from domino_lm.config.batch_plan import data_parallel_size, global_batch_size
from domino_lm.config.foreign_text import int_of_flag
from domino_lm.config.settings import RunConfig
from domino_lm.launch.checks import run_faults
from domino_lm.pretrain import WRONG_SETTINGS, build_data, show_warning
from domino_lm.tools.replay import replay

EXIT_WRONG_SETTINGS, EXIT_NOT_NORMAL = 2, 3
LEARNING_RATE = 1e-3
"""If the flags give none."""


def flag_parser() -> argparse.ArgumentParser:
    """The flags of this tool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--verify-steps", type=int_of_flag, default=3, help="steps of each run (default 3)")
    parser.add_argument("--verify-dtype", choices=["float64", "float32"], default="float64", help="float64 tells a bug from rounding")
    parser.add_argument(
        "--verify-largest", type=int_of_flag, default=200_000_000, help="parameters that one rank can hold; layers are cut to fit"
    )
    parser.add_argument("--replay", metavar="DIR", help="run the step again that --dump-on-nan has written there; no other flag is needed")
    parser.epilog = "All flags of training follow; see domino-lm-pretrain --help."
    return parser


def main() -> int:
    """Parse, build, verify; the exit code."""
    own, training_flags = flag_parser().parse_known_args()
    first = os.environ.get("RANK", "0") == "0"
    warnings.showwarning = show_warning
    try:
        if own.replay is not None:
            told, again = replay(own.replay)
            if first:
                print(told, flush=True)
            return 0 if again else EXIT_NOT_NORMAL
        world_size, length = int(os.environ.get("WORLD_SIZE", "1")), {"lr": LEARNING_RATE, "train_iters": own.verify_steps}
        run = parse_arguments(training_flags, lambda run: run_faults(run, world_size), unless_said=length)
        return verify_run(run, own)
    except WRONG_SETTINGS as error:
        if first:
            print(f"error: {error}", file=sys.stderr)
        return EXIT_WRONG_SETTINGS


def verify_run(run: RunConfig, own: argparse.Namespace) -> int:
    """Build the data as training does and compare; rank 0 prints."""
    import torch

    from domino_lm.parallel.mesh import ParallelMesh
    from domino_lm.tools.comparison import cut_down, verify
    from domino_lm.training.run_data import MicroBatches

    with ParallelMesh.create(run.parallel) as mesh:
        run, data, _ = build_data(run, mesh)
        cut = cut_down(run.model, own.verify_largest)
        dtype = getattr(torch, own.verify_dtype)
        micro, batch = run.training.micro_batch_size, global_batch_size(run, mesh.world.size)
        if mesh.world.rank == 0 and cut.num_layers < run.model.num_layers:
            print(f"{run.model.num_layers} layers are too many for one rank: {cut.num_layers} of them are compared (--verify-largest)")
        run = dataclasses.replace(run, model=cut)

        def batches(on: ParallelMesh, step: int) -> list[object]:
            replicas = data_parallel_size(run, mesh.world.size) if on is mesh else 1
            taken = MicroBatches(data.train, step * batch, micro, on).take(batch // (micro * replicas))
            return [dataclasses.replace(one, loss_mask=one.loss_mask.to(dtype)) for one in taken]

        report, normal = verify(run, mesh, batches, own.verify_steps, dtype)  # type: ignore[arg-type]
        if mesh.world.rank == 0:
            print(report, flush=True)
    return 0 if normal else EXIT_NOT_NORMAL


if __name__ == "__main__":
    sys.exit(main())
