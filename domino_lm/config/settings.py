"""Every setting of a run, as frozen dataclasses; `arguments` turns their fields into flags.

Field names carry Megatron's spelling, so ``ffn_hidden_size`` is ``--ffn-hidden-size``; settings of our own begin with
``domino_`` or are named in the docstring. The docstring under a field is its help text. Nothing here imports torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from domino_lm.config.bounds import Bounds, Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from domino_lm.config.checkpoint import CheckpointConfig
from domino_lm.config.data import DataConfig, TokenizerConfig
from domino_lm.config.kernels import KernelConfig
from domino_lm.config.precision import PrecisionConfig

Sharding = Literal["no_shard", "optim", "optim_grads"]
"""What data-parallel ranks share out: nothing, the optimizer's state, or the state and the gradients."""


class ConfigError(ValueError):
    """Settings that cannot work together; the message names flags, values and the way out."""


def refuse(faults: Sequence[str]) -> None:
    """Raise ConfigError with all ``faults``, if there are any: a single one as it is, else a line per fault."""
    if len(faults) == 1:
        raise ConfigError(faults[0])
    if faults:
        raise ConfigError("\n".join([f"{len(faults)} settings cannot work:", *(f"  - {fault}" for fault in faults)]))


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and arithmetic of the model."""

    model: str | None = None
    """A model of your own, as module:Class (docs/any-transformer.md); None takes the GPT or LLaMA that the other settings describe."""

    num_layers: PositiveInt
    """Transformer layers."""

    hidden_size: PositiveInt
    """Width h of the residual stream."""

    ffn_hidden_size: PositiveInt | None = None
    """Width f of the MLP; None takes 4h, or 8h/3 rounded down to a multiple of 64 with --swiglu."""

    num_attention_heads: PositiveInt
    """Query heads; hidden size must divide by it unless --kv-channels is given."""

    group_query_attention: bool = False
    """Let several query heads share one key and value head; their number is --num-query-groups."""

    num_query_groups: PositiveInt = 1
    """Key and value heads under --group-query-attention."""

    kv_channels: PositiveInt | None = None
    """Width of one head; None takes hidden size / heads."""

    seq_length: PositiveInt
    """Tokens of one training sample."""

    max_position_embeddings: PositiveInt | None = None
    """Rows of the learned position table; None takes the sequence length. RoPE needs none."""

    position_embedding_type: Literal["learned_absolute", "rope"] = "learned_absolute"
    """learned_absolute (GPT) or rope (LLaMA)."""

    rotary_base: PositiveFloat = 10000.0
    """Base of RoPE's frequencies."""

    use_rope_scaling: bool = False
    """Slow RoPE's low frequencies down as Llama 3.1 does, for samples longer than the 8192 tokens that the model began with."""

    rope_scaling_factor: PositiveFloat = 8.0
    """By how much --use-rope-scaling slows the lowest frequencies down; Llama 3.1 takes 8, Llama 3.2 takes 32."""

    rotary_seq_len_interpolation_factor: PositiveFloat | None = None
    """Divide RoPE's positions by this, for samples longer than those that a model was trained on."""

    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """LayerNorm or RMSNorm."""

    apply_layernorm_1p: bool = False
    """Keep norm weights less 1, so that they start at 0 and lie where narrow formats are fine; either norm multiplies by 1 + weight."""

    norm_epsilon: PositiveFloat = 1e-5
    """Added to the variance inside every norm."""

    swiglu: bool = False
    """Gated MLP, silu(gate) * up, in place of GELU."""

    bias_gelu_fusion: bool = True
    """GELU by its tanh approximation, as Megatron's kernel that is fused with the bias computes it; --no-bias-gelu-fusion takes the exact erf, which models without biases have anyway."""

    openai_gelu: bool = False
    """GELU by its tanh approximation, without biases too."""

    add_bias_linear: bool = True
    """Bias in every linear layer; --disable-bias-linear turns all of them off."""

    untie_embeddings_and_output_weights: bool = False
    """Give the output layer a matrix of its own instead of the word embedding's."""

    attention_dropout: Fraction = 0.1
    """Dropout on attention probabilities; above 0 it needs the explicit attention, which is slower than the fused kernel."""

    hidden_dropout: Fraction = 0.1
    """Dropout on embeddings and on each branch before it joins the residual."""

    init_method_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights; output projections take it divided by sqrt(2 x layers)."""

    embedding_init_method_std: PositiveFloat | None = None
    """The same of word and position embeddings, which then take no weight decay; None takes --init-method-std, and the decay."""

    init_method_xavier_uniform: bool = False
    """Draw all initial matrices uniformly from +-sqrt(6 / (rows + columns)) instead; embeddings only without a deviation of their own."""

    vocab_size: PositiveInt | None = None
    """True number of token ids; None takes the tokenizer's."""

    make_vocab_size_divisible_by: PositiveInt = 128
    """The stored vocabulary is padded to a multiple of this times the tensor-parallel size."""

    mask_padded_vocab: bool = True
    """Keep padded vocabulary rows out of the loss, so that it does not depend on the padding; Megatron lets them take part."""

    @property
    def ffn_width(self) -> int:
        """MLP width f that the flags resolve to."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return 4 * self.hidden_size * 2 // 3 // 64 * 64 if self.swiglu else 4 * self.hidden_size

    @property
    def gelu_approximation(self) -> Literal["tanh", "none"]:
        """How GELU is computed: none is the exact erf."""
        return "tanh" if self.openai_gelu or (self.bias_gelu_fusion and self.add_bias_linear) else "none"

    @property
    def head_width(self) -> int:
        """Channels d of one attention head."""
        return self.kv_channels if self.kv_channels is not None else self.hidden_size // self.num_attention_heads

    @property
    def embedding_std(self) -> float | None:
        """Standard deviation of initial embeddings; None if they are drawn uniformly."""
        return self.embedding_init_method_std or (None if self.init_method_xavier_uniform else self.init_method_std)

    @property
    def query_groups(self) -> int:
        """Key and value heads; one for each query head without --group-query-attention."""
        return self.num_query_groups if self.group_query_attention else self.num_attention_heads

    @property
    def position_rows(self) -> int:
        """Rows of the learned position table."""
        return self.max_position_embeddings if self.max_position_embeddings is not None else self.seq_length

    def padded_vocab_size(self, tensor_parallel: int) -> int:
        """Smallest multiple of ``make_vocab_size_divisible_by`` x ``tensor_parallel`` that holds the vocabulary."""
        assert self.vocab_size is not None, "the vocabulary size is resolved before a model is built"
        multiple = self.make_vocab_size_divisible_by * tensor_parallel
        return -(-self.vocab_size // multiple) * multiple


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How ranks are laid out and talk to each other."""

    tensor_model_parallel_size: PositiveInt = 1
    """Ranks t that share each layer's matrices; neighbours in rank order, so keep it within a node."""

    distributed_backend: Literal["gloo", "nccl"] | None = None
    """gloo or nccl; None takes nccl if CUDA is available, else gloo."""

    distributed_timeout_minutes: PositiveInt = 10
    """A collective that takes longer ends the run with an error instead of a hang."""

    distributed_timeout_seconds_after_init: PositiveInt | None = None
    """The same once the first steps are done, in seconds; None keeps --distributed-timeout-minutes."""

    hang_timeout_seconds: PositiveFloat | None = None
    """End the run when a rank has stood still for so long, in one op of a step (10 times as long in first steps, saves, evaluations), and say which one; None takes 10 times the longest of the last steps, at least 30 s, and 180 s where there are several nodes. Never longer than a collective may take."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How one step's work is sliced and ordered."""

    schedule: Literal["baseline", "domino", "auto"] | None = None
    """domino interleaves slices so that collectives travel behind compute; baseline is Megatron's order; auto measures this machine, simulates the cuts and takes the fastest; None takes domino, or baseline if --tensor-model-parallel-size is 1."""

    domino_calibration: str | None = None
    """What --schedule auto knows of the machine: a known name (dgx-h100), or a .json file, which is read if it exists and else measured and written."""

    domino_row_slices: PositiveInt | None = None
    """Rows that each micro-batch is cut into; None takes min(2, micro-batch size), or 4 along the sequence; 1 cuts nothing."""

    domino_row_dim: Literal["batch", "sequence"] | None = None
    """batch: a row is some of the sequences; sequence: a row is a stretch of every sequence, which works at micro-batch size 1; None takes batch, or sequence if the micro-batch holds one."""

    domino_column_slices: PositiveInt = 1
    """Column blocks that the GEMM before each all-reduce is cut into, each reduced while the next is computed; must divide the hidden size."""

    domino_pair: Literal["micro-batches", "row-groups"] | None = None
    """Interleave forward of one piece with backward of another: micro-batches (costs the activations of one more), or two groups of rows of the same micro-batch."""

    domino_defer_wgrad: bool = False
    """Hold weight gradients back to fill waits. Costs the saved inputs of the held GEMMs."""

    sequence_parallel: bool = False
    """Cut norms, residuals and dropout over tensor-parallel ranks along the sequence: reduce-scatter and all-gather in place of all-reduce, and less memory for activations."""

    recompute_granularity: Literal["selective", "full"] | None = None
    """Compute activations again in backward instead of keeping them: selective drops what attention keeps, full drops all but the residual stream."""

    recompute_method: Literal["uniform", "block"] | None = None
    """Layers that full recomputes: uniform takes all, block the first --recompute-num-layers."""

    recompute_num_layers: PositiveInt | None = None
    """Layers recomputed under --recompute-method block; uniform accepts it without effect, since no reduced output is ever recomputed."""

    overlap_grad_reduce: bool = True
    """Start the data-parallel reduction of a gradient bucket as soon as its last gradient is written; --no-overlap-grad-reduce reduces all of them after backward."""

    use_distributed_optimizer: bool = False
    """Let each data-parallel rank keep the optimizer state of its share of the parameters and update that alone; gradients are reduce-scattered, updated parameters gathered (ZeRO-1)."""

    data_parallel_sharding_strategy: Sharding | None = None
    """What data-parallel ranks share out: no_shard nothing, optim the optimizer state, optim_grads gradients too (ZeRO-2: less memory, but a reduction every micro-batch); None takes optim under --use-distributed-optimizer, else no_shard."""

    overlap_param_gather: bool = False
    """Gather updated parameters behind the next step's forward, each bucket until it is needed; without, all of them before the step ends."""

    ddp_bucket_size: PositiveInt | None = None
    """Parameters in one data-parallel bucket; None takes max(40 million, 1 million x data-parallel size)."""

    @property
    def sharding(self) -> Sharding:
        """What data-parallel ranks share out, if there is more than one."""
        return self.data_parallel_sharding_strategy or ("optim" if self.use_distributed_optimizer else "no_shard")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW, SGD or Muon, the learning-rate schedule and gradient clipping."""

    optimizer: Literal["adam", "sgd", "muon"] = "adam"
    """adam is AdamW; sgd has a momentum, and its weight decay is added to the gradient; muon makes each layer's matrices of momentum orthogonal before they are added, and takes AdamW for all other weights."""

    lr: PositiveFloat
    """Peak learning rate."""

    min_lr: NonNegativeFloat = 0.0
    """Learning rate at and after the end of the decay."""

    decoupled_lr: PositiveFloat | None = None
    """Peak learning rate of word embedding and output layer; None takes --lr."""

    decoupled_min_lr: NonNegativeFloat | None = None
    """Their rate at and after the end of the decay; None takes --min-lr."""

    lr_decay_style: Literal["cosine", "linear", "constant", "inverse-square-root", "WSD"] = "linear"
    """Shape of the decay after the warm-up, linear by default as in Megatron (presets take cosine); WSD (warm-up, stable, decay) holds the peak and decays over its last --lr-wsd-decay-iters."""

    lr_decay_iters: PositiveInt | None = None
    """Iterations until the minimum is reached, those of a batch ramp among them; None takes --train-iters."""

    lr_decay_samples: PositiveInt | None = None
    """The same in samples; None takes the length of the run."""

    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of WSD's decay."""

    lr_wsd_decay_iters: PositiveInt | None = None
    """Iterations of WSD's decay, the last ones of --lr-decay-iters."""

    lr_wsd_decay_samples: PositiveInt | None = None
    """The same in samples."""

    lr_warmup_iters: NonNegativeInt = 0
    """Iterations of linear warm-up."""

    lr_warmup_samples: NonNegativeInt = 0
    """The same in samples."""

    lr_warmup_fraction: float | None = None
    """Warm-up as a fraction of the decay, instead of --lr-warmup-iters."""

    lr_warmup_init: NonNegativeFloat = 0.0
    """Learning rate at the start of the warm-up."""

    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay; biases and norm weights take none."""

    start_weight_decay: NonNegativeFloat | None = None
    """Weight decay of the first step under --weight-decay-incr-style linear or cosine."""

    end_weight_decay: NonNegativeFloat | None = None
    """Weight decay at the end of the run under --weight-decay-incr-style linear or cosine."""

    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """How weight decay grows over the run: constant stays at --weight-decay, the others lead from --start-weight-decay to --end-weight-decay."""

    sgd_momentum: Fraction = 0.9
    """Share of the former update that SGD keeps."""

    muon_momentum: Fraction = 0.9
    """Share of the former momentum that Muon keeps; the gradient makes up the rest."""

    muon_nesterov: bool = False
    """Make the mean of momentum and gradient orthogonal instead of the momentum, --muon-momentum of it momentum."""

    muon_split_qkv: bool = True
    """Let Muon take queries, keys and values, which one weight holds, as three matrices."""

    muon_num_ns_steps: PositiveInt = 5
    """Steps of the Newton-Schulz iteration that makes a matrix nearly orthogonal."""

    muon_coefficient_type: Literal["quintic", "simple"] = "quintic"
    """Polynomials of the iteration: quintic has five, one for each step in turn; simple has one, that of the first Muon."""

    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = "spectral"
    """Factor of the update of a matrix of r rows and c columns: spectral sqrt(max(r, c)), unit_rms_norm sqrt(r / c), shape_scaling sqrt(max(1, r / c))."""

    muon_extra_scale_factor: PositiveFloat = 1.0
    """A further factor; 0.2 beside spectral makes updates about as large as AdamW's, so that its learning rates hold."""

    muon_fp32_matmul_prec: Literal["medium", "high", "highest"] = "medium"
    """Arithmetic of the iteration for fp32 momentum: medium is bf16 and high TF32, on GPUs alone; highest is fp32."""

    adam_beta1: Fraction = 0.9
    """Decay of the first moment."""

    adam_beta2: Fraction = 0.999
    """Decay of the second moment."""

    adam_eps: PositiveFloat = 1e-8
    """Added to the denominator."""

    clip_grad: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0 turns clipping off."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Length of the run, batch sizes, objective and evaluation."""

    micro_batch_size: PositiveInt
    """Sequences in one forward and backward of a rank."""

    global_batch_size: PositiveInt | None = None
    """Sequences in one optimizer step over all ranks; None takes micro-batch size x data-parallel size."""

    train_iters: PositiveInt | None = None
    """Optimizer steps of the whole run."""

    train_samples: PositiveInt | None = None
    """Samples of the whole run, instead of --train-iters; a last batch that they do not fill is left out."""

    rampup_batch_size: tuple[int, ...] | None = None
    """Three numbers: the global batch of the first step, by how much it grows, and the samples over which it grows to --global-batch-size."""

    calculate_per_token_loss: bool = False
    """Minimise the mean over all tokens of the global batch instead of Megatron's default, the mean of micro-batch means."""

    eval_interval: NonNegativeInt = 1000
    """Steps between evaluations on the validation split; 0 turns them off."""

    eval_iters: Annotated[int, Bounds("must be 0 or more; --full-validation evaluates on the whole validation split")] = 100
    """Global batches in one evaluation; 0 turns evaluation off."""

    eval_micro_batch_size: PositiveInt | None = None
    """Sequences in one forward of an evaluation; None takes --micro-batch-size."""

    eval_global_batch_size: PositiveInt | None = None
    """Sequences in one batch of an evaluation over all ranks; None takes --global-batch-size."""

    skip_train: bool = False
    """Evaluate the weights on validation and test, and end; with --load, those of a checkpoint."""

    iterations_to_skip: tuple[int, ...] = ()
    """Iterations, counted from 1, whose data is read and left out: no step is made, and the learning rate stands."""

    exit_interval: PositiveInt | None = None
    """Stop (and save) when the iteration is divisible by this; the learning-rate schedule does not change."""

    exit_samples: PositiveInt | None = None
    """Stop (and save) once so many samples are consumed."""

    exit_duration_in_mins: PositiveFloat | None = None
    """Stop (and save) after so many minutes of training, on all ranks by rank 0's clock."""

    manual_gc: bool = False
    """Collect Python's garbage at --manual-gc-interval alone, at the same step on all ranks, instead of whenever it comes due."""

    manual_gc_interval: NonNegativeInt = 0
    """Steps between collections under --manual-gc; 0 collects only before evaluations and saving."""

    max_skipped_steps: NonNegativeInt = 3
    """Steps in a row whose loss or gradient is not finite that are skipped, on all ranks, before the run ends with an error; 0 ends it at the first. Overflows that lower the dynamic loss scale of --fp16 do not count."""

    check_for_nan_in_loss_and_grad: bool | None = None
    """End the run at the first loss or gradient that is not finite; --no-check-for-nan-in-loss-and-grad skips such steps without end. Neither: --max-skipped-steps."""

    check_for_spiky_loss: bool = False
    """End the run at a loss above 10 times its running estimate, of which it is otherwise only warned."""

    check_for_large_grads: bool = False
    """The same for the gradient norm."""

    seed: NonNegativeInt = 1234
    """Seed of initial weights, dropout and data order."""

    @property
    def most_skipped_steps(self) -> float:
        """Steps in a row that are not finite and do not end the run."""
        if self.check_for_nan_in_loss_and_grad is None:
            return self.max_skipped_steps
        return 0 if self.check_for_nan_in_loss_and_grad else float("inf")


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What is printed and recorded."""

    log_interval: PositiveInt = 100
    """Steps between log lines."""

    tensorboard_dir: str | None = None
    """Folder for TensorBoard event files."""

    tensorboard_log_interval: PositiveInt = 1
    """Steps between TensorBoard points."""

    log_throughput: bool = False
    """Put model TFLOP/s per rank into the log line and TensorBoard."""

    log_straggler: bool = False
    """Say with each log line which rank took longest of its own, its waits for others left out, and by how much. On a GPU one step of each interval is recorded for it."""

    log_params_norm: bool = False
    """Log the norm of all parameters after each update."""

    log_num_zeros_in_grad: bool = False
    """Log how many gradient entries are exactly 0."""

    log_world_size_to_tensorboard: bool = False
    """Record the number of ranks."""

    metrics_file: str | None = None
    """Write every step and evaluation here, one JSON object per line; a resumed run appends to it."""

    peak_tflops: PositiveFloat | None = None
    """Dense peak of one device in TFLOP/s, in the run's precision, of which MFU is a fraction; None takes that of known GPUs, and on others MFU is n/a."""

    wandb_project: str | None = None
    """Weights & Biases project to log to; needs the package wandb."""

    wandb_exp_name: str | None = None
    """Name of the run there."""

    wandb_save_dir: str | None = None
    """Folder for its local files."""

    dump_on_nan: str | None = None
    """Write the first step that is not finite into this folder: the first op, part and row that made it so, the statistics of its inputs, its samples and its weights; domino-lm-verify --replay shows it again. Costs a second run of that step, and a copy of the weights on disk."""

    timeline: str | None = None
    """Write the measured timeline of one step here, as a Chrome trace (FILE.json) and a picture (FILE.png); rank 0's view."""

    timeline_iteration: PositiveInt = 3
    """Which step of this run --timeline records, counted from its start; the first ones warm up."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings of one run."""

    model: ModelConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    kernels: KernelConfig = field(default_factory=KernelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig
    training: TrainingConfig
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
