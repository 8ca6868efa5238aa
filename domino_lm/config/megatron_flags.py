"""Megatron's flags that are no settings here: accepted where they ask for nothing else than what is done, else refused with a way out.

One table: `arguments` sorts a command line by it, its help and ``docs/megatron-flags.md`` are made from it. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

MANY = -1
"""A flag that takes all words up to the next flag."""


@dataclass(frozen=True)
class Foreign:
    """One flag: what is done with it and why, how many words follow it, and which values are accepted although it is refused."""

    flag: str
    outcome: Literal["accepted", "refused"]
    why: str
    words: int = 0
    neutral: tuple[str, ...] = ()

    @property
    def is_family(self) -> bool:
        """Whether it stands for all flags that begin like it."""
        return self.flag.endswith("*")

    def takes(self, values: Sequence[str]) -> bool:
        """Whether it may stand in a command line with these values."""
        return self.outcome == "accepted" or (bool(self.neutral) and all(value in self.neutral for value in values))


@dataclass(frozen=True)
class Topic:
    """Flags that belong together in the documentation."""

    title: str
    flags: tuple[Foreign, ...]


def _accepted(why: str, *flags: str) -> tuple[Foreign, ...]:
    return tuple(_row("accepted", why, text) for text in flags)


def _refused(why: str, *flags: str) -> tuple[Foreign, ...]:
    return tuple(_row("refused", why, text) for text in flags)


def _row(outcome: Literal["accepted", "refused"], why: str, text: str) -> Foreign:
    """``--flag``, ``--flag 1`` with one word, ``--flag +`` with any number, ``--flag =a|b`` with one word of which a and b ask for nothing, ``+=``."""
    flag, _, rest = text.partition(" ")
    if "=" in rest:
        return Foreign(flag, outcome, why, MANY if rest[0] == "+" else 1, tuple(rest.lstrip("+=").split("|")))
    words = MANY if rest == "+" or flag.endswith("*") else int(rest or 0)
    return Foreign(flag, outcome, why, words)


KERNELS = "a choice among Megatron's kernels; the result is the same"
ALWAYS = "is so always"
HIDDEN = "--schedule domino hides tensor-parallel communication, with no kernel of its own"
PIPELINE = "pipeline parallelism is not there: use --tensor-model-parallel-size and data parallelism"
SERVING = "this program trains; it generates no text"
REPLICAS = "data-parallel ranks hold whole models"

TABLE: tuple[Topic, ...] = (
    Topic(
        "Model",
        (
            *_accepted("models of Megatron's core are the only ones", "--use-mcore-models"),
            *_accepted("RoPE needs no table of positions", "--no-position-embedding"),
            *_accepted(
                "norm weights are kept whole, not less 1: training is the same, the checkpoint's norms are not", "--apply-layernorm-1p"
            ),
            *_refused("RoPE turns whole heads, halves apart", "--rotary-percent =1.0|1", "--rotary-interleaved"),
            *_refused("positions are not stretched so; --use-rope-scaling is Llama 3's way", "--rotary-seq-len-interpolation-factor =1"),
            *_refused("positions are learned or RoPE: leave it out", "--no-rope-freq 1", "--rope-type =rope", "--mrope-section +"),
            *_refused(
                "positions are learned or RoPE: leave it out", "--relative-attention-num-buckets 1", "--relative-attention-max-distance 1"
            ),
            *_refused("YaRN is not there: leave it out, or scale with --use-rope-scaling", "--rotary-scaling-factor =1.0|1", "--yarn-*"),
            *_refused("the MLP is GELU, or SwiGLU with --swiglu", "--squared-relu", "--quick-geglu", "--openai-gelu"),
            *_refused("the MLP is GELU, or SwiGLU with --swiglu", "--activation-func-clamp-value 1", "--glu-linear-offset =0.0|0"),
            *_refused("all linear layers have biases, or none with --disable-bias-linear", "--add-qkv-bias"),
            *_refused(
                "query and key are not normalised: leave it out",
                "--qk-layernorm",
                "--qk-l2-norm",
                "--qk-clip*",
                "--apply-wd-to-qk-layernorm",
            ),
            *_refused("attention sees the whole sample", "--window-size 1", "--window-attn-skip-freq 1", "--softmax-type =vanilla"),
            *_refused(
                "attention is multi-head or grouped; use --group-query-attention", "--multi-latent-attention", "--mla-*", "--q-lora-rank 1"
            ),
            *_refused("attention is multi-head or grouped; use --group-query-attention", "--kv-lora-rank 1", "--qk-head-dim 1"),
            *_refused("attention is multi-head or grouped; use --group-query-attention", "--qk-pos-emb-head-dim 1", "--v-head-dim 1"),
            *_refused(
                "attention is multi-head or grouped; use --group-query-attention", "--mscale 1", "--mscale-all-dim 1", "--cache-mla-latents"
            ),
            *_refused("attention is multi-head or grouped; use --group-query-attention", "--experimental-attention-variant 1"),
            *_refused(
                "attention is multi-head or grouped; use --group-query-attention", "--attention-output-gate", "--linear-*", "--dsa-*"
            ),
            *_refused("norms stand before their layer", "--apply-residual-connection-post-layernorm"),
            *_refused("embeddings start like other weights: leave it out", "--embedding-init-method-std 1", "--init-method-xavier-uniform"),
            *_refused("scores are not divided by the layer's number", "--apply-query-key-layer-scaling"),
            *_refused("one token is predicted at a time: leave it out", "--mtp-*"),
            *_refused("experts are not there: leave them out to train a dense model", "--num-experts 1", "--moe-*", "--overlap-moe-*"),
            *_refused("experts are not there: leave them out to train a dense model", "--delay-wgrad-compute"),
            *_refused(
                "layers are all alike",
                "--heterogeneous-*",
                "--hybrid-*",
                "--is-hybrid-model",
                "--mamba-*",
                "--disable-mamba-*",
                "--spec =local",
            ),
            *_refused(
                "this program trains GPT and LLaMA",
                "--retro-*",
                "--vision-*",
                "--dino-*",
                "--ict-*",
                "--biencoder-*",
                "--bert-*",
                "--swin-*",
            ),
            *_refused(
                "this program trains GPT and LLaMA", "--img-h 1", "--img-w 1", "--patch-dim 1", "--num-classes 1", "--num-channels 1"
            ),
            *_refused("say --num-layers", "--encoder-num-layers 1", "--decoder-num-layers 1"),
            *_refused("Megatron's core names its models otherwise; convert old files, they load", "--use-legacy-models"),
            *_refused("width-dependent scaling is not there", "--use-mup", "--mup-*"),
            *_refused("weights are cut by --tensor-model-parallel-size alone", "--gtp-*", "--gdp-*", "--expert-gtp-*"),
            *_refused("weights are cut by --tensor-model-parallel-size alone", "--tensor-parallel-num-weight-shards =1"),
            *_refused("weights are cut by --tensor-model-parallel-size alone", "--expert-tensor-parallel-num-weight-shards =1"),
            *_refused("experts are not there: leave them out to train a dense model", "--ep-*", "--overlap-dispatch-*"),
            *_refused("experts are not there: leave them out to train a dense model", "--use-grouped-gemm-*", "--high-priority-a2a-*"),
            *_refused("this program trains GPT and LLaMA", "--classes-fraction 1", "--data-per-class-fraction 1", "--mask-factor 1"),
            *_refused("this program trains GPT and LLaMA", "--mask-type 1", "--iter-per-epoch 1", "--query-in-block-prob 1", "--indexer-*"),
            *_refused("this program trains GPT and LLaMA", "--embedding-path 1", "--block-data-path 1", "--evidence-data-path 1"),
            *_refused("this program trains GPT and LLaMA", "--titles-data-path 1", "--use-one-sent-docs", "--output-bert-embeddings"),
            *_refused("all weights are trained", "--freeze-all-layers"),
            *_refused("residual streams are one", "--enable-mhc-connections", "--mhc-*"),
        ),
    ),
    Topic(
        "Kernels",
        (
            *_accepted(KERNELS, "--transformer-impl 1", "--attention-backend 1", "--use-flash-attn", "--flash-attention-version 1"),
            *_accepted(KERNELS, "--no-masked-softmax-fusion", "--no-bias-dropout-fusion", "--no-bias-swiglu-fusion", "--no-rope-fusion"),
            *_accepted(KERNELS, "--cross-entropy-loss-fusion"),
            *_accepted(KERNELS, "--cross-entropy-fusion-impl 1", "--use-te-activation-func", "--use-fused-weighted-squared-relu"),
            *_accepted(KERNELS, "--disable-jit-fuser", "--use-transformer-engine-op-fuser", "--fused-residual-rmsnorm"),
            *_accepted("results of a layout are the same in every run on one machine", "--deterministic-mode", "--batch-invariant-mode"),
            *_accepted("initial weights never depend on the layout", "--use-cpu-initialization", "--init-model-with-meta-device"),
            *_accepted("initial weights are always made, which costs seconds", "--no-initialization"),
            *_accepted("dropout is a function of the step and needs no tracker", "--te-rng-tracker", "--inference-rng-tracker"),
            *_accepted("the allocator's cache is left alone", "--empty-unused-memory-level 1", "--no-clone-scatter-output-in-embedding"),
            *_refused("only attention is dropped under --recompute-granularity selective", "--recompute-modules +=core_attn"),
            *_refused("say --recompute-granularity full --recompute-method uniform", "--checkpoint-activations"),
            *_refused("activations stay on their device; --recompute-granularity saves memory", "--cpu-offloading-num-layers =0"),
            *_refused("activations stay on their device; --recompute-granularity saves memory", "--fine-grained-activation-offloading"),
            *_refused("activations stay on their device; --recompute-granularity saves memory", "--offload-modules +"),
            *_refused("activations stay on their device; --recompute-granularity saves memory", "--activation-offload-fraction =1.0|1"),
            *_refused("activations stay on their device; --recompute-granularity saves memory", "--fine-grained-offloading-*"),
            *_refused("activations stay on their device; --recompute-granularity saves memory", "--delay-offload-*", "--delta-offload-*"),
            *_accepted("activations stay on their device", "--min-offloaded-tensor-size 1", "--cpu-offloading-retain-pinned-cpu-buffers"),
            *_accepted("results of a layout are the same in every run on one machine", "--batch-invariant-backend 1"),
            *_refused("a micro-batch goes through the MLP whole", "--mlp-chunks-for-training =1"),
            *_refused("--sequence-parallel cuts saved activations over ranks", "--distribute-saved-activations"),
            *_refused("say --cuda-graph", "--external-cuda-graph", "--cuda-graph-impl =none", "--cuda-graph-*", "--optimizer-cuda-graph"),
        ),
    ),
    Topic(
        "Precision",
        (
            *_accepted(ALWAYS, "--attention-softmax-in-fp32"),
            *_accepted("gradients are in fp32 unless --grad-reduce-in-bf16 says otherwise", "--accumulate-allreduce-grads-in-fp32"),
            *_refused("the residual stream is in the model's own precision: leave it out", "--fp32-residual-connection"),
            *_refused("the loss is computed in fp32: leave it out", "--fp16-lm-cross-entropy"),
            *_accepted("the optimizer's numbers are kept as --exp-avg-dtype and its like say", "--use-precision-aware-optimizer"),
            *_refused("PyTorch's own way of summing bf16 products is kept", "--disable-bf16-reduced-precision-matmul"),
            *_refused("logits have the model's precision, the loss is fp32", "--logit-dtype 1"),
            *_accepted("a tensor's scale comes from the tensor itself, without a history", "--fp8-margin 1", "--fp8-interval 1"),
            *_accepted("a tensor's scale comes from the tensor itself, without a history", "--fp8-amax-history-len 1"),
            *_accepted("a tensor's scale comes from the tensor itself, without a history", "--fp8-amax-compute-algo 1"),
            *_accepted("weights are kept and gathered in the model's own precision", "--fp8-param-gather", "--keep-fp8-*"),
            *_accepted("weights are kept and gathered in the model's own precision", "--reuse-grad-buf-for-mxfp8-param-ag"),
            *_refused(
                "8-bit operands are set by --fp8-format alone: leave it out", "--fp8-*", "--no-fp8-*", "--te-precision-config-file 1"
            ),
            *_refused("8-bit operands are set by --fp8-format alone: leave it out", "--first-last-layers-bf16", "--num-layers-at-*"),
            *_refused("4-bit numbers are not there: leave it out", "--fp4-*", "--kitchen-*", "--use-kitchen-*"),
        ),
    ),
    Topic(
        "Parallelism and communication",
        (
            *_refused(
                PIPELINE,
                "--pipeline-model-parallel-size =1",
                "--num-layers-per-virtual-pipeline-stage 1",
                "--pipeline-model-parallel-layout 1",
            ),
            *_refused(PIPELINE, "--num-virtual-stages-per-pipeline-rank 1", "--microbatch-group-size-per-virtual-pipeline-stage 1"),
            *_refused(PIPELINE, "--decoder-first-pipeline-num-layers 1", "--decoder-last-pipeline-num-layers 1"),
            *_refused(PIPELINE, "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"),
            *_refused(PIPELINE, "--overlap-p2p-communication-warmup-flush", "--use-ring-exchange-p2p", "--defer-embedding-wgrad-compute"),
            *_accepted("there is one pipeline stage", "--no-overlap-p2p-communication", "--no-scatter-gather-tensors-in-pipeline"),
            *_accepted("there is one pipeline stage", "--pipeline-model-parallel-comm-backend 1", "--wgrad-deferral-limit 1"),
            *_accepted("there is one pipeline stage", "--no-align-grad-reduce", "--no-align-param-gather", "--use-tp-pp-dp-mapping"),
            *_refused("context parallelism is not there: --sequence-parallel saves memory", "--context-parallel-size =1"),
            *_accepted("there is one context-parallel rank", "--cp-comm-type +"),
            *_refused("context parallelism is not there: --sequence-parallel saves memory", "--hierarchical-context-parallel-sizes +"),
            *_refused("context parallelism is not there: --sequence-parallel saves memory", "--hybrid-context-parallel"),
            *_refused("expert parallelism is not there", "--expert-model-parallel-size =1", "--expert-tensor-parallel-size =1"),
            *_refused("say --tensor-model-parallel-size", "--model-parallel-size 1"),
            *_refused(
                "every rank of a replica holds its parameters whole", "--use-torch-fsdp2", "--use-megatron-fsdp", "--megatron-fsdp-*"
            ),
            *_refused("every rank of a replica holds its parameters whole", "--torch-fsdp2-*"),
            *_refused("every rank of a replica holds its parameters whole", "--fsdp-*", "--outer-dp-sharding-strategy =no_shard"),
            *_refused("every rank of a replica holds its parameters whole", "--enable-full-sharding-in-hsdp"),
            *_refused("optimizer state is cut once, if at all", "--num-distributed-optimizer-instances =1"),
            *_accepted(
                "gradients are summed after each replica has scaled its own",
                "--ddp-average-in-collective",
                "--no-gradient-reduce-div-fusion",
            ),
            *_accepted("buckets are set by --ddp-bucket-size alone", "--ddp-num-buckets 1", "--ddp-pad-buckets-for-high-nccl-busbw"),
            *_accepted("gradients travel in their own precision", "--ddp-reduce-scatter-with-fp32-accumulation"),
            *_accepted(
                HIDDEN, "--tp-comm-overlap", "--tp-comm-overlap-cfg 1", "--tp-comm-overlap-rs-dgrad", "--tp-comm-bootstrap-backend 1"
            ),
            *_accepted(HIDDEN, "--disable-tp-comm-overlap-ag", "--disable-tp-comm-overlap-rs", "--disable-tp-comm-bulk-dgrad"),
            *_accepted(HIDDEN, "--disable-tp-comm-bulk-wgrad", "--disable-tp-comm-split-ag", "--disable-tp-comm-split-rs"),
            *_accepted("--schedule says what overlaps", "--no-async-tensor-model-parallel-allreduce"),
            *_accepted(
                "a hint to NCCL that its environment variables give too",
                "--nccl-communicator-config-path 1",
                "--use-nccl-ub",
                "--use-sharp",
            ),
            *_accepted("a hint to NCCL that its environment variables give too", "--sharp-enabled-group 1"),
            *_accepted(
                "a hint to NCCL that its environment variables give too", "--disable-symmetric-registration", "--symmetric-ar-type 1"
            ),
            *_accepted("groups of gloo are made where a backend needs them", "--disable-gloo-process-groups"),
            *_accepted("--distributed-timeout-minutes holds throughout", "--distributed-timeout-seconds-after-init 1"),
            *_accepted("LOCAL_RANK says so", "--local-rank 1"),
            *_accepted("buckets are set by --ddp-bucket-size alone", "--suggested-communication-unit-size 1"),
            *_accepted(
                "parameters are gathered bucket by bucket", "--overlap-param-gather-with-optimizer-step", "--create-all-gather-group"
            ),
            *_accepted(
                "gradients accumulate in fp32 unless they are asked for in bf16", "--ddp-param-name-patterns-for-fp32-local-accumulation +"
            ),
            *_refused("all samples have --seq-length tokens", "--variable-seq-lengths", "--max-seqlen-per-dp-cp-rank 1"),
            *_refused("ranks are real: --dry-run says what a layout would hold", "--fake-process-group"),
            *_refused("torchrun starts the ranks", "--lazy-mpu-init 1"),
        ),
    ),
    Topic(
        "Optimizer and learning rate",
        (
            *_refused("AdamW is the only optimizer", "--optimizer =adam", "--muon-*", "--lion-*", "--use-layer-wise-*"),
            *_accepted("AdamW has no momentum of SGD", "--sgd-momentum 1"),
            *_refused(
                "all weights have one learning rate: leave it out", "--decoupled-lr 1", "--decoupled-min-lr 1", "--head-lr-mult =1.0|1"
            ),
            *_refused("weight decay is the same in every step: --weight-decay", "--start-weight-decay 1", "--end-weight-decay 1"),
            *_refused("weight decay is the same in every step: --weight-decay", "--weight-decay-incr-style =constant"),
            *_refused("biases and norms take no weight decay, all else does", "--no-weight-decay-cond-type 1"),
            *_accepted("there are two groups of parameters, with weight decay and without", "--dump-param-to-param-group-map 1"),
            *_refused("optimizer state stays on its device", "--optimizer-cpu-offload"),
            *_accepted("optimizer state stays on its device", "--optimizer-offload-fraction 1", "--use-torch-optimizer-for-cpu-offload"),
            *_accepted(
                "optimizer state stays on its device", "--overlap-cpu-optimizer-d2h-h2d", "--no-pin-cpu-grads", "--no-pin-cpu-params"
            ),
            *_refused("say --lr-warmup-iters", "--warmup 1"),
            *_refused("replicas start alike", "--data-parallel-random-init"),
        ),
    ),
    Topic(
        "Data and tokenizer",
        (
            *_accepted("masks are made only where --reset-attention-mask asks", "--no-create-attention-mask-in-dataloader"),
            *_accepted("token files are always mapped", "--no-mmap-bin-files"),
            *_accepted("one process of a node builds indices, the others wait", "--num-dataset-builder-threads 1"),
            *_accepted(
                "headers are read at once; nothing has to be prepared", "--per-dataset-sequences-path 1", "--dataloader-fast-cache-load"
            ),
            *_accepted("headers are read at once; nothing has to be prepared", "--dataloader-defer-npy-index-mmap"),
            *_accepted("padding is an id of its own or none, so nothing is ambiguous", "--allow-ambiguous-pad-tokens"),
            *_accepted("GPT does not use it", "--sample-rate 1", "--mask-prob 1", "--short-seq-prob 1", "--retriever-*"),
            *_refused("say --seq-length", "--encoder-seq-length 1", "--decoder-seq-length 1"),
            *_refused("documents are kept apart by --reset-attention-mask --reset-position-ids", "--dataloader-inter-document-masking"),
            *_refused("samples are not rearranged to fill in a middle", "--fim-*"),
            *_refused("the data changes when the run is resumed with another --data-path", "--phase-transition-iterations 1"),
            *_refused("files are read from disk; mount or copy them", "--object-storage-cache-path 1"),
            *_accepted("files are read from disk", "--disable-msc"),
            *_accepted("there is no TikTokenizer; a HuggingFaceTokenizer reads the same vocabulary", "--tiktoken-pattern 1"),
            *_accepted("there is no TikTokenizer; a HuggingFaceTokenizer reads the same vocabulary", "--tiktoken-num-special-tokens 1"),
            *_refused("give a HuggingFaceTokenizer's tokenizer.json", "--tiktoken-special-tokens +", "--tokenizer-metadata 1"),
            *_accepted(
                "a tokenizer.json is read by the fast library, and no code of a model is run",
                "--tokenizer-hf-no-use-fast",
                "--trust-remote-code",
            ),
            *_refused("the SentencePiece model says so itself", "--no-tokenizer-sentencepiece-ignore-extra-whitespaces"),
            *_accepted("there is one kind of tokenizer code", "--legacy-tokenizer", "--use-gigatoken"),
            *_refused("the vocabulary is padded by --make-vocab-size-divisible-by", "--padded-vocab-size 1"),
            *_refused("give --make-vocab-size-divisible-by 1", "--no-pad-vocab-size", "--disable-pad-vocab-size"),
            *_refused("GPT and LLaMA have no extra ids", "--vocab-extra-ids =0"),
            *_refused("this program pretrains; it has no chats", "--sft", "--sft-*", "--chat-template 1"),
            *_accepted("validation sets have the names of their files", "--validation-set-names +"),
        ),
    ),
    Topic(
        "Length and batch",
        (
            *_refused("say --micro-batch-size", "--batch-size 1"),
            *_refused("say --rampup-batch-size", "--step-batch-size-schedule 1"),
            *_refused("the batch is what was asked for: choose one that divides", "--decrease-batch-size-if-needed"),
            *_refused("no iteration is left out; leave out its data", "--iterations-to-skip +"),
            *_refused("a run that resumes at its --train-iters evaluates and ends", "--skip-train"),
            *_refused("evaluation takes the batches of training", "--eval-micro-batch-size 1", "--eval-global-batch-size 1"),
            *_accepted("evaluation begins with the first --eval-interval", "--start-eval-at-iter =0"),
            *_accepted(ALWAYS, "--exit-signal-handler", "--exit-signal-handler-for-training"),
            *_refused("SIGTERM ends a run", "--exit-signal =SIGTERM", "--exit-signal-handler-for-dataloader"),
            *_accepted("ranks meet at every step's end", "--train-sync-interval 1", "--no-manual-gc-eval"),
            *_accepted("--max-skipped-steps says what happens", "--check-for-spiky-loss"),
            *_accepted("--max-skipped-steps says what happens", "--check-for-large-grads", "--rerun-mode 1"),
            *_refused("faults are not injected", "--error-injection-rate =0", "--error-injection-type 1", "--fault-injector-*"),
            *_accepted("tools/verify.py compares replicas and layouts", "--check-weight-hash-across-dp-replicas-interval 1"),
        ),
    ),
    Topic(
        "Checkpoints",
        (
            *_refused(
                "checkpoints are written in the torch_dist layout; tools/convert_checkpoint.py writes others", "--ckpt-format =torch_dist"
            ),
            *_refused("tools/convert_checkpoint.py converts", "--ckpt-convert-format 1", "--ckpt-convert-save 1"),
            *_accepted(
                "the kind of a checkpoint is always detected", "--auto-detect-ckpt-format", "--use-dist-ckpt", "--dist-ckpt-format 1"
            ),
            *_refused(
                "a tensor that does not fit is always an error", "--dist-ckpt-strictness =assume_ok_unexpected|raise_all|raise_unexpected"
            ),
            *_accepted("there is no random state: dropout is a function of the step", "--no-save-rng", "--no-load-rng"),
            *_accepted("checkpoints are written before training goes on", "--async-save", "--use-persistent-ckpt-worker", "--async-*"),
            *_accepted(
                "replicas always share the writing, and each rank reads its part",
                "--ckpt-fully-parallel-save",
                "--ckpt-fully-parallel-load*",
            ),
            *_accepted("replicas always share the writing, and each rank reads its part", "--no-ckpt-fully-parallel-save"),
            *_accepted("a checkpoint loads in every layout", "--ckpt-assume-constant-structure", "--dist-ckpt-optim-fully-reshardable"),
            *_accepted(
                "a checkpoint loads in every layout", "--distrib-optim-fully-reshardable-mem-efficient", "--dist-ckpt-save-pre-mcore-014"
            ),
            *_accepted("a checkpoint loads in every layout", "--use-mp-args-from-checkpoint-args", "--dist-ckpt-workers 1"),
            *_accepted("a checkpoint's tokenizer is never taken over", "--no-use-tokenizer-model-from-checkpoint-args"),
            *_accepted("checkpoints are never deleted", "--save-retain-interval 1"),
            *_accepted("replicas always share the writing, and each rank reads its part", "--ckpt-fully-parallel-save-process-group 1"),
            *_accepted("a checkpoint loads in every layout", "--ckpt-pg-*", "--ckpt-drop-redundant-extra-state"),
            *_accepted("a checkpoint's files are always looked at before anything is loaded", "--verify-integrity"),
            *_accepted("a checkpoint's files are always looked at before anything is loaded", "--no-ckpt-load-validate-sharding-integrity"),
            *_accepted("tensors of FSDP are not there", "--no-strict-fsdp-dtensor-load"),
            *_accepted("tokenizer files are not copied", "--save-tokenizer-assets", "--no-save-tokenizer-assets"),
            *_refused("say --ckpt-step, or --finetune to begin at 0", "--override-ckpt-iteration 1"),
            *_refused(
                "single tensors are not saved; tools/verify.py compares layouts",
                "--save-activations-interval 1",
                "--save-dgrads-interval 1",
            ),
            *_refused(
                "single tensors are not saved; tools/verify.py compares layouts", "--save-params-interval 1", "--save-wgrads-interval 1"
            ),
            *_refused("single tensors are not saved; tools/verify.py compares layouts", "--save-tokens-per-expert-interval 1"),
            *_refused("say --load DIR --finetune", "--pretrained-checkpoint 1"),
            *_refused(
                "say --save-interval",
                "--non-persistent-save-interval 1",
                "--non-persistent-ckpt-type 1",
                "--non-persistent-global-ckpt-dir 1",
            ),
            *_refused("say --save-interval", "--non-persistent-local-ckpt-dir 1", "--non-persistent-local-ckpt-algo 1"),
            *_refused("checkpoints lie on storage that all nodes share", "--replication", "--replication-jump 1", "--replication-factor 1"),
            *_refused("moments cut by buckets in Megatron's oldest way are not read", "--ckpt-convert-update-legacy-dist-opt-format"),
            *_accepted("weights in fp32 are taken from the checkpoint wherever it has them", "--load-main-params-from-ckpt"),
        ),
    ),
    Topic(
        "Logging and profiling",
        (
            *_accepted(
                "there are no timers; --timeline records a step",
                "--timing-log-level 1",
                "--timing-log-option 1",
                "--log-timers-to-tensorboard",
            ),
            *_accepted("there are no timers; --timeline records a step", "--no-barrier-with-level-1-timing"),
            *_accepted("--timeline records a step", "--profile", "--profile-step-start 1", "--profile-step-end 1", "--profile-ranks +"),
            *_accepted("--timeline records a step", "--use-pytorch-profiler", "--pytorch-profiler-*", "--nvtx-ranges", "--record-shapes"),
            *_accepted("memory stands in the speed line and in --metrics-file", "--log-memory-to-tensorboard", "--log-memory-interval 1"),
            *_accepted("memory stands in the speed line and in --metrics-file", "--log-device-memory-used", "--record-memory-history"),
            *_accepted("memory stands in the speed line and in --metrics-file", "--memory-snapshot-path 1"),
            *_accepted(ALWAYS, "--log-validation-ppl-to-tensorboard", "--log-learning-rate-to-tensorboard"),
            *_accepted("the loss scale is logged always", "--no-log-loss-scale-to-tensorboard"),
            *_accepted("TensorBoard's own default is taken", "--tensorboard-queue-size 1"),
            *_accepted("the log says every step and every save", "--log-progress", "--logging-level 1"),
            *_accepted("it is not measured", "--log-energy", "--log-straggler", "--disable-straggler-on-startup", "--straggler-*"),
            *_accepted("it is not measured", "--log-max-attention-logit", "--gpu-sniff-test-interval 1"),
            *_accepted("the settings of a run stand in config.toml beside its checkpoints", "--config-logger-dir 1"),
            *_accepted("Weights & Biases takes it from WANDB_ENTITY", "--wandb-entity 1"),
            *_accepted("there is none", "--no-one-logger", "--one-logger-*", "--app-tag-run-name 1", "--app-tag-run-version 1"),
            *_accepted("there is none", "--otel-*", "--flight-recorder-*", "--result-rejected-tracker-filename 1"),
            *_refused("give flags, or --config FILE.toml", "--yaml-cfg 1"),
        ),
    ),
    Topic(
        "Elsewhere",
        (
            *_refused(
                SERVING,
                "--inference-*",
                "--flash-decode",
                "--num-speculative-tokens =0",
                "--use-legacy-static-engine",
                "--max-tokens-to-oom 1",
                "--decode-only-cuda-graphs",
                "--enable-chunked-prefill",
            ),
            *_refused(SERVING, "--disable-chunked-prefill", "--nccl-all-reduce-for-prefill", "--mlp-chunks-for-prefill =1"),
            *_refused(
                "this program pretrains",
                "--perform-rl-step",
                "--rl-*",
                "--grpo-*",
                "--langrl-*",
                "--refit-*",
                "--offset-sampling-seed-by-dp-rank",
                "--logits-*",
            ),
            *_refused(
                "the launcher restarts runs; they resume from --load",
                "--inprocess-*",
                "--enable-ft-package",
                "--ft-*",
                "--calc-ft-timeouts",
            ),
            *_refused("the launcher restarts runs; they resume from --load", "--adlr-*", "--run-workload-inspector-server"),
            *_accepted("there is nothing experimental to switch on", "--enable-experimental", "--test-mode"),
            *_refused("PyTorch runs the model, not ONNX", "--onnx-safe 1"),
        ),
    ),
)

NEEDS: Mapping[str, tuple[str, object, str]] = {
    "--no-position-embedding": (
        "position_embedding_type",
        "rope",
        "models without positions are not there; give --position-embedding-type rope",
    ),
}
"""Flags that are accepted only where a setting has a value: the setting's name, the value, and what to do."""

