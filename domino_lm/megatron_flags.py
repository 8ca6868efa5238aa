"""Flags of Megatron's own scripts that need no setting here: what they ask for is so anyway, or is not there at all.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ANY = None
ONLY_MODEL = "the only model there is"
KERNELS = "a choice among Megatron's kernels; the result is the same"
ALWAYS = "is so always"
FP32 = "mixed precision is not there: leave it out to train in fp32"


@dataclass(frozen=True)
class Foreign:
    """One flag: how many words follow it, the value that means nothing else than what is done here, and why."""

    why: str
    words: int = 0
    neutral: str | None = ANY
    """None: any value is ignored."""

    refused: bool = False


IGNORED: Mapping[str, Foreign] = {
    "--use-mcore-models": Foreign(ONLY_MODEL),
    "--transformer-impl": Foreign(KERNELS, 1),
    "--attention-backend": Foreign(KERNELS, 1),
    "--use-flash-attn": Foreign(KERNELS),
    "--no-masked-softmax-fusion": Foreign(KERNELS),
    "--no-bias-dropout-fusion": Foreign(KERNELS),
    "--no-bias-swiglu-fusion": Foreign(KERNELS),
    "--no-rope-fusion": Foreign(KERNELS),
    "--no-persist-layer-norm": Foreign(KERNELS),
    "--apply-layernorm-1p": Foreign("norm weights are stored as they are used", refused=True),
    "--no-gradient-accumulation-fusion": Foreign(KERNELS),
    "--cross-entropy-loss-fusion": Foreign(KERNELS),
    "--attention-softmax-in-fp32": Foreign(ALWAYS),
    "--accumulate-allreduce-grads-in-fp32": Foreign(ALWAYS),
    "--use-cpu-initialization": Foreign("initial weights never depend on the layout"),
    "--use-distributed-optimizer": Foreign("optimizer state is not cut over data-parallel ranks; the result is the same, memory is not"),
    "--overlap-param-gather": Foreign("there is no distributed optimizer whose parameters it would gather"),
    "--tp-comm-overlap": Foreign("--schedule domino hides tensor-parallel communication"),
    "--no-async-tensor-model-parallel-allreduce": Foreign("--schedule says what overlaps"),
    "--pipeline-model-parallel-size": Foreign("pipeline parallelism is not there", 1, "1"),
    "--context-parallel-size": Foreign("context parallelism is not there", 1, "1"),
    "--expert-model-parallel-size": Foreign("expert parallelism is not there", 1, "1"),
    "--use-rotary-position-embeddings": Foreign("say --position-embedding-type rope", refused=True),
    "--rotary-percent": Foreign("RoPE turns whole heads", 1, "1.0"),
    "--bf16": Foreign(FP32, refused=True),
    "--fp16": Foreign(FP32, refused=True),
    "--optimizer": Foreign("AdamW is the only optimizer", 1, "adam"),
    "--ckpt-format": Foreign("checkpoints are written in the torch_dist layout", 1, "torch_dist"),
    "--async-save": Foreign("checkpoints are written before training goes on"),
    "--no-save-optim": Foreign("optimizer state is always saved"),
    "--no-save-rng": Foreign("there is no random state: dropout is a function of the step"),
    "--no-load-rng": Foreign("there is no random state: dropout is a function of the step"),
    "--exit-signal-handler": Foreign(ALWAYS),
    "--no-create-attention-mask-in-dataloader": Foreign(ALWAYS),
    "--no-mmap-bin-files": Foreign("token files are always mapped"),
    "--log-timers-to-tensorboard": Foreign("there are no timers; --timeline records a step"),
    "--log-memory-to-tensorboard": Foreign("memory stands in the speed line and in --metrics-file"),
    "--log-validation-ppl-to-tensorboard": Foreign(ALWAYS),
    "--log-learning-rate-to-tensorboard": Foreign(ALWAYS),
    "--timing-log-level": Foreign("there are no timers; --timeline records a step", 1),
    "--tensorboard-queue-size": Foreign("TensorBoard's own default is taken", 1),
    "--local-rank": Foreign("LOCAL_RANK says so", 1),
    "--init-method": Foreign("normal, with --init-method-std", 1, "normal"),
    "--no-one-logger": Foreign("there is none"),
    "--no-check-for-nan-in-loss-and-grad": Foreign("--max-skipped-steps says what happens"),
    "--data-parallel-random-init": Foreign("replicas start alike", refused=True),
}


def settle(unknown: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Sort words that the parser does not know: flags ignored, with the reason; flags refused, with the reason; the rest."""
    ignored, refused, left = [], [], []
    words = [part for word in unknown for part in (word.split("=", 1) if word.startswith("--") else [word])]
    position = 0
    while position < len(words):
        word = words[position]
        foreign = IGNORED.get(word)
        if foreign is None:
            left.append(word)
            position += 1
            continue
        values = words[position + 1 : position + 1 + foreign.words]
        position += 1 + len(values)
        shown = " ".join([word, *values])
        wrong_value = foreign.neutral is not ANY and values != [foreign.neutral]
        if foreign.refused or wrong_value:
            way_out = f", only {foreign.neutral}" if wrong_value else ""
            refused.append(f"{shown}: {foreign.why}{way_out}")
        else:
            ignored.append(f"{shown}: {foreign.why}")
    return ignored, refused, left
