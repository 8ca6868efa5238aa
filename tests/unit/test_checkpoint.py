"""Checkpoints of one process: to the bit, readable by torch alone, atomic, and refused with a reason when damaged or foreign."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from domino_lm.checkpoint import manifest, save_load
from domino_lm.checkpoint.blocks import Block, blocks_of
from domino_lm.checkpoint.folder import find_checkpoint, iteration_folder
from domino_lm.checkpoint.index import CheckpointError, read_metadata
from domino_lm.checkpoint.save_load import load_checkpoint, save_checkpoint
from domino_lm.checkpoint.writing import write_blocks
from domino_lm.config.settings import ModelConfig, OptimizerConfig
from domino_lm.model.build import build_stack
from domino_lm.model.stack import Stack
from domino_lm.parallel.collectives import Communicator
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.training.optimizer import Optimizer
from tests.damage import (
    DAMAGES,
    cut,
    fill_with_zeros,
    flip_bit,
    make_older,
    put_folder,
    put_link_to_itself,
    put_pipe,
    reseal,
    swap_with_sibling,
)
from tests.distributed.models import GPT, LLAMA
from tests.full_disk import files_of_at_most

ALONE = Communicator.single()
MESH = ParallelMesh(ALONE, ALONE, ALONE, torch.device("cpu"))
STATE = {"consumed_samples": 160, "learning_rate": {"samples": 160, "style": "linear"}}
DATA_FILE = "__0_0.distcp"
TRACKER = "latest_checkpointed_iteration.txt"


class Run:
    """A model and its optimizer after some steps on random gradients."""

    def __init__(self, model: ModelConfig = GPT, seed: int = 1, steps: int = 2) -> None:
        self.stack: Stack = build_stack(model, ALONE, seed)
        self.optimizer = Optimizer(self.stack.parameters(), OptimizerConfig(lr=0.01), ALONE)
        for step in range(steps):
            self.step(step)

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for parameter in self.stack.parameters():
            parameter.main_grad = torch.randn(parameter.shape, generator=generator)
        self.optimizer.step(0.01)

    def save(self, folder: Path, iteration: int = 20) -> Path:
        return save_checkpoint(folder, iteration, self.stack, self.optimizer, STATE, MESH)

    def load(self, folder: Path, optimizer: bool = True) -> dict[str, Any] | None:
        return load_checkpoint(folder, self.stack, self.optimizer if optimizer else None, MESH)

    def bits(self) -> list[bytes]:
        tensors = (*self.stack.parameters(), *self.optimizer.exp_avg, *self.optimizer.exp_avg_sq)
        return [tensor.detach().numpy().tobytes() for tensor in tensors]


def change_record(path: Path, changes: dict[str, Any], state: dict[str, Any] | None = None) -> None:
    """Another ``state.json`` of the checkpoint in ``path``."""
    record = json.loads((path / "state.json").read_text())
    record["state"] |= state or {}
    (path / "state.json").write_text(json.dumps({**record, **changes}))


def rewrite_tensors(path: Path, blocks: list[Block]) -> None:
    """Other tensors beside the same state."""
    (path / DATA_FILE).unlink()
    (path / ".metadata").unlink()
    write_blocks(path, blocks, ALONE)
    reseal(path)


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_loading_gives_back_weights_and_moments_to_the_bit(tmp_path: Path, model: ModelConfig) -> None:
    saved, loaded = Run(model), Run(model, seed=2, steps=0)
    saved.save(tmp_path)
    loaded.load(tmp_path)
    assert loaded.bits() == saved.bits()


def test_loading_gives_back_state_and_iteration(tmp_path: Path) -> None:
    Run().save(tmp_path)
    assert Run().load(tmp_path) == {**STATE, "iteration": 20}


def test_steps_after_resuming_equal_the_uninterrupted_ones_to_the_bit(tmp_path: Path) -> None:
    uninterrupted, resumed = Run(), Run(seed=2, steps=0)
    uninterrupted.save(tmp_path)
    resumed.load(tmp_path)
    for run in (uninterrupted, resumed):
        run.step(7)
        run.step(8)
    assert resumed.bits() == uninterrupted.bits()


def test_loading_weights_alone_leaves_the_optimizer_as_it_was(tmp_path: Path) -> None:
    Run().save(tmp_path)
    run = Run(seed=2, steps=0)
    run.load(tmp_path, optimizer=False)
    assert run.optimizer.step_count == 0
    assert not any(moment.any() for moment in run.optimizer.exp_avg)


def test_a_tied_matrix_is_stored_once(tmp_path: Path) -> None:
    assert "output_layer.weight" not in read_metadata(Run().save(tmp_path)).state_dict_metadata


def test_torch_alone_reads_a_checkpoint(tmp_path: Path) -> None:
    run = Run()
    stacked = [p for p in run.stack.parameters() if p.spec.key == "decoder.layers.mlp.linear_fc1.weight"]
    found = {"decoder.layers.mlp.linear_fc1.weight": torch.zeros(len(stacked), *stacked[0].shape)}
    path = run.save(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(found, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    assert torch.equal(found["decoder.layers.mlp.linear_fc1.weight"], torch.stack([p.detach() for p in stacked]))


def test_a_checkpoint_says_what_megatron_looks_for(tmp_path: Path) -> None:
    path = Run().save(tmp_path)
    assert json.loads((path / "metadata.json").read_text()) == {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    assert (tmp_path / TRACKER).read_text() == "20"


def test_saving_an_iteration_again_replaces_it(tmp_path: Path) -> None:
    Run(seed=5).save(tmp_path)
    again, loaded = Run(), Run(seed=2)
    again.save(tmp_path)
    loaded.load(tmp_path)
    assert loaded.bits() == again.bits()
    assert sorted(os.listdir(tmp_path)) == ["iter_0000020", TRACKER]


# --- nothing in a checkpoint is run


class Hostile:
    """Unpickled by plain pickle, it calls what it was made with."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call


