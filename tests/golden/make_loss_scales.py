"""Writes ``model/loss_scales.json``: how the dynamic loss scale of megatron-core follows random overflows. Needs megatron-core.

``python tests/golden/make_loss_scales.py``, with a Python that has it (0.16.1 wrote the file); a GPU is not needed.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch

TARGET = Path(__file__).parent / "model" / "loss_scales.json"
RUNS, STEPS, INITIAL = 24, 40, 2.0**16


def main() -> None:
    on_the_gpu = torch.tensor
    torch.tensor = lambda *args, **settings: on_the_gpu(*args, **{**settings, "device": "cpu"})  # type: ignore[assignment]
    torch.cuda.current_device = lambda: 0
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler

    dice = random.Random(1)
    runs: list[dict[str, Any]] = []
    for _ in range(RUNS):
        settings = {"minimum": 2.0 ** dice.randint(0, 14), "window": dice.randint(1, 6), "hysteresis": dice.randint(1, 4)}
        scaler = DynamicGradScaler(INITIAL, settings["minimum"], 2.0, 0.5, settings["window"], settings["hysteresis"])
        chance = dice.random()
        overflows = [dice.random() < chance for _ in range(STEPS)]
        scales = []
        for overflow in overflows:
            scaler.update(overflow)
            scales.append(float(scaler.scale))
        runs.append({**settings, "initial": INITIAL, "overflows": "".join(".x"[overflow] for overflow in overflows), "scales": scales})
    TARGET.write_text(json.dumps(runs, indent=None, separators=(",", ":")).replace("},{", "},\n{") + "\n")


if __name__ == "__main__":
    main()
