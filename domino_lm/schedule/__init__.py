"""A training step as an explicit plan: built once, validated, executed, timed and drawn."""
