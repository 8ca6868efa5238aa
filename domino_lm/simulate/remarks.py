"""A plan in words: one line per op with a remark on what it computes, or what travels and behind which compute.

Nothing here imports torch.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import not_

from domino_lm.config.settings import ConfigError
from domino_lm.schedule.ops import ALL_ROWS, COMPUTE, DP_LINK, Kind, Op, Slicing, concerns_matrices
from domino_lm.schedule.passes import micro_batch, step_templates
from domino_lm.schedule.plan import Plan
from domino_lm.simulate.costs import Shapes, cost

WORK = {
    "LOCAL F": "{before} output joins the residual; norm before {after}",
    "LOCAL B": "backward of norm; joins the gradient of the residual, goes on to {before}",
    "BODY F": "{part}: first GEMM and activation",
    "TAIL F": "{part}: output GEMM, a partial sum on each rank",
    "BODY B": "{part}: dgrad of the output GEMM, backward of the activation",
    "TAIL B": "{part}: dgrad of the first GEMM, a partial sum on each rank",
    "WGRAD B": "{part}: weight gradients of both GEMMs",
    "RECOMPUTE B": "{part}: computed again from what forward kept",
    "LOSS F": "cross entropy, and the gradient of the logits",
    "STEP S": "gradient norm, clipping, optimizer",
    "MOMENTUM S": "gradient norm, clipping, momentum of all matrices",
    "ORTHOGONALIZE S": "{part}: Newton-Schulz on its whole matrices, and their update",
    "BODY F attention": "attention: GEMM for queries, keys and values, then attention itself",
    "BODY B attention": "attention: dgrad of the output GEMM, backward of attention itself",
    "BODY F embedding": "embedding: which tokens lie in this rank's part of the vocabulary",
    "TAIL F embedding": "embedding: look-up, zero for tokens of other ranks",
    "BODY B embedding": "embedding: gradient of this rank's tokens",
    "WGRAD B embedding": "embedding: gradient of the table",
    "BODY F head": "head: logits and softmax statistics of this rank's part of the vocabulary",
    "WGRAD B head": "head: weight gradient of the output layer",
}
"""What compute ops do, by kind and phase, and by part if one differs from the rest."""

TRAVELS = {
    "partial F": "{part} output",
    "partial B": "{part} dgrad",
    "statistics F": "softmax statistics",
    "input F": "{part} input",
    "input B": "gradient of {part} output",
    "saved_input B": "{part} input",
    "gradients S": "gradients of bucket {bucket}",
    "parameters S": "parameters of bucket {bucket}",
    "momentum S": "momentum of {part}",
}
"""What a collective moves, by what it passes and the phase."""

VERBS = {"all_reduce": "all-reduce", "reduce_scatter": "reduce-scatter", "all_gather": "gather"}
"""What its START does, by its traffic."""


def plan_text(plan: Plan, shapes: Shapes, micro_batches: int, layer: int | None = None) -> str:
    """The plan of a step of ``micro_batches``, one op per line; with ``layer`` (from 0) only that layer's ops and those of its buckets.

    Raises ConfigError if the model has no such layer.
    """
    slicing, stretches = plan.slicing, _stretches(plan, micro_batches)
    parts = frozenset(range(len(slicing.chain))) if layer is None else parts_of_layer(slicing, layer)
    ops = [op for _, stretch in stretches for op in stretch]
    shown = [layer is None or _touches(op, parts, slicing) for op in ops]
    width = max(len(str(op)) for op, wanted in zip(ops, shown, strict=True) if wanted)
    remarked = enumerate(zip(ops, shown, _remarks(ops, shapes), strict=True))
    texts = [f"{position:>4}  {op!s:<{width}}  {remark}" if wanted else "" for position, (op, wanted, remark) in remarked]
    lines, begin = [_heading(plan, shapes, len(ops))], 0
    for title, stretch in stretches:
        lines += [title] if title else []
        for left_out, group in groupby(texts[begin : begin + len(stretch)], not_):
            together = list(group)
            lines += [f" ...  {len(together)} of other parts"] if left_out else together
        begin += len(stretch)
    return "\n".join(lines)


def _touches(op: Op, parts: frozenset[int], slicing: Slicing) -> bool:
    """Whether an op is one of ``parts``, or carries their gradients or parameters."""
    if op.phase == "S" and (op.kind is Kind.MOMENTUM or not concerns_matrices(op)):
        return op.kind not in (Kind.STEP, Kind.MOMENTUM) and bool(parts & slicing.buckets[op.part])
    return op.part in parts


def parts_of_layer(slicing: Slicing, layer: int) -> frozenset[int]:
    """Numbers of a layer's parts: from the norm before one part that couples tokens to the norm before the next, which is not among them."""
    starts = [part - 1 for part, spec in enumerate(slicing.chain) if spec.couples_tokens]
    if not 0 <= layer < len(starts):
        raise ConfigError(f"--plan-layer {layer}: the model has {len(starts)} layer(s), numbered from 0; give 0 to {len(starts) - 1}.")
    return frozenset(range(starts[layer], [*starts, slicing.last - 1][layer + 1]))


