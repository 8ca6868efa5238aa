"""Names, layouts and settings of Hugging Face's GPT-2 and LLaMA against Megatron's."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from domino_lm.checkpoint.index import CheckpointError
from domino_lm.config.settings import ModelConfig
from domino_lm.model.rope import HIGH_FREQUENCY_FACTOR, LOW_FREQUENCY_FACTOR, ORIGINAL_LENGTH

Get = Callable[[str], Tensor]
Piece = tuple[str, Callable[[Tensor], Tensor]]
NO_BIASES = "add_bias_linear"
"""Key of a GPT-2's config.json, ours alone: false says that all biases of its linear layers, which GPT-2 always has, are zero."""
_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")


def split_qkv(grouped: Tensor, model: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Query [n d, ...], key and value [g d, ...] from Megatron's rows [(n + 2g) d, ...], which are ordered by query group."""
    rows = grouped.view(model.query_groups, -1, model.head_width, *grouped.shape[1:])  # [g, n/g + 2, d, ...]
    query, key, value = rows[:, :-2], rows[:, -2], rows[:, -1]
    return query.flatten(0, 2), key.flatten(0, 1), value.flatten(0, 1)


def join_qkv(query: Tensor, key: Tensor, value: Tensor, model: ModelConfig) -> Tensor:
    """The inverse of `split_qkv`."""
    groups, width, rest = model.query_groups, model.head_width, query.shape[1:]
    pieces = [piece.reshape(groups, -1, width, *rest) for piece in (query, key, value)]  # [g, n/g, d, ...], 2 x [g, 1, d, ...]
    return torch.cat(pieces, 1).flatten(0, 2)


@dataclass(frozen=True)
class Layout(ABC):
    """How one family stores the model ``model``."""

    model: ModelConfig
    LAYERS: ClassVar[str]
    """What stands before the numbers of layers."""

    MODULES: ClassVar[Mapping[str, str]]
    """Megatron's modules, those of a layer without its number, by the family's names."""

    @abstractmethod
    def pieces(self, name: str) -> Iterator[Piece]:
        """The tensors that Megatron's parameter ``name`` becomes: each one's name, and how to make it of the whole parameter."""

    @abstractmethod
    def whole(self, name: str, get: Get) -> Tensor:
        """Megatron's parameter ``name`` from the family's tensors."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What ``config.json`` says of the model."""

    def _name(self, name: str) -> str:
        """Megatron's parameter ``name`` as the family calls it."""
        module, _, field = name.rpartition(".")
        if not module.startswith("decoder.layers."):
            return f"{self.MODULES[module]}.{field}"
        layer, _, inner = module.removeprefix("decoder.layers.").partition(".")
        return f"{self.LAYERS}.{layer}.{self.MODULES[inner]}.{field}"


class Gpt2(Layout):
    """GPT-2: linear layers are stored [in, out], query, key and value each whole and side by side."""

    LAYERS = "transformer.h"
    MODULES: ClassVar[Mapping[str, str]] = {
        "embedding.word_embeddings": "transformer.wte",
        "embedding.position_embeddings": "transformer.wpe",
        "decoder.final_layernorm": "transformer.ln_f",
        "output_layer": "lm_head",
        "input_layernorm": "ln_1",
        "pre_mlp_layernorm": "ln_2",
        "self_attention.linear_qkv": "attn.c_attn",
        "self_attention.linear_proj": "attn.c_proj",
        "mlp.linear_fc1": "mlp.c_fc",
        "mlp.linear_fc2": "mlp.c_proj",
    }

    def pieces(self, name: str) -> Iterator[Piece]:
        yield self._name(name), lambda whole: self._stored(name, whole)
        if self._is_linear(name) and not self.model.add_bias_linear:
            yield self._name(name.removesuffix("weight") + "bias"), lambda whole: whole.new_zeros(whole.shape[0])

    def whole(self, name: str, get: Get) -> Tensor:
        stored, *biases = (get(piece) for piece, _ in self.pieces(name))
        if any(bias.any() for bias in biases):
            raise CheckpointError(
                f"config.json says {NO_BIASES} false, but {self._name(name)} has a bias that is not zero; remove that key"
            )
        stored = stored.t() if self._is_linear(name) else stored
        if "linear_qkv" in name:
            query, key, value = stored.chunk(3)
            return join_qkv(query, key, value, self.model)
        return stored

    def settings(self) -> dict[str, Any]:
        model = self.model
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": model.vocab_size,
            "n_positions": model.position_rows,
            "n_embd": model.hidden_size,
            "n_layer": model.num_layers,
            "n_head": model.num_attention_heads,
            "n_inner": None if model.ffn_width == 4 * model.hidden_size else model.ffn_width,
            "activation_function": "gelu_new" if model.gelu_approximation == "tanh" else "gelu",
            "layer_norm_epsilon": model.norm_epsilon,
            "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
            **({} if model.add_bias_linear else {NO_BIASES: False}),
        }

    def _stored(self, name: str, whole: Tensor) -> Tensor:
        if "linear_qkv" in name:
            whole = torch.cat(split_qkv(whole, self.model))
        return whole.t() if self._is_linear(name) else whole

    @staticmethod
    def _is_linear(name: str) -> bool:
        return ".linear_" in name and name.endswith(".weight")


