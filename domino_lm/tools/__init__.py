"""What the commands run, one module or two per command."""