OURS = frozenset(
    "--mask-padded-vocab --schedule --null-tokenizer-extra-eod --exit-samples --max-skipped-steps --metrics-file --peak-tflops "
    "--timeline --timeline-iteration --compile --compile-backend --cuda-graph --apex-optimizer --nccl-max-ctas "
    "--cuda-device-max-connections".split()
)
"""Settings that Megatron does not have, beside those that begin with ``--domino-``."""


def find(flag: str) -> Foreign | None:
    """The table's row for ``flag``: its own, else that of its family."""
    rows = [row for topic in TABLE for row in topic.flags]
    own = next((row for row in rows if row.flag == flag), None)
    return own or next((row for row in rows if row.is_family and flag.startswith(row.flag[:-1])), None)


def flag_names() -> list[str]:
    """Every flag of the table by its full name."""
    return [row.flag for topic in TABLE for row in topic.flags if not row.is_family]


def by_reason(outcome: Literal["accepted", "refused"], topic: Topic) -> Mapping[str, list[Foreign]]:
    """Flags of one class under their common reason, in the order of the table."""
    found: dict[str, list[Foreign]] = {}
    for row in topic.flags:
        if row.outcome == outcome:
            found.setdefault(row.why, []).append(row)
    return found


def help_text() -> str:
    """The table as it stands below ``--help``: a line a reason."""
    titles: dict[Literal["accepted", "refused"], str] = {
        "accepted": "Megatron's flags that are accepted without effect here",
        "refused": "Megatron's flags that are refused (a value behind = is accepted)",
    }
    lines = []
    for outcome, title in titles.items():
        lines.append(f"{title}:")
        for topic in TABLE:
            lines += [f"  {', '.join(map(shown, rows))}: {why}" for why, rows in by_reason(outcome, topic).items()]
    return "\n".join(lines)


def shown(row: Foreign) -> str:
    """A flag with the values of it that are accepted although others are refused."""
    return row.flag + (f"={'|'.join(row.neutral)}" if row.neutral else "")


def settle(unknown: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Sort words that the parser does not know: flags accepted, with the reason; flags refused, with the reason; the rest."""
    accepted, refused, left = [], [], []
    words = [part for word in unknown for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for word, following in _with_following(words):
        row = find(word) if word.startswith("--") else None
        if row is None:
            left += [word, *following]
            continue
        count = len(following) if row.words == MANY else row.words
        values = following[:count]
        left += following[count:]
        shown_words = " ".join([word, *values])
        if row.takes(values):
            accepted.append(f"{shown_words}: {row.why}")
        else:
            refused.append(f"{shown_words}: {row.why}" + (f" (only {' or '.join(row.neutral)} is accepted)" if row.neutral else ""))
    return accepted, refused, left


def _with_following(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag with the words up to the next one; words before the first flag one by one."""
    position = 0
    while position < len(words):
        end = position + 1
        if words[position].startswith("--"):
            while end < len(words) and not words[end].startswith("--"):
                end += 1
        yield words[position], list(words[position + 1 : end])
        position = end
