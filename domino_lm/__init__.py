"""domino_lm: Megatron-compatible pretraining that hides tensor-parallel communication behind compute."""
