"""Process groups, collectives, counter-based randomness and gradient memory."""
