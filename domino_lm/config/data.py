"""Settings of the data and its tokenizer; `config` puts them beside the others."""

from dataclasses import dataclass
from typing import Literal

from domino_lm.config.bounds import NonNegativeFloat, NonNegativeInt, PositiveInt


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Which tokenizer the data was made with."""

    tokenizer_type: (
        Literal[
            "GPT2BPETokenizer",
            "Llama2Tokenizer",
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "HuggingFaceTokenizer",
            "TikTokenizer",
            "NullTokenizer",
        ]
        | None
    ) = None
    """GPT2BPETokenizer; Llama2Tokenizer / SentencePieceTokenizer / GPTSentencePieceTokenizer (all plain SentencePiece); HuggingFaceTokenizer (a tokenizer.json); TikTokenizer (byte strings by rank); NullTokenizer (numbers, with --vocab-size)."""

    tokenizer_model: str | None = None
    """SentencePiece model file; for HuggingFaceTokenizer a tokenizer.json or its folder; for TikTokenizer a JSON list of ranks and bytes."""

    vocab_file: str | None = None
    """GPT-2 vocab.json."""

    merge_file: str | None = None
    """GPT-2 merges.txt."""

    tokenizer_sentencepiece_legacy: bool = False
    """Put the tokens of --tokenizer-special-tokens behind the SentencePiece vocabulary, as Megatron's legacy mode does."""

    tokenizer_special_tokens: tuple[str, ...] = ()
    """Tokens that the legacy mode adds; of TikTokenizer, the names of its first ids, with <unk>, <s> and </s> among them."""

    tiktoken_pattern: Literal["v1", "v2"] | None = None
    """What TikTokenizer cuts a text by before it merges; None takes v2."""

    tiktoken_num_special_tokens: PositiveInt = 1000
    """Special tokens that stand before TikTokenizer's byte strings; --vocab-size (131072 if not given) counts them."""

    tokenizer_hf_no_include_special_tokens: bool = False
    """Leave out what a tokenizer.json puts around each text (a BOS, say)."""

    null_tokenizer_eod_id: int | None = None
    """End of document of NullTokenizer; None takes the last id."""

    null_tokenizer_pad_id: int | None = None
    """Padding id of NullTokenizer; None takes -1. Samples are filled up without an id, so it changes nothing."""

    null_tokenizer_extra_eod: bool = False
    """Put NullTokenizer's end of document behind --vocab-size, as megatron-core 0.16 does; later versions take the last id."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where samples come from."""

    data_path: tuple[str, ...] | None = None
    """Prefix of a .bin/.idx pair made by domino-lm-preprocess; several to blend them by size, or pairs of weight and prefix to blend them by weight."""

    split: str | None = None
    """Shares of training, validation and test, counted in sequences of each source (969,30,1 if none is given)."""

    train_data_path: tuple[str, ...] | None = None
    """Prefixes, or weights and prefixes, of training alone; excludes --data-path and --split."""

    valid_data_path: tuple[str, ...] | None = None
    """The same for validation."""

    test_data_path: tuple[str, ...] | None = None
    """The same for the test."""

    data_args_path: str | None = None
    """File with the words of --data-path, for blends of many sources."""

    per_split_data_args_path: str | None = None
    """JSON file with the words of train, valid and test."""

    mock_data: bool = False
    """Train on made-up tokens."""

    mid_level_dataset_surplus: NonNegativeFloat = 0.005
    """Samples more than its share that each source of a weighted blend is built with, as a fraction."""

    multiple_validation_sets: bool = False
    """Evaluate the sources of the validation split apart instead of blended."""

    full_validation: bool = False
    """Evaluate on the whole validation split each time instead of --eval-iters batches."""

    dataloader_type: Literal["single", "cyclic"] = "single"
    """single reads the samples in the order of the data set; cyclic permutes them again in every pass."""

    data_sharding: bool = True
    """With cyclic, each data-parallel rank permutes a share of its own; --no-data-sharding deals one permutation out."""

    num_workers: NonNegativeInt = 2
    """Threads that read micro-batches ahead of the step; 0 reads them in it."""

    data_cache_path: str | None = None
    """Folder for index files, shared by runs on the same data; None keeps the indices in memory."""

    reset_position_ids: bool = False
    """Restart positions after each end of document."""

    reset_attention_mask: bool = False
    """Keep tokens from attending across an end of document. Materialises masks, which is slower."""

    eod_mask_loss: bool = False
    """Take no loss if the input is an end of document."""

    @property
    def needs_eod(self) -> list[str]:
        """Flags that are given and that need the tokenizer's end-of-document id."""
        names = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
        return ["--" + name.replace("_", "-") for name in names if getattr(self, name)]
