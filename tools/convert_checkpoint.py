#!/usr/bin/env python3
"""Convert a checkpoint: native, Megatron's two formats and Hugging Face's safetensors, any of them to any other."""

from launcher import launch

if __name__ == "__main__":
    launch("convert_checkpoint")
