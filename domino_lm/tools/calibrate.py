"""Measure this machine for domino-lm-simulate: ``--hardware FILE.json``.

domino-lm-calibrate --output laptop.json                                            # compute alone
torchrun --nproc-per-node 2 -m domino_lm.tools.calibrate --output laptop.json       # and the link between two ranks
"""

import argparse
import os
import sys
from pathlib import Path

import torch

from domino_lm.config.settings import ParallelConfig
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.simulate.calibrate import calibrate


def flag_parser() -> argparse.ArgumentParser:
    """The flags of this tool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--name", default="this machine", help="name that predictions show")
    return parser


def main() -> int:
    """Measure on every rank; rank 0 writes."""
    chosen = flag_parser().parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    with ParallelMesh.create(ParallelConfig(tensor_model_parallel_size=ranks), torch.device("cpu")) as mesh:
        found = calibrate(mesh.tp, mesh.device, chosen.name)
        if mesh.world.rank == 0:
            chosen.output.parent.mkdir(parents=True, exist_ok=True)
            found.write_json(chosen.output)
            print(chosen.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
