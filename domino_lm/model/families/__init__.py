"""Kinds of models, each with all that the program knows of it."""
