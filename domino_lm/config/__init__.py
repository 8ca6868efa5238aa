"""Every setting of a run: its type, its default, its flag."""
