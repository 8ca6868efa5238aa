"""Every argument that Megatron's trainer saved with its checkpoint has a class here: it works, is accepted, or is refused."""

from __future__ import annotations

from pathlib import Path

from domino_lm.checkpoint.torch_files import load_torch_file, values_of
from domino_lm.config.arguments import build_parser
from domino_lm.config.megatron_flags import find
from domino_lm.config.schema import settings
from tests.golden.checkpoint_files import unpack
from tests.unit.megatron_page import is_ours

FLAG_OF = {
    "add_position_embedding": "--no-position-embedding",
    "apply_rope_fusion": "--no-rope-fusion",
    "barrier_with_L1_time": "--no-barrier-with-level-1-timing",
    "ckpt_fully_parallel_save_deprecated": "--ckpt-fully-parallel-save",
    "deprecated_use_mcore_models": "--use-mcore-models",
    "disable_msc_deprecated": "--disable-msc",
    "dist_ckpt_format_deprecated": "--dist-ckpt-format",
    "enable_msc": "--disable-msc",
    "enable_one_logger": "--no-one-logger",
    "fp4": "--fp4-format",
    "fp8": "--fp8-format",
    "layernorm_zero_centered_gamma": "--apply-layernorm-1p",
    "metadata_path": "--tokenizer-metadata",
    "microbatch_group_size_per_vp_stage": "--microbatch-group-size-per-virtual-pipeline-stage",
    "overlap_p2p_comm": "--no-overlap-p2p-communication",
    "overlap_p2p_comm_warmup_flush": "--overlap-p2p-communication-warmup-flush",
    "perform_initialization": "--no-initialization",
    "special_tokens": "--tokenizer-special-tokens",
    "use_dist_ckpt_deprecated": "--use-dist-ckpt",
    "use_gloo_process_groups": "--disable-gloo-process-groups",
    "use_mamba_mem_eff_path": "--disable-mamba-mem-eff-path",
}
"""Arguments whose flag has another name."""

NO_FLAGS = set(
    "_is_global_batch_size_explicitly_specified consumed_train_samples consumed_valid_samples curr_iteration data_parallel_size do_test "
    "do_train do_valid iteration num_floating_point_operations_so_far params_dtype rank skipped_train_samples "
    "transformer_pipeline_model_parallel_size virtual_pipeline_model_parallel_size world_size".split()
)
"""What Megatron works out by itself."""


def arguments(folder: Path) -> set[str]:
    file = unpack(folder) / "gpt_legacy_tp1" / "iter_0000020" / "mp_rank_00" / "model_optim_rng.pt"
    return set(values_of(load_torch_file(file, str(file))["args"]))


def test_every_argument_of_megatrons_trainer_has_a_class(tmp_path: Path) -> None:
    known = {option for action in build_parser()._actions for option in action.option_strings}
    left = set()
    for name in arguments(tmp_path) - NO_FLAGS:
        dashed = name.replace("_", "-")
        spellings = [FLAG_OF.get(name, f"--{dashed}"), f"--no-{dashed}", f"--disable-{dashed}", f"--use-{dashed}"]
        if not any(flag in known or find(flag) for flag in spellings):
            left.add(name)
    assert left == set()


def test_settings_that_are_called_megatrons_are(tmp_path: Path) -> None:
    names = arguments(tmp_path) | {
        "norm_epsilon",
        "fp8_format",
        "persist_layer_norm",
        "tokenizer_special_tokens",
        "attention_backend",
        "apply_layernorm_1p",
    }
    assert [item.flag for item in settings() if not is_ours(item) and item.name not in names] == []