def _stretches(plan: Plan, micro_batches: int) -> list[tuple[str, Sequence[Op]]]:
    """What a step consists of, each stretch with its heading."""
    if micro_batches == 1:
        return [("", plan.ops)]
    if not plan.interleaved:
        last = "STEP" if plan.slicing.sharding == "optim_grads" else "reductions and STEP"
        first = ", waits for parameters in the first alone" if micro_batch(plan, first=True) != micro_batch(plan) else ""
        return [(f"for each of {micro_batches} micro-batches; {last} in the last alone{first}", plan.ops)]
    opening, *pairs, end = step_templates(plan, min(micro_batches, 3))
    headings = [f"backward of a micro-batch (m{i}) in turn with forward of the next (m{1 - i})" for i in range(len(pairs))]
    return [
        (f"forward of the first of {micro_batches} micro-batches", opening),
        *zip(headings, pairs, strict=True),
        ("backward of the last micro-batch, and the step's end", end),
    ]


def _heading(plan: Plan, shapes: Shapes, count: int) -> str:
    slicing = plan.slicing
    sizes = " + ".join(map(str, slicing.row_sizes))
    rows = f"rows of {sizes} {'tokens' if slicing.sequence_rows else 'sequences'}" if slicing.rows > 1 else "one row"
    columns = f", {slicing.cols} column blocks" if slicing.cols > 1 else ""
    parallel = ", sequence parallel" if slicing.sequence_parallel else ""
    return f"{count} ops, {rows}{columns}{parallel}; tensor-parallel {shapes.tensor_parallel}, data-parallel {shapes.data_parallel}"


def _remarks(ops: Sequence[Op], shapes: Shapes) -> Iterator[str]:
    """A remark for each of ``ops``, which repeat: what is still travelling at the end is redeemed in the next step."""
    slicing, behind = shapes.slicing, _hidden_behind(ops, shapes)
    for position, op in enumerate(ops):
        text, before, after = (shapes.parts[part].name if 0 <= part <= slicing.last else "" for part in (op.part, op.part - 1, op.part + 1))
        if op.kind not in (Kind.START, Kind.WAIT):
            key = f"{op.kind.name} {op.phase}"
            done = WORK.get(f"{key} {text}", WORK[key]).format(part=text, before=before, after=after)
            yield "optimizer of all other weights" if op.kind is Kind.STEP and slicing.orthogonalized else done
            continue
        collective = slicing.collective(op)
        moved = TRAVELS[f"{collective.passes} {op.phase}"].format(part=text, bucket=op.part)
        text = f"{VERBS[collective.traffic]} {moved}"
        link, ranks = ("DP", shapes.data_parallel) if op.lane == DP_LINK else ("TP", shapes.tensor_parallel)
        if ranks == 1:
            yield f"{text}: one {link} rank, nothing travels"
        elif op.kind is Kind.START:
            yield f"{text}, {_size(cost(op, shapes).transfer_bytes)}, {ranks} {link} ranks, behind {behind[position] or 'nothing'}"
        else:
            yield f"receives {moved}, {f'hidden behind {behind[position]}' if behind[position] else 'exposed'}"


def _hidden_behind(ops: Sequence[Op], shapes: Shapes) -> dict[int, str]:
    """What is computed between each START and its WAIT, by the positions of both; nothing if nothing is."""
    started, found, twice = dict[Op, int](), dict[int, str](), [*ops, *ops]
    for position, op in enumerate(twice):
        if op.kind is Kind.START and position < len(ops):
            started[op._replace(kind=Kind.WAIT)] = position
        elif op.kind is Kind.WAIT and op in started:
            start = started.pop(op)
            found[start] = found[position % len(ops)] = _activities(twice[start:position], shapes)
    return found


def _activities(ops: Sequence[Op], shapes: Shapes) -> str:
    """What ``ops``, the first one's collective on its way, compute: norms only alone, a weight gradient not beside its own dgrad."""
    compute = [op for op in ops if op.lane == COMPUTE]
    backward = {op._replace(kind=Kind.WGRAD, col=0) for op in compute if op.kind in (Kind.BODY, Kind.TAIL)}
    main = [op for op in compute if op.kind is not Kind.LOCAL and op not in backward] or compute
    names = list(dict.fromkeys(_activity(op, ops[0].micro, shapes) for op in main))
    if len(names) == 2 and main[0].part == main[-1].part:
        names[1] = names[1].removeprefix(f"{shapes.parts[main[0].part].name} ")
    text = " and ".join(names)
    return text if len(names) < 3 and len(text) < 45 else f"{names[0]} and {len(names) - 1} more"


def _activity(op: Op, micro: int, shapes: Shapes) -> str:
    if op.kind is Kind.STEP:
        return "the optimizer"
    if op.kind is Kind.MOMENTUM:
        return "the momentum"
    name = shapes.parts[op.part].name
    what = {Kind.WGRAD: " wgrad", Kind.RECOMPUTE: " again", Kind.ORTHOGONALIZE: " update"}.get(
        op.kind, " backward" if op.phase == "B" else ""
    )
    row = "" if shapes.slicing.rows == 1 or op.row == ALL_ROWS else f" row {op.row}"
    return f"{name}{what}{row}{f' of m{op.micro}' if op.micro != micro else ''}"


def _size(size_bytes: float) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.1f} {unit}"
    return f"{size_bytes:.0f} B"
