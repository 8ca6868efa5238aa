"""The arithmetic that a part can have done by more than one library."""
