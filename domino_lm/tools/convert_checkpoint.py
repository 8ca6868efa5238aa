"""Convert a checkpoint: native, Megatron's two formats and Hugging Face's safetensors, any of them to any other."""

import argparse
import sys
from pathlib import Path

from domino_lm.config.arguments import build_parser, read_flags
from domino_lm.config.foreign_text import int_of_flag
from domino_lm.config.precision import NAMES
from domino_lm.config.schema import NO_DEFAULT, settings
from domino_lm.config.settings import ConfigError, ModelConfig, refuse

KINDS = ("native", "megatron-legacy", "megatron-torch_dist", "hf")


def flag_parser() -> argparse.ArgumentParser:
    """The flags of this tool; training's flags of a model are read beside them."""
    parser = argparse.ArgumentParser(
        description="Convert a checkpoint; the kind of the source is detected. Weights, optimizer and schedule come along where both "
        "kinds have them. Tensors are read and written one at a time.",
        epilog="A checkpoint of Megatron's that holds no arguments also needs its model's flags (--num-layers, --hidden-size, ...). "
        "example: %(prog)s --load runs/llama --save llama-hf --to hf --dtype bf16",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--load", required=True, type=Path, metavar="DIR", help="folder of checkpoints, one checkpoint, or a Hugging Face model"
    )
    parser.add_argument("--save", required=True, type=Path, metavar="DIR", help="folder to write into; nothing in it is overwritten")
    parser.add_argument("--to", required=True, choices=KINDS, help="kind to write")
    parser.add_argument("--iteration", type=int_of_flag, metavar="N", help="iteration to take (default: the latest)")
    parser.add_argument(
        "--target-tensor-parallel-size", dest="tensor_parallel", type=int_of_flag, default=1, metavar="N",
        help="ranks that megatron-legacy is cut for, and that either of Megatron's kinds pads the vocabulary for (default: 1)",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=NAMES, help="data type of the weights (default: as in the source); moments stay in fp32")
    parser.add_argument(
        "--vocab-size", type=int_of_flag, metavar="N", help="true vocabulary, where the source does not know it (default: as it says)"
    )
    parser.add_argument("--no-optimizer", dest="optimizer", action="store_false", help="leave optimizer and schedule out")
    return parser


def parse_arguments(argv: list[str] | None = None) -> tuple[argparse.Namespace, ModelConfig | None]:
    """The tool's own flags, and the model that the rest describes, if they do."""
    flags, rest = flag_parser().parse_known_args(argv)
    return flags, _model(rest, flags.vocab_size)


def _model(words: list[str], vocab_size: int | None) -> ModelConfig | None:
    """The model that ``words`` describe, flags as in training; raises ConfigError on any other flag."""
    if not words:
        return None
    flags = read_flags(build_parser(), words)
    refuse(flags.faults)
    names = {item.name: item for item in settings() if item.part == "model"}
    foreign = ["--" + name.replace("_", "-") for name in flags.values if name not in names]
    if foreign:
        raise ConfigError(f"{', '.join(foreign)}: not flags of this tool, nor of a model; --help lists its flags.")
    missing = [item.flag for name, item in names.items() if item.default is NO_DEFAULT and name not in flags.values]
    if missing:
        raise ConfigError(f"{', '.join(missing)}: missing; flags that describe a model have to describe all of it.")
    return ModelConfig(**{"vocab_size": vocab_size, "mask_padded_vocab": False, **flags.values})


def main(argv: list[str] | None = None) -> int:
    try:
        flags, model = parse_arguments(argv)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    import torch  # takes seconds, which --help and wrong flags need not wait for

    from domino_lm.checkpoint.convert.conversion import convert
    from domino_lm.checkpoint.index import CheckpointError

    dtype = getattr(torch, NAMES[flags.dtype]) if flags.dtype else None
    try:
        stored, written = convert(**{**vars(flags), "dtype": dtype}, model=model)
    except (CheckpointError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    with_optimizer = stored.optimizer_steps is not None and flags.to != "hf"
    model, written_as = stored.model, "weights, optimizer and schedule" if with_optimizer else "weights alone"
    print(
        f"read {stored.kind} from {stored.path}: iteration {stored.iteration}, {model.num_layers} layers, hidden {model.hidden_size}\n"
        f"vocabulary: {model.vocab_size} true tokens; {stored.vocab_rows} rows stored, {stored.softmax_rows} of them in the softmax\n"
        f"wrote {flags.to} to {written}: {written_as} in {str(stored.dtype).removeprefix('torch.')}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
