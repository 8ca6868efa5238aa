"""Token files, tokenizers, samples and batches. Nothing in here imports torch."""
