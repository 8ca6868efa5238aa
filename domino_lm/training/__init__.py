"""The training loop: optimizer, checkpoints, schedules, metrics."""
