"""Checkpoints of one kind into another, tensor by tensor."""
