"""Comparisons with other programs on a network of known speed; see README.md."""