class Llama(Layout):
    """LLaMA: query, key, value, gate and up are matrices of their own; rotary halves as in Megatron."""

    LAYERS = "model.layers"
    MODULES: ClassVar[Mapping[str, str]] = {
        "embedding.word_embeddings": "model.embed_tokens",
        "decoder.final_layernorm": "model.norm",
        "output_layer": "lm_head",
        "input_layernorm": "input_layernorm",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "self_attention.linear_qkv": "self_attn",
        "self_attention.linear_proj": "self_attn.o_proj",
        "mlp.linear_fc1": "mlp",
        "mlp.linear_fc2": "mlp.down_proj",
    }

    def pieces(self, name: str) -> Iterator[Piece]:
        stem, _, field = self._name(name).rpartition(".")
        if "linear_qkv" in name:
            for index, part in enumerate("qkv"):
                yield f"{stem}.{part}_proj.{field}", lambda whole, index=index: split_qkv(whole, self.model)[index]  # type: ignore[misc]
        elif "linear_fc1" in name:
            for index, part in enumerate(("gate", "up")):
                yield f"{stem}.{part}_proj.{field}", lambda whole, index=index: whole.chunk(2)[index]  # type: ignore[misc]
        else:
            yield f"{stem}.{field}", lambda whole: whole

    def whole(self, name: str, get: Get) -> Tensor:
        tensors = [get(piece) for piece, _ in self.pieces(name)]
        if "linear_qkv" in name:
            return join_qkv(tensors[0], tensors[1], tensors[2], self.model)
        return torch.cat(tensors)

    def settings(self) -> dict[str, Any]:
        model = self.model
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": model.vocab_size,
            "hidden_size": model.hidden_size,
            "intermediate_size": model.ffn_width,
            "num_hidden_layers": model.num_layers,
            "num_attention_heads": model.num_attention_heads,
            "num_key_value_heads": model.query_groups,
            "head_dim": model.head_width,
            "max_position_embeddings": model.seq_length,
            "hidden_act": "silu",
            "rms_norm_eps": model.norm_epsilon,
            "rope_theta": model.rotary_base,
            **({"rope_scaling": scaling} if (scaling := _scaling(model)) else {}),
            "attention_bias": model.add_bias_linear,
            "mlp_bias": model.add_bias_linear,
            "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        }


def is_norm_weight(name: str) -> bool:
    """Whether a parameter, by Megatron's name, is the weight of a norm."""
    return name.endswith("layernorm.weight")


def layout_for(model: ModelConfig) -> Layout:
    """The family that ``model`` belongs to. Raises CheckpointError if it belongs to neither, saying why."""
    faults = {Gpt2: list(_not_gpt2(model)), Llama: list(_not_llama(model))}
    for family, reasons in faults.items():
        if not reasons:
            return family(model)
    nearest = min(faults, key=lambda family: len(faults[family]))
    raise CheckpointError(
        f"Hugging Face has no GPT-2 or LLaMA of this kind (nearest: {nearest.__name__}): {'; '.join(faults[nearest])}. "
        "Convert it to native or one of Megatron's formats"
    )


def _not_gpt2(model: ModelConfig) -> Iterator[str]:
    if model.position_embedding_type != "learned_absolute":
        yield "GPT-2 has learned positions"
    if model.normalization != "LayerNorm" or model.swiglu:
        yield "GPT-2 has LayerNorm and GELU"
    if model.query_groups != model.num_attention_heads:
        yield "GPT-2 has no grouped queries"
    if model.head_width * model.num_attention_heads != model.hidden_size:
        yield f"GPT-2's heads fill the hidden size, not {model.num_attention_heads} x {model.head_width}"


def _not_llama(model: ModelConfig) -> Iterator[str]:
    if model.position_embedding_type != "rope":
        yield "LLaMA has rotary positions"
    if model.normalization != "RMSNorm" or not model.swiglu:
        yield "LLaMA has RMSNorm and SwiGLU"
    if model.use_rope_scaling and model.rotary_seq_len_interpolation_factor is not None:
        yield "LLaMA's positions are scaled in one way, not by --use-rope-scaling and --rotary-seq-len-interpolation-factor at once"


