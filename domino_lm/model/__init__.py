"""Parts that models are made of; none of them knows a schedule."""