@pytest.mark.parametrize("function", [os.mkdir, eval, getattr, __import__], ids=lambda f: f.__name__)
def test_a_hostile_index_is_refused_and_not_run(tmp_path: Path, function: Any) -> None:
    path, trap = Run().save(tmp_path), tmp_path / "trap"
    arguments = {
        os.mkdir: (str(trap),),
        eval: (f"__import__('os').mkdir({str(trap)!r})",),
        getattr: ("text", "upper"),
        __import__: ("os",),
    }[function]
    (path / ".metadata").write_bytes(pickle.dumps(Hostile(function, *arguments)))
    reseal(path)
    with pytest.raises(CheckpointError, match="which no checkpoint index holds"):
        load_checkpoint(tmp_path, Run().stack, None, MESH, iteration=20)
    assert not trap.exists()


def test_an_index_cannot_change_the_classes_that_it_names(tmp_path: Path) -> None:
    path = Run().save(tmp_path)
    # The class itself as the object whose state is set: {"fqn": 1} would become attributes of it.
    (path / ".metadata").write_bytes(b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n(N}S'fqn'\nI1\nstb.")
    reseal(path)
    with pytest.raises(CheckpointError):
        load_checkpoint(tmp_path, Run().stack, None, MESH, iteration=20)
    assert not hasattr(dcp.metadata.MetadataIndex, "fqn")


def test_an_index_cannot_point_outside_its_folder(tmp_path: Path) -> None:
    path = Run().save(tmp_path)
    index = pickle.loads((path / ".metadata").read_bytes())
    for place in index.storage_data.values():
        place.relative_path = "../secret.distcp"
    (path / ".metadata").write_bytes(pickle.dumps(index))
    reseal(path)
    with pytest.raises(CheckpointError, match="outside the checkpoint's folder"):
        load_checkpoint(tmp_path, Run().stack, None, MESH, iteration=20)


def test_a_hostile_data_file_is_refused_and_not_run(tmp_path: Path) -> None:
    path, trap = Run().save(tmp_path), tmp_path / "trap"
    size = (path / DATA_FILE).stat().st_size
    (path / DATA_FILE).write_bytes(pickle.dumps(Hostile(os.mkdir, str(trap))).ljust(size, b"\0"))
    reseal(path)
    with pytest.raises(CheckpointError, match=f"cannot be read from {DATA_FILE}"):
        Run().load(tmp_path)
    assert not trap.exists()


# --- a checkpoint that does not fit


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 64}, r"position_embeddings.weight: the run needs \[20, 64\], the checkpoint holds \[20, 32\]"),
        ({"num_layers": 3}, r"the run needs \[3, .*, the checkpoint holds \[2, "),
        ({"untie_embeddings_and_output_weights": True}, "output_layer.weight: .* the checkpoint has no such tensor"),
        ({"add_bias_linear": False}, "linear_.*bias: the checkpoint holds it, the run has no such tensor"),
        ({"vocab_size": 96}, "saved with a vocabulary of 97 tokens, this run has 96"),
        ({"vocab_size": 200}, "with 200 true vocabulary rows, the checkpoint holds"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_model_is_refused_with_both_shapes(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    Run().save(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        Run(replace(GPT, **changes)).load(tmp_path)


def test_a_refused_checkpoint_has_changed_no_value(tmp_path: Path) -> None:
    Run().save(tmp_path)
    run = Run(replace(GPT, add_bias_linear=False), seed=2)
    before = run.bits()
    with pytest.raises(CheckpointError):
        run.load(tmp_path)
    assert run.bits() == before


def test_an_untied_head_is_not_dropped_silently(tmp_path: Path) -> None:
    Run(replace(GPT, untie_embeddings_and_output_weights=True)).save(tmp_path)
    with pytest.raises(CheckpointError, match=r"output_layer\.weight: the checkpoint holds it"):
        Run().load(tmp_path)


def test_weights_without_optimizer_state_name_the_flag(tmp_path: Path) -> None:
    run = Run()
    path = run.save(tmp_path)
    rewrite_tensors(path, [block for p in run.stack.parameters() for block in blocks_of(p.spec, p, ALONE)])
    with pytest.raises(CheckpointError, match="--no-load-optim"):
        run.load(tmp_path)


def test_optimizer_state_of_other_shapes_names_the_way_out(tmp_path: Path) -> None:
    run = Run()
    path = run.save(tmp_path)
    weights = [block for p in run.stack.parameters() for block in blocks_of(p.spec, p, ALONE)]
    flat = [
        Block(f"optimizer.state.exp_avg.{p.spec.name}", (p.numel(),), (0,), p.detach().flatten(), sharded=False)
        for p in run.stack.parameters()
    ]
    rewrite_tensors(path, weights + flat)
    with pytest.raises(
        CheckpointError, match=r"of other shapes than its weights .*--dist-ckpt-optim-fully-reshardable, or pass --no-load-opt"
    ):
        run.load(tmp_path)
    run.load(tmp_path, optimizer=False)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = Run().save(tmp_path)
    change_record(path, {"format_version": 99})
    reseal(path)
    with pytest.raises(CheckpointError, match="format version 99"):
        Run().load(tmp_path)


# --- damage, and what is resumed from

FILES = [DATA_FILE, ".metadata", "state.json", "domino_manifest.json", "common.pt", "metadata.json"]


@pytest.fixture(scope="module")
def two_saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[bytes]]:
    """A folder with iterations 20 and 40, and the bits of 20."""
    folder, run = tmp_path_factory.mktemp("two"), Run()
    run.save(folder, 20)
    before = run.bits()
    run.step(7)
    run.step(8)
    run.save(folder, 40)
    return folder, before


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_to_any_file_is_named_and_the_checkpoint_before_is_taken(
    tmp_path: Path, two_saved: tuple[Path, list[bytes]], damage: Any, file: str
) -> None:
    shutil.copytree(two_saved[0], tmp_path, dirs_exist_ok=True)
    if damage is swap_with_sibling and file in (".metadata", "metadata.json"):
        pytest.skip("that of both is the same")
    damage(tmp_path / "iter_0000040" / file)
    run = Run(seed=2, steps=0)
    with pytest.warns(
        UserWarning, match=rf"names iteration 40, but .*{re.escape(file)}.*Taking iteration 20, the newest whole one"
    ) as said:
        state = run.load(tmp_path)
    assert state is not None
    assert state["iteration"] == 20
    assert run.bits() == two_saved[1]
    assert len(said) == 1


@pytest.mark.parametrize("file", FILES)
def test_damage_to_the_only_checkpoint_is_an_error_that_names_the_file(
    tmp_path: Path, two_saved: tuple[Path, list[bytes]], file: str
) -> None:
    shutil.copytree(two_saved[0], tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "iter_0000020")
    fill_with_zeros(tmp_path / "iter_0000040" / file)
    for iteration in (None, 40):
        with pytest.raises(CheckpointError, match=re.escape(file)):
            load_checkpoint(tmp_path, Run(steps=0).stack, None, MESH, iteration)


def test_damage_to_what_is_asked_for_by_number_is_refused(tmp_path: Path, two_saved: tuple[Path, list[bytes]]) -> None:
    shutil.copytree(two_saved[0], tmp_path, dirs_exist_ok=True)
    flip_bit(tmp_path / "iter_0000040" / DATA_FILE)
    run = Run(steps=0)
    with pytest.raises(CheckpointError, match=rf"{DATA_FILE} is damaged: bytes 0 to [0-9]+ are not those that were written"):
        load_checkpoint(tmp_path, run.stack, run.optimizer, MESH, iteration=40)


def test_several_damaged_checkpoints_are_named_in_one_line(tmp_path: Path) -> None:
    run = Run()
    for iteration in (20, 40, 60):
        run.save(tmp_path, iteration)
    flip_bit(tmp_path / "iter_0000060" / DATA_FILE)
    cut(tmp_path / "iter_0000040" / ".metadata")
    with pytest.warns(UserWarning, match=r"iteration 60, but .*; iter_0000040 is not complete.*Taking iteration 20") as said:
        run.load(tmp_path)
    assert len(said) == 1


def test_a_missing_folder_falls_back(tmp_path: Path, two_saved: tuple[Path, list[bytes]]) -> None:
    shutil.copytree(two_saved[0], tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "iter_0000040")
    with pytest.warns(UserWarning, match="iter_0000040 does not exist"):
        assert find_checkpoint(tmp_path) == iteration_folder(tmp_path, 20)


def test_a_checkpoint_under_the_number_of_another_is_not_taken(tmp_path: Path, two_saved: tuple[Path, list[bytes]]) -> None:
    shutil.copytree(two_saved[0], tmp_path, dirs_exist_ok=True)
    shutil.copytree(tmp_path / "iter_0000020", tmp_path / "iter_0000040", dirs_exist_ok=True)
    with pytest.warns(UserWarning, match="it is that of iteration 20"):
        assert find_checkpoint(tmp_path) == iteration_folder(tmp_path, 20)


def test_a_newer_checkpoint_than_the_damaged_one_is_not_taken_in_its_place(tmp_path: Path) -> None:
    run = Run()
    for iteration in (20, 40, 60):
        run.save(tmp_path, iteration)
    (tmp_path / TRACKER).write_text("40")
    cut(tmp_path / "iter_0000040" / DATA_FILE)
    with pytest.warns(UserWarning, match="Taking iteration 20"):
        assert find_checkpoint(tmp_path) == iteration_folder(tmp_path, 20)


def test_sizes_alone_are_compared_on_request(tmp_path: Path) -> None:
    run = Run()
    path = run.save(tmp_path)
    flip_bit(path / DATA_FILE, 2000)
    assert load_checkpoint(tmp_path, run.stack, run.optimizer, MESH, verify=False)
    cut(path / "common.pt")
    with pytest.raises(CheckpointError, match=r"common\.pt: [0-9]+ bytes, the manifest says"):
        load_checkpoint(tmp_path, run.stack, run.optimizer, MESH, verify=False)


def test_an_older_checkpoint_loads_and_says_that_it_cannot_be_verified(tmp_path: Path) -> None:
    saved, loaded = Run(), Run(seed=2, steps=0)
    path = saved.save(tmp_path)
    make_older(path)
    with pytest.warns(UserWarning, match="no manifest") as said:
        loaded.load(tmp_path)
    assert loaded.bits() == saved.bits()
    assert len(said) == 1


def test_blocks_are_hashed_apart_and_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "BLOCK_BYTES", 1000)
    saved, loaded = Run(), Run(seed=2, steps=0)
    path = saved.save(tmp_path)
    record = manifest.Manifest.read(path)
    assert record is not None
    assert len(record.files[DATA_FILE].blocks) == -(-(path / DATA_FILE).stat().st_size // 1000)
    loaded.load(tmp_path)
    assert loaded.bits() == saved.bits()
    flip_bit(path / DATA_FILE, 4321)
    with pytest.raises(CheckpointError, match="bytes 4000 to 5000 are not those"):
        loaded.load(tmp_path)


def test_a_rank_reads_what_it_loads_and_each_block_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "BLOCK_BYTES", 4096)
    path = Run().save(tmp_path)
    read: list[int] = []
    fill = manifest.StoredFiles._fill

    def counted(files: manifest.StoredFiles, file: Any, number: int) -> None:
        read.extend([number] * (files._name == DATA_FILE))
        fill(files, file, number)

    monkeypatch.setattr(manifest.StoredFiles, "_fill", counted)
    Run().load(tmp_path, optimizer=False)
    assert len(read) < 1.2 * (path / DATA_FILE).stat().st_size / 4096 / 3


def test_what_lies_behind_the_end_of_a_file_is_never_given_out(tmp_path: Path, two_saved: tuple[Path, list[bytes]]) -> None:
    path = shutil.copytree(two_saved[0] / "iter_0000020", tmp_path / "iter_0000020")
    for verify in (True, False):
        files = manifest.StoredFiles(path, verify)
        files.part(DATA_FILE, 0, 100_000)
        with pytest.raises(CheckpointError, match=r"state\.json ends before byte 100000"):
            files.part("state.json", 0, 100_000)


# --- state.json is foreign input

WRONG_RECORDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"iteration": -20}, {}),
    ({"iteration": 40}, {}),
    ({"iteration": "20"}, {}),
    ({"iteration": True}, {}),
    ({"iteration": 10**400}, {}),
    ({"optimizer_steps": -1}, {}),
    ({"optimizer_steps": 2.5}, {}),
    ({"optimizer_steps": None}, {}),
    ({"vocab_size": "97"}, {}),
    ({"softmax_rows": []}, {}),
    ({"state": []}, {}),
    ({"unheard_of": 1}, {}),
    ({}, {"consumed_samples": -160}),
    ({}, {"consumed_samples": "160"}),
    ({}, {"consumed_samples": float("nan")}),
    ({}, {"learning_rate": []}),
    ({}, {"learning_rate": {"samples": "160", "style": "linear"}}),
    ({}, {"learning_rate": {"style": "linear"}}),
    ({}, {"loss_scaler": {"scale": "2"}}),
    ({}, {"data": {"sequence_length": 16}}),
    ({}, {"data": {"sequence_length": 16, "begin": 0, "weights": {}, "sources": [], "retired": []}}),
    ({}, {"data": {"sequence_length": 16, "begin": 0, "weights": [1.0], "sources": [[]], "retired": []}}),
    ({}, {"model": {"num_layers": {}}}),
    ({}, {"model": [2]}),
]


