"""Text files to token files."""
