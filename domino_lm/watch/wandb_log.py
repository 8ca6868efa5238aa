"""Weights & Biases, if it is installed and asked for."""

import os
import warnings
from collections.abc import Mapping
from typing import Any, Self


class WandbLog:
    """Scalars under Megatron's tags; a service that fails is a warning, since training does not need it."""

    def __init__(self, run: Any) -> None:
        self._run = run

    @classmethod
    def open(cls, project: str, name: str | None, folder: str | None, settings: Mapping[str, object]) -> Self | None:
        """Start a run; None, with a warning, if the package is missing or refuses."""
        try:
            import wandb
        except ImportError:
            warnings.warn("--wandb-project needs the package wandb: pip install wandb; training goes on without it.", stacklevel=2)
            return None
        try:
            if folder is not None:
                os.makedirs(folder, exist_ok=True)  # else it writes elsewhere
            return cls(wandb.init(project=project, name=name, dir=folder, config=dict(settings)))
        except Exception as error:
            warnings.warn(f"--wandb-project {project}: {error}; training goes on without it.", stacklevel=2)
            return None

    def log(self, values: Mapping[str, float | None], iteration: int) -> None:
        """Record those of ``values`` that are not None at ``iteration``."""
        try:
            self._run.log({tag: value for tag, value in values.items() if value is not None}, step=iteration)
        except Exception as error:
            warnings.warn(f"Weights & Biases: {error}", stacklevel=2)

    def close(self) -> None:
        """Send everything."""
        self._run.finish()