@pytest.mark.parametrize(("changes", "state"), WRONG_RECORDS, ids=str)
def test_a_state_that_cannot_be_is_refused(
    tmp_path: Path, two_saved: tuple[Path, list[bytes]], changes: dict[str, Any], state: dict[str, Any]
) -> None:
    path = shutil.copytree(two_saved[0] / "iter_0000020", tmp_path / "iter_0000020")
    change_record(path, changes, state)
    reseal(path)
    with pytest.raises(CheckpointError, match=r"state\.json: not the state of this checkpoint"):
        find_checkpoint(tmp_path)
    make_older(path)
    with pytest.raises(CheckpointError, match=r"state\.json: not the state of this checkpoint"):
        load_checkpoint(tmp_path, Run(steps=0).stack, None, MESH, 20)


@pytest.mark.parametrize("text", ["", "null", "[]", "7", "{", "[" * 100_000, "9" * 5000, "\0" * 200], ids=lambda text: text[:9])
def test_a_state_that_is_no_record_is_refused(tmp_path: Path, two_saved: tuple[Path, list[bytes]], text: str) -> None:
    path = shutil.copytree(two_saved[0] / "iter_0000020", tmp_path / "iter_0000020")
    make_older(path)
    (path / "state.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"state\.json: not the state of this checkpoint"):
        find_checkpoint(tmp_path)


def test_a_jump_in_the_samples_is_found_by_the_manifest(tmp_path: Path, two_saved: tuple[Path, list[bytes]]) -> None:
    shutil.copytree(two_saved[0], tmp_path, dirs_exist_ok=True)
    change_record(tmp_path / "iter_0000040", {}, {"consumed_samples": 640})
    with pytest.warns(UserWarning, match=r"state\.json.*Taking iteration 20"):
        assert find_checkpoint(tmp_path) == iteration_folder(tmp_path, 20)


# --- values that are not finite


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path, value: float) -> None:
    run = Run()
    with torch.no_grad():
        run.stack.parameters()[3].view(-1)[5] = value
    run.save(tmp_path)
    with pytest.raises(CheckpointError, match=rf"{re.escape(run.stack.parameters()[3].spec.name)} holds 1 value"):
        Run().load(tmp_path)


