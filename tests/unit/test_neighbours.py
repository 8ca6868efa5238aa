"""Who comes from torchtitan, nanotron, transformers or DeepSpeed is told the nearest setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from domino_lm.config.arguments import parse_arguments
from domino_lm.config.neighbours import NEIGHBOURS, WITHOUT_SETTING
from domino_lm.config.schema import settings
from domino_lm.config.settings import ConfigError
from domino_lm.config.toml_file import read_config


def test_every_neighbours_word_leads_to_a_setting_and_is_none_itself() -> None:
    names = {item.name: item.part for item in settings()} | {"preset": "", "config": ""}
    assert [setting for setting in NEIGHBOURS.values() if setting not in names] == []
    own = [path for path in NEIGHBOURS if "." in path and names.get(path.rpartition(".")[2]) == path.rpartition(".")[0]]
    assert own == []
    assert not NEIGHBOURS.keys() & WITHOUT_SETTING.keys()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[training]\nlocal_batch_size = 8", "[training] local_batch_size is no setting (nearest: micro_batch_size)"),
        ("[training]\nseq_len = 8", "nearest: seq_length"),
        ("[training]\nsteps = 8", "nearest: train_iters"),
        ("[training]\nmax_norm = 1.0", "nearest: clip_grad"),
        ("[lr_scheduler]\nwarmup_steps = 8", "[lr_scheduler] warmup_steps is no setting (nearest: lr_warmup_iters)"),
        ("[optimizer]\neps = 1e-8", "nearest: adam_eps"),
        ("[parallelism]\ntensor_parallel_degree = 8", "nearest: tensor_model_parallel_size"),
        ("[parallelism]\ndata_parallel_replicate_degree = 8", "replicas are what --tensor-model-parallel-size leaves of the ranks"),
        ("[activation_checkpoint]\nmode = 'full'", "nearest: recompute_granularity"),
        ("[metrics]\nlog_freq = 10", "nearest: log_interval"),
        ("[checkpoint]\ninterval = 500", "nearest: save_interval"),
        ("[validation]\nfreq = 500", "nearest: eval_interval"),
        ("[quantize.linear.float8]\nrecipe_name = 'x'", "[quantize.linear.float8] recipe_name is no setting (nearest: fp8_recipe)"),
        ("[tokens]\nsequence_length = 8", "nearest: seq_length"),
        ("[tokens]\ntrain_steps = 8", "nearest: train_iters"),
        ("[tokens]\nmicro_batch_size = 8", "[tokens] micro_batch_size belongs into [training]"),
        ("[parallelism]\ntp = 8", "nearest: tensor_model_parallel_size"),
        ("[parallelism]\npp = 8", "there is one pipeline stage"),
        ("[optimizer.learning_rate_scheduler]\nlearning_rate = 1.0", "nearest: lr"),
        ("[optimizer.learning_rate_scheduler]\nmin_decay_lr = 1.0", "nearest: min_lr"),
        ("[model.model_config]\nnum_hidden_layers = 8", "nearest: num_layers"),
        ("[model.model_config]\nintermediate_size = 8", "nearest: ffn_hidden_size"),
        ("[model.init_method]\nstd = 0.02", "nearest: init_method_std"),
        ("[checkpoints]\ncheckpoint_interval = 8", "nearest: save_interval"),
        ("[nowhere]\nlocal-batch-size = 8", "nearest: micro_batch_size"),
    ],
)
def test_a_neighbours_key_names_the_nearest_setting(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(text)
    (fault,) = read_config(tmp_path / "run.toml").faults
    assert said in fault


@pytest.mark.parametrize(
    ("flag", "nearest"),
    [
        ("--per_device_train_batch_size", "--micro-batch-size"),
        ("--max-steps", "--train-iters"),
        ("--local-batch-size", "--micro-batch-size"),
        ("--training.steps", "--train-iters"),
    ],
)
def test_so_does_a_neighbours_flag(flag: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=rf"{flag} is not a flag of this program \(nearest: {nearest}\)"):
        parse_arguments([flag, "8"])
