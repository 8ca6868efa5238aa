"""What a plan costs on a machine, without running it."""