def test_moments_that_are_not_finite_are_refused_unless_they_stay_behind(tmp_path: Path) -> None:
    run = Run()
    run.optimizer.exp_avg_sq[0].view(-1)[5] = float("inf")
    run.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"exp_avg_sq\.embedding\.word_embeddings\.weight holds 1 value"):
        Run().load(tmp_path)
    assert Run().load(tmp_path, optimizer=False)


def test_finite_values_with_an_infinite_sum_are_taken(tmp_path: Path) -> None:
    run = Run()
    with torch.no_grad():
        run.stack.parameters()[0].fill_(3e38)
    run.save(tmp_path)
    assert Run().load(tmp_path)


# --- the tracker


@pytest.mark.parametrize("tracker", ["", "twenty", "release", "99", "-20", "9" * 400, "9" * 5000, "\0" * 8, "\xff"])
def test_a_wrong_tracker_falls_back_on_the_newest_complete_checkpoint(
    tmp_path: Path, two_saved: tuple[Path, list[bytes]], tracker: str
) -> None:
    shutil.copytree(two_saved[0], tmp_path, dirs_exist_ok=True)
    (tmp_path / TRACKER).write_text(tracker)
    with pytest.warns(UserWarning, match="Taking iteration 40"):
        assert find_checkpoint(tmp_path) == iteration_folder(tmp_path, 40)


