"""Tiny models in float64, their micro-batches, and the three ways to compute their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from domino_lm.config.settings import ModelConfig, ScheduleConfig
from domino_lm.model.batch import MicroBatch
from domino_lm.model.build import build_stack
from domino_lm.model.parameter import Parameter
from domino_lm.model.stack import Stack
from domino_lm.parallel.collectives import Communicator
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.parallel.random import DropoutKey, name_seed
from domino_lm.schedule.executor import Executor
from domino_lm.schedule.prepare import prepare_plan
from tests import reference

MICRO_BATCH, MICRO_BATCHES, SEED = 5, 4, 11

GPT = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    seq_length=16,
    max_position_embeddings=20,
    vocab_size=97,
    init_method_std=0.12,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
LLAMA = replace(
    GPT,
    group_query_attention=True,
    num_query_groups=2,
    ffn_hidden_size=44,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
)
MODELS = {"gpt": GPT, "llama": LLAMA}

Gradients = dict[str, Tensor]
Build = Callable[[ModelConfig, Communicator], Stack]


def float64_stack(model: ModelConfig, tp: Communicator) -> Stack:
    """A model whose biases and norm weights are no round numbers, so that a missing one shows."""
    stack = build_stack(model, tp, SEED, torch.float64)
    for parameter in stack.parameters():
        if parameter.dim() == 1:
            generator = torch.Generator().manual_seed(name_seed(1, parameter.spec.name))
            noise = 0.1 * torch.randn(parameter.spec.shape, generator=generator, dtype=torch.float64)
            parameter.data.add_(parameter.spec.shard(noise, tp.rank, tp.size))
    return stack


def global_samples(vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels and an uneven loss mask [samples, s] of one step."""
    generator = torch.Generator().manual_seed(3)
    count = MICRO_BATCH * MICRO_BATCHES
    tokens = torch.randint(0, vocab_size, (count, GPT.seq_length + 1), generator=generator)
    mask = (torch.rand(count, GPT.seq_length, generator=generator) < torch.linspace(0.1, 1, count)[:, None]).double()
    return tokens[:, :-1], tokens[:, 1:], mask


def micro_batches(dp: Communicator, vocab_size: int = 97, documents: bool = False) -> list[MicroBatch]:
    """This rank's share of the step: micro-step m of rank r takes samples from (m * DP + r) * b.

    With ``documents`` every fifth token ends a document: positions restart, and attention does not reach across.
    """
    tokens, labels, mask = (t.t().contiguous() for t in global_samples(vocab_size))  # [s, samples]
    batches = []
    for micro in range(MICRO_BATCHES // dp.size):
        first = (micro * dp.size + dp.rank) * MICRO_BATCH
        piece = slice(first, first + MICRO_BATCH)
        batches.append(MicroBatch(*(t[:, piece].contiguous() for t in (tokens, labels, mask)), sample_offset=first))
    return [_in_documents(batch) for batch in batches] if documents else batches


def _in_documents(batch: MicroBatch) -> MicroBatch:
    length, samples = batch.tokens.shape
    place = (torch.arange(length)[:, None] + torch.arange(samples)) % 5  # [s, b]
    document = (place == 0).cumsum(0).t()  # [b, s]
    other = document[:, :, None] != document[:, None, :]
    return replace(batch, position_ids=place, attention_mask=(other | torch.ones(length, length, dtype=torch.bool).triu(1))[:, None])


def plan_gradients(
    mesh: ParallelMesh,
    model: ModelConfig,
    schedule: ScheduleConfig,
    per_token: bool = False,
    seed: int = 0,
    documents: bool = False,
    build: Build = float64_stack,
) -> tuple[float, Gradients]:
    """Summed loss and unsharded gradients by the plan."""
    stack = build(model, mesh.tp)
    plan, gradients = prepare_plan(stack, mesh, schedule, MICRO_BATCH, model.seq_length)
    executor = Executor(plan, stack, mesh, gradients, seed=seed, per_token_loss=per_token)
    for iteration in (1, 2):  # the second step must not see the first one's gradients
        loss = executor.run_step(micro_batches(mesh.dp, documents=documents), iteration)
    return mesh.dp.all_reduce(loss.loss_sum.clone()).item(), unsharded(stack, mesh.tp, [p.main_grad for p in stack.parameters()])


@cache
def autograd_gradients(
    mesh: ParallelMesh,
    model: ModelConfig,
    per_token: bool = False,
    seed: int = 0,
    documents: bool = False,
    build: Build = float64_stack,
) -> tuple[float, Gradients]:
    """The same by `Stack.forward` and plain autograd."""
    stack = build(model, mesh.tp)
    batches = micro_batches(mesh.dp, documents=documents)
    tokens = mesh.dp.all_reduce(torch.stack([batch.loss_mask.sum() for batch in batches]).sum())
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        samples = torch.arange(batch.sample_offset, batch.sample_offset + batch.size)
        key = DropoutKey(seed, torch.tensor(2), samples, torch.arange(batch.tokens.shape[0]))
        row = batch.whole(dropout=key)
        loss = (stack.forward_row(row) * batch.loss_mask).sum()
        (loss / (tokens if per_token else batch.loss_mask.sum().clamp_min(1) * MICRO_BATCHES)).backward()
        total += loss.detach()
    grads = [mesh.dp.all_reduce(grad_of(parameter)) for parameter in stack.parameters()]
    return mesh.dp.all_reduce(total).item(), unsharded(stack, mesh.tp, grads)


@cache
def reference_gradients(model: ModelConfig, per_token: bool = False) -> tuple[float, Gradients]:
    """The same by the unsharded reference in one process."""
    stack = float64_stack(model, Communicator.single())
    weights = {p.spec.name: p.detach()[: p.spec.vocab_rows].clone().requires_grad_() for p in stack.parameters()}
    tokens, labels, mask = global_samples(97)
    losses = reference.token_losses(weights, model, tokens, labels) * mask
    per_micro_batch = losses.view(MICRO_BATCHES, -1).sum(1) / mask.view(MICRO_BATCHES, -1).sum(1).clamp_min(1)
    (losses.sum() / mask.sum() if per_token else per_micro_batch.mean()).backward()
    return losses.sum().item(), {name: grad_of(weight) for name, weight in weights.items()}


def unsharded(stack: Stack, tp: Communicator, grads: Sequence[Tensor]) -> Gradients:
    """Gradients of the whole model by name, without vocabulary padding."""
    local = {p.spec.name: grad.clone() for p, grad in zip(stack.parameters(), grads, strict=True)}
    shards = tp.all_gather_object(local)
    return {p.spec.name: _whole(p, [shard[p.spec.name] for shard in shards]) for p in stack.parameters()}


def _whole(parameter: Parameter, shards: Sequence[Tensor]) -> Tensor:
    return parameter.spec.unshard(shards)[: parameter.spec.vocab_rows]


def grad_of(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def worst_difference(found: Gradients, expected: Gradients) -> float:
    """Largest max|a - b| / max|b| over all tensors."""
    assert found.keys() == expected.keys()
    return max(((found[name] - expected[name]).abs().max() / expected[name].abs().max()).item() for name in expected)
