"""Settings of saving and resuming; `config` puts them beside the others. Nothing here imports torch."""

from dataclasses import dataclass

from domino_lm.config.bounds import PositiveInt


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving and resuming."""

    save: str | None = None
    """Folder for checkpoints."""

    load: str | None = None
    """Folder to resume from; an empty or missing folder starts from scratch and says so."""

    save_interval: PositiveInt | None = None
    """Steps between checkpoints; the last step is always saved when --save is given."""

    async_save: bool = False
    """Copy what is to be saved and train on while a process beside each rank writes it; the next save and the end of the run wait for it. Costs memory for the copy: main memory, pinned for a GPU."""

    save_retain_interval: PositiveInt | None = None
    """Keep the checkpoints of these iterations, multiples of --save-interval, and the last one (or --keep-last); older others are removed once a newer one is whole and has been read back."""

    keep_last: PositiveInt | None = None
    """Keep this many of the newest whole checkpoints, and those of --save-retain-interval; the one that --load took stays too."""

    exit_on_save_failure: bool = False
    """End the run when a checkpoint cannot be saved, instead of training on and trying again at the next --save-interval. A last save that fails always ends it with exit code 3."""

    exit_on_missing_checkpoint: bool = False
    """End with an error when --load holds no checkpoint, instead of starting from scratch."""

    finetune: bool = False
    """Start a new run from the weights of --load: iteration, optimizer, learning-rate schedule and data start from the beginning."""

    ckpt_step: PositiveInt | None = None
    """Iteration of --load to take; None takes the latest complete one."""

    verify_integrity: bool = True
    """Compare every byte that is loaded with the hashes that were taken when it was saved. Costs a tenth of the reading time; --no-verify-integrity compares the sizes of files alone."""

    use_checkpoint_args: bool = False
    """Take the model's settings from the checkpoint in --load in place of a preset's. What flags or --config say of its shape must be the same; of sequence length, dropout, vocabulary and tokenizer they win. Without a checkpoint there the command line holds."""

    no_load_optim: bool = False
    """Load weights alone; optimizer, schedule and iteration start from the beginning."""

    no_save_optim: bool = False
    """Save weights alone: smaller checkpoints, which load with --no-load-optim or --finetune only."""

    override_opt_param_scheduler: bool = False
    """Resume with the learning rate of this command's flags, all of it, from the position in the checkpoint; without this or the next flag a difference is refused."""

    use_checkpoint_opt_param_scheduler: bool = False
    """Resume with the learning rate of the checkpoint, all of it, and without regard to this command's flags."""

    @property
    def saves_beside(self) -> bool:
        """Whether checkpoints are written beside training."""
        return self.save is not None and self.async_save
