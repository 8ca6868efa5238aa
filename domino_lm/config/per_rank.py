"""Settings that may differ between the ranks of one run; all others must be the same on every rank."""

MAY_DIFFER = (
    "data_cache_path",  # a folder of each node's own serves as well as a shared one
    "num_workers",  # threads that read ahead; the samples are the same
    "tensorboard_dir",  # rank 0 alone writes from here on
    "tensorboard_log_interval",
    "log_world_size_to_tensorboard",
    "metrics_file",
    "peak_tflops",
    "wandb_project",
    "wandb_exp_name",
    "wandb_save_dir",
    "timeline",
    "timeline_iteration",
)
"""Names of these settings. ``LOCAL_RANK`` and the like are no settings, and differ anyway."""