@pytest.mark.parametrize("damage", [put_folder, put_pipe, put_link_to_itself], ids=lambda damage: damage.__name__)
def test_a_tracker_that_is_no_file_falls_back_and_does_not_hang(tmp_path: Path, two_saved: tuple[Path, list[bytes]], damage: Any) -> None:
    shutil.copytree(two_saved[0], tmp_path, dirs_exist_ok=True)
    damage(tmp_path / TRACKER)
    with pytest.warns(UserWarning, match="cannot be read .*Taking iteration 40"):
        assert find_checkpoint(tmp_path) == iteration_folder(tmp_path, 40)


def test_the_tracker_may_name_an_older_checkpoint(tmp_path: Path) -> None:
    run = Run()
    run.save(tmp_path, 20)
    run.save(tmp_path, 40)
    (tmp_path / TRACKER).write_text("20\n")
    assert find_checkpoint(tmp_path) == iteration_folder(tmp_path, 20)


def test_an_interrupted_save_is_not_resumed_from(tmp_path: Path) -> None:
    path = Run().save(tmp_path)
    shutil.copytree(path, tmp_path / "iter_0000040.tmp-0123abcd")
    assert find_checkpoint(tmp_path) == iteration_folder(tmp_path, 20)


@pytest.mark.parametrize("folder", ["missing", "."], ids=["missing", "empty"])
def test_no_checkpoint_at_all_is_none(tmp_path: Path, folder: str) -> None:
    assert Run(steps=0).load(tmp_path / folder) is None


