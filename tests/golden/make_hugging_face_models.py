"""Writes ``model/hf/``: tiny models of Hugging Face's own making and the logits that `transformers` gives them.

Needs `transformers`, which tests do not: ``python -m tests.golden.make_hugging_face_models`` from the repository's root, with the
names of the models to make where not all of them are.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy
import torch

FOLDER = Path(__file__).parent / "model" / "hf"
VOCABULARY, POSITIONS, SAMPLES = 97, 24, 2
GPT2 = {"vocab_size": VOCABULARY, "n_positions": POSITIONS, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}
LLAMA = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": POSITIONS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
MODELS = {
    "gpt2": {**GPT2},
    "gpt2_untied": {**GPT2, "tie_word_embeddings": False, "activation_function": "gelu"},
    "llama": {**LLAMA, "tie_word_embeddings": False},
    "llama31": {
        **LLAMA,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "head_dim": 16,
        "initializer_range": 0.25,
    },
    "llama_tied": {**LLAMA, "tie_word_embeddings": True, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "head_dim": 8},
}


def tokens() -> torch.Tensor:
    """Ids [b, s] whose logits are recorded."""
    return torch.randint(0, VOCABULARY, (SAMPLES, POSITIONS), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def logits_of(folder: Path) -> torch.Tensor:
    """Logits [b, s, v] that `transformers` computes of `tokens` with the model in ``folder``."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32, attn_implementation="eager")
    return model.eval()(tokens()).logits


def make(name: str) -> None:
    """Write one model, its 1-D parameters moved so that a missing one shows, and its logits."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    if name.startswith("gpt2"):
        model = GPT2LMHeadModel(GPT2Config(**MODELS[name]))
    else:
        model = LlamaForCausalLM(LlamaConfig(**MODELS[name]))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(FOLDER / name)
    (FOLDER / name / "generation_config.json").unlink(missing_ok=True)
    numpy.savez_compressed(FOLDER / f"{name}_logits.npz", tokens=tokens().numpy(), logits=logits_of(FOLDER / name).numpy())


if __name__ == "__main__":
    for model_name in sys.argv[1:] or MODELS:
        make(model_name)
