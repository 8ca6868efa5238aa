"""Whether a run may start, and what it is."""