# --- saves that fail


@pytest.mark.parametrize("size_bytes", [0, 10_000])
def test_a_full_disk_leaves_the_old_checkpoint_and_nothing_else(tmp_path: Path, size_bytes: int) -> None:
    run = Run()
    run.save(tmp_path)
    with files_of_at_most(size_bytes), pytest.raises(CheckpointError, match=r"File too large.*Make room"):
        run.save(tmp_path, 40)
    assert sorted(os.listdir(tmp_path)) == ["iter_0000020", TRACKER]
    assert find_checkpoint(tmp_path) == iteration_folder(tmp_path, 20)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "save").write_text("a file")
    with pytest.raises(CheckpointError, match=r"save/iter_0000020.*Not a directory"):
        Run().save(tmp_path / "save")


def test_a_save_that_dies_before_the_tracker_moves_leaves_it_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    run.save(tmp_path)

    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(save_load.os, "replace", fail)
    with pytest.raises(CheckpointError, match="Input/output error"):
        run.save(tmp_path, 40)
    assert find_checkpoint(tmp_path) == iteration_folder(tmp_path, 20)


def test_a_state_that_json_cannot_hold_fails_before_any_file_exists(tmp_path: Path) -> None:
    run = Run()
    with pytest.raises(TypeError):
        save_checkpoint(tmp_path / "save", 20, run.stack, run.optimizer, {"device": torch.device("cpu")}, MESH)
    assert not (tmp_path / "save").exists()
