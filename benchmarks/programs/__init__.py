"""The programs that are compared, each a rank process that takes orders on a pipe."""