def read_settings(config: Mapping[str, Any], where: str) -> Layout:
    """The layout that a ``config.json`` describes.

    Raises CheckpointError if a key is missing, or it asks for arithmetic that this program does not have.
    """
    family = config.get("model_type")
    readers = {"gpt2": _read_gpt2, "llama": _read_llama, "mistral": _read_llama}
    if family not in readers:
        raise CheckpointError(f"{where}: model_type {family!r} is not read; gpt2, llama and mistral (without sliding window) are")
    try:
        model = readers[family](config, where)
    except KeyError as error:
        raise CheckpointError(f"{where}: {error.args[0]} is missing") from error
    return Gpt2(model) if family == "gpt2" else Llama(model)


def _read_gpt2(config: Mapping[str, Any], where: str) -> ModelConfig:
    activation = config.get("activation_function", "gelu_new")
    tanh, biases = activation != "gelu", bool(config.get(NO_BIASES, True))
    _refuse(config, where, {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False})
    if activation not in (*_TANH_GELU, "gelu"):
        raise CheckpointError(f"{where}: activation_function {activation!r} is not read; gelu and its tanh forms are")
    return ModelConfig(
        num_layers=config["n_layer"],
        hidden_size=config["n_embd"],
        ffn_hidden_size=config.get("n_inner"),
        num_attention_heads=config["n_head"],
        seq_length=config["n_positions"],
        norm_epsilon=config.get("layer_norm_epsilon", 1e-5),
        add_bias_linear=biases,
        bias_gelu_fusion=tanh or not biases,
        openai_gelu=tanh and not biases,
        untie_embeddings_and_output_weights=not config.get("tie_word_embeddings", True),
        attention_dropout=config.get("attn_pdrop", 0.1),
        hidden_dropout=config.get("resid_pdrop", 0.1),
        init_method_std=config.get("initializer_range", 0.02),
        vocab_size=config["vocab_size"],
    )


def _read_llama(config: Mapping[str, Any], where: str) -> ModelConfig:
    _refuse(config, where, {"hidden_act": "silu", "sliding_window": None, "partial_rotary_factor": 1.0})
    attention_bias, mlp_bias = config.get("attention_bias", False), config.get("mlp_bias", False)
    if attention_bias != mlp_bias:
        raise CheckpointError(f"{where}: attention_bias {attention_bias} with mlp_bias {mlp_bias}; this program has all biases or none")
    heads, groups = config["num_attention_heads"], config.get("num_key_value_heads") or config["num_attention_heads"]
    head_width = config.get("head_dim")
    return ModelConfig(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=heads,
        group_query_attention=groups != heads,
        num_query_groups=groups if groups != heads else 1,
        kv_channels=None if head_width in (None, config["hidden_size"] // heads) else head_width,
        seq_length=config["max_position_embeddings"],
        position_embedding_type="rope",
        **_rotary(config, where),
        normalization="RMSNorm",
        norm_epsilon=config.get("rms_norm_eps", 1e-6),
        swiglu=True,
        add_bias_linear=attention_bias,
        untie_embeddings_and_output_weights=not config.get("tie_word_embeddings", False),
        attention_dropout=config.get("attention_dropout", 0.0),
        hidden_dropout=0.0,
        init_method_std=config.get("initializer_range", 0.02),
        vocab_size=config["vocab_size"],
    )


def _rotary(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Base and scaling of the frequencies, in the newer or the older place; scaled otherwise than Llama 3.1's they are refused."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    base = {"rotary_base": float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))}
    if kind == "default":
        return base
    if kind == "linear":
        return {**base, "rotary_seq_len_interpolation_factor": float(rope["factor"])}
    if kind != "llama3":
        raise CheckpointError(f"{where}: rotary positions scaled by {kind!r} are not in this program; those of llama3 and linear are")
    expected = _llama3_scaling(rope["factor"])
    foreign = [f"{name} {rope.get(name)}" for name in expected if name != "rope_type" and rope.get(name) != expected[name]]
    if foreign:
        raise CheckpointError(f"{where}: rotary positions scaled with {', '.join(foreign)}; only {expected} is computed here")
    return {**base, "use_rope_scaling": True, "rope_scaling_factor": float(rope["factor"])}


def _scaling(model: ModelConfig) -> dict[str, Any] | None:
    """What a ``config.json`` says of a model's scaled frequencies or positions."""
    if model.use_rope_scaling:
        return _llama3_scaling(model.rope_scaling_factor)
    factor = model.rotary_seq_len_interpolation_factor
    return None if factor is None else {"rope_type": "linear", "factor": factor}


def _llama3_scaling(factor: float) -> dict[str, Any]:
    """What a ``config.json`` says of frequencies scaled as Llama 3.1's are."""
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LOW_FREQUENCY_FACTOR,
        "high_freq_factor": HIGH_FREQUENCY_FACTOR,
        "original_max_position_embeddings": ORIGINAL_LENGTH,
    }


def _refuse(config: Mapping[str, Any], where: str, neutral: Mapping[str, Any]) -> None:
    foreign = [f"{name} {config[name]}" for name, value in neutral.items() if config.get(name, value) != value]
    if foreign:
        raise CheckpointError(f"{where}: this program does not compute {', '.join(foreign)}")
