"""Shows again what ``--dump-on-nan`` has written: the step is run on the stored weights and samples, and every op is looked at."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from domino_lm.config.arguments import parse_arguments
from domino_lm.config.settings import ConfigError, RunConfig
from domino_lm.config.toml_file import CONFIG_NAME
from domino_lm.pretrain import together

if TYPE_CHECKING:
    from domino_lm.parallel.mesh import ParallelMesh
    from domino_lm.schedule.inspection import Finding


def replay(folder: str) -> tuple[str, bool]:
    """What the dump in ``folder`` says and what its step does now, for rank 0 to print, and whether both agree.

    As many ranks as had written it run the whole step; as many as hold one model run the replica in which it began, alone. Raises
    ConfigError if there is no whole dump, or if other ranks were started.
    """
    from domino_lm.parallel.mesh import ParallelMesh
    from domino_lm.training.nan_report import newest_dump, read_report, report_text

    path = newest_dump(Path(folder))
    report, started = read_report(path), int(os.environ.get("WORLD_SIZE", "1"))
    model = report["ranks"] // report["replicas"]
    if started not in (report["ranks"], model):
        raise ConfigError(
            f"--replay {path} was written by {report['ranks']} rank(s), of which {model} hold one model, and {started} were started; "
            f"give torchrun {model} process(es) for the replica in which it began, --nproc-per-node {model} on one node, or all {report['ranks']}."
        )
    run = parse_arguments(["--config", str(path / CONFIG_NAME)])
    with ParallelMesh.create(run.parallel, kernels=run.kernels) as mesh:
        findings = run_again(path, report, run, mesh)
    told, agrees = compare(report["first"], findings, report["weights_of_replica"] * model if started < report["ranks"] else 0)
    return f"{path}:\n{report_text(report)}\nrun again: {told}", agrees


def compare(then: dict[str, Any] | None, findings: list[Finding | None], first_rank: int = 0) -> tuple[str, bool]:
    """What a repeated step has found, in words, and whether that is what the dump says. The first rank now was ``first_rank`` then."""
    from domino_lm.training.nan_report import origin_of

    origin = origin_of(findings)
    found = None if origin is None else findings[origin]
    if found is None:
        return "every output was finite", then is None
    assert origin is not None, "what is found is found on a rank"
    same = then is not None and (then["op"], then["rank"], tuple(then["element"])) == (found.op, first_rank + origin, found.element)
    told = "the same" if same else f"another: {found.op} on rank {origin}, from element {list(found.element)} on"
    return "\n".join([told, *(f"  output  {name}: {value}" for name, value in found.outputs.items())]), same


def run_again(path: Path, report: dict[str, Any], run: RunConfig, mesh: ParallelMesh) -> list[Finding | None]:
    """Build the run of a dump with its weights, and repeat its step; what each rank finds."""
    from domino_lm.checkpoint.source import set_softmax_rows
    from domino_lm.model.build import build_stack
    from domino_lm.model.kernels.backends import choose_kernels, install_kernels
    from domino_lm.model.parameter import dtype_of
    from domino_lm.schedule.executor import Executor
    from domino_lm.schedule.prepare import prepare_plan
    from domino_lm.training.nan_dump import PastStep, look_at, read_rank
    from domino_lm.training.optimizer import Optimizer

    stack = build_stack(run.model, mesh.tp, run.training.seed, dtype_of(run.precision.params_dtype), mesh.device)
    install_kernels(stack, choose_kernels(run.kernels, mesh.device, stack.embedding.weight.dtype, run.model.hidden_size))
    narrow = dtype_of(run.precision.gradient_dtype) if run.precision.gradient_bytes < 4 else None
    plan, gradients = prepare_plan(stack, mesh, run.schedule, run.training.micro_batch_size, run.model.seq_length, narrow)
    holder = report["weights_of_replica"] * mesh.tp.size + mesh.tp.rank
    alone = mesh.world.size < report["ranks"]
    micro_batches, _ = together(mesh.world, lambda: read_rank(path, holder if alone else mesh.world.rank, mesh.device))
    _, weights = together(mesh.world, lambda: read_rank(path, holder, mesh.device))
    together(mesh.world, lambda: _fill(stack.parameters(), weights, path))
    set_softmax_rows(stack, report["softmax_rows"], mesh.tp.rank)
    optimizer = Optimizer(stack.parameters(), run.optimizer, mesh.tp, gradients=gradients, world=mesh.world)
    scale = report["loss_scale"]
    if alone:  # a replica's gradients were those of its share of the mean
        scale = (scale or 1.0) / report["replicas"]
    step = PastStep(report["steps_before"], micro_batches, scale)
    return look_at(step, run, Executor(plan, stack, mesh, gradients), optimizer)


def _fill(parameters: Any, stored: dict[str, Any], path: Path) -> None:
    """Copy ``stored`` weights into ``parameters``. Raises ConfigError if one is missing or of another shape."""
    for parameter in parameters:
        value = stored.get(parameter.spec.name)
        if value is None or value.shape != parameter.shape:
            raise ConfigError(f"--replay {path} holds no weight {parameter.spec.name} of shape {list(parameter.shape)}.")
        parameter.detach().copy_(value)
