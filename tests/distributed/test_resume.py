"""Going on from a checkpoint with other data, batches, layouts, learning rates and models, and what a run says of it."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

from domino_lm.config.arguments import parse_command
from domino_lm.config.settings import ConfigError
from domino_lm.data.indexed import IndexedDatasetWriter
from domino_lm.launch.checks import run_faults
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.pretrain import build_trainer, model_of_checkpoint
from domino_lm.training.trainer import Trainer
from tests.distributed.training_runs import TINY, VOCABULARY, built, configure, steps, write_tokens
from tests.rank_pool import RankPool

Ranks = Callable[[int], RankPool]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sources of 60, 80 and 40 documents of 17 tokens, a sample each; the first two tokens of a document are its own."""
    path = tmp_path_factory.mktemp("sources")
    for number, (name, documents) in enumerate({"a": 60, "b": 80, "c": 40}.items()):
        with IndexedDatasetWriter(path / name, numpy.uint16) as writer:
            for document in range(documents):
                writer.add_document(numpy.array([number, document, *([5] * 14)]))
    write_tokens(path)
    return path


class Seen:
    """Micro-batches of a trainer, and the source and document that each of their samples begins in."""

    def __init__(self, batches: Any) -> None:
        self.batches, self.blocked_s = batches, 0.0
        self.samples: list[tuple[int, ...]] = []

    def take(self, count: int) -> list[Any]:
        taken = self.batches.take(count)
        self.samples += [tuple(column) for batch in taken for column in batch.tokens.t().tolist()]
        return taken


def told(mesh: ParallelMesh, data: str, flags: str) -> tuple[Trainer, list[str]]:
    """A trainer, resumed where the flags say so, and the lines that the run prints until then."""
    line = f"{TINY} --split 1 --eval-interval 0 --data-path {data} {flags} --tensor-model-parallel-size {mesh.tp.size}"
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        trainer = build_trainer(parse_command(line.split()).run, mesh)
    trainer.console = lambda line: None
    return trainer, said.getvalue().splitlines()


def trained(mesh: ParallelMesh, data: str, flags: str) -> tuple[list[tuple[int, ...]], list[str]]:
    """Samples of this rank, and what the run says at its start, of a run that trains to its end and saves."""
    trainer, said = told(mesh, data, flags)
    seen: Any = Seen(trainer.training_batches())
    while not trainer._at_end() and trainer.iteration < (trainer.run.training.exit_interval or 10**9):
        trainer.step(seen)
    trainer.save()
    return seen.samples, said


def test_another_mixture_goes_on_in_each_source_by_itself_in_another_layout(ranks: Ranks, folder: Path, tmp_path: Path) -> None:
    first = ranks(4).run(trained, f"1 {folder}/a 1 {folder}/b", f"--save {tmp_path} --exit-interval 4", tp=2)
    flags = f"--save {tmp_path} --load {tmp_path} --global-batch-size 4 --train-iters 12 --override-opt-param-scheduler"
    second = ranks(2).run(trained, f"1 {folder}/a 2 {folder}/b 1 {folder}/c", flags, tp=1)
    before = [sample for samples, _ in (first[0], first[2]) for sample in samples]  # one rank of each replica
    after = [sample for samples, _ in second for sample in samples]
    assert (len(before), len(after)) == (32, 32)
    said = [line for line in second[0][1] if line.startswith("data: another mixture")]
    assert len(said) == 1
    assert f"{folder}/a at its sample 16" in said[0]
    assert f"{folder}/c, new, at its first sample" in said[0]
    kept = json.loads((tmp_path / "iter_0000012" / "state.json").read_text())["state"]["data"]
    assert [source["taken"] for source in kept["sources"]] == [24, 32, 8]
    assert len(set(before + after)) == 64  # no sample twice


def test_a_smaller_batch_finds_data_to_the_end_of_the_run(ranks: Ranks, folder: Path, tmp_path: Path) -> None:
    ranks(1).run(trained, f"{folder}/a", f"--save {tmp_path} --exit-interval 4 --train-iters 5")
    flags = f"--load {tmp_path} --global-batch-size 4 --train-iters 8 --override-opt-param-scheduler"
    ((samples, _),) = ranks(1).run(trained, f"{folder}/a", flags)
    assert len(samples) == 16


def test_an_unchanged_run_says_nothing_of_its_data(ranks: Ranks, folder: Path, tmp_path: Path) -> None:
    data = f"1 {folder}/a 1 {folder}/b"
    ranks(1).run(trained, data, f"--save {tmp_path} --exit-interval 4")
    ((_, said),) = ranks(1).run(trained, data, f"--load {tmp_path}")
    assert [line for line in said if line.startswith("data:")] == []
    assert any("learning rate: that of the checkpoint, which is what the flags say, 32 samples into it" in line for line in said)


@pytest.mark.parametrize(
    ("flag", "rate", "words"),
    [
        ("--use-checkpoint-opt_param-scheduler", 1e-2, "learning rate: the checkpoint's as a whole"),
        ("--override-opt_param-scheduler", 6e-5, "learning rate: this command line's as a whole"),
    ],
)
def test_the_learning_rate_comes_from_one_side_and_the_run_says_which(
    ranks: Ranks, folder: Path, tmp_path: Path, flag: str, rate: float, words: str
) -> None:
    ranks(1).run(trained, f"{folder}/a", f"--save {tmp_path} --exit-interval 4 --lr-decay-style constant")
    changed = f"--load {tmp_path} --lr 6e-5 --min-lr 0 --lr-decay-style constant --lr-warmup-iters 1 {flag}"
    ((found, said),) = ranks(1).run(rate_and_words, f"{folder}/a", changed)
    assert found == rate
    assert sum(line.startswith(words) for line in said) == 1


def rate_and_words(mesh: ParallelMesh, data: str, flags: str) -> tuple[float, list[str]]:
    trainer, said = told(mesh, data, flags)
    return trainer.lr_schedule.value(), said


def loaded(mesh: ParallelMesh, tokens: Path, flags: str) -> tuple[int, int]:
    """Iteration of the run, and steps that its optimizer has made."""
    trainer = built(mesh, tokens, flags)
    return trainer.iteration, trainer.optimizer.step_count


def saved_twice(mesh: ParallelMesh, tokens: Path, flags: str) -> None:
    trainer = built(mesh, tokens, flags)
    for _ in range(2):
        steps(trainer, 2)
        trainer.save()


def test_an_earlier_checkpoint_is_loaded_by_its_step(ranks: Ranks, folder: Path, tmp_path: Path) -> None:
    ranks(1).run(saved_twice, folder / "tokens", f"--save {tmp_path}")
    assert ranks(1).run(loaded, folder / "tokens", f"--load {tmp_path}") == [(4, 4)]
    assert ranks(1).run(loaded, folder / "tokens", f"--load {tmp_path} --ckpt-step 2") == [(2, 2)]
    (message,) = ranks(1).run(refusal, folder / "tokens", f"--load {tmp_path} --ckpt-step 3")
    assert "iter_0000003 does not exist" in message


def refusal(mesh: ParallelMesh, tokens: Path, flags: str) -> str:
    try:
        built(mesh, tokens, flags)
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_checkpoint_without_optimizer_is_smaller_and_says_how_it_loads(ranks: Ranks, folder: Path, tmp_path: Path) -> None:
    ranks(1).run(saved_twice, folder / "tokens", f"--save {tmp_path}/whole")
    ranks(1).run(saved_twice, folder / "tokens", f"--save {tmp_path}/weights --no-save-optim")
    sizes = [sum(file.stat().st_size for file in (tmp_path / name / "iter_0000004").glob("*.distcp")) for name in ("whole", "weights")]
    assert sizes[1] < 0.5 * sizes[0]
    (message,) = ranks(1).run(refusal, folder / "tokens", f"--load {tmp_path}/weights")
    assert "no optimizer state; pass --no-load-optim" in message
    assert ranks(1).run(loaded, folder / "tokens", f"--load {tmp_path}/weights --no-load-optim") == [(0, 0)]


BARE = "--lr 1e-2 --micro-batch-size 2 --train-iters 8 --mock-data"


def test_the_model_is_taken_from_the_checkpoint_when_asked_for(ranks: Ranks, folder: Path, tmp_path: Path) -> None:
    ranks(1).run(saved_twice, folder / "tokens", f"--save {tmp_path}")
    words = f"{BARE} --load {tmp_path} --use-checkpoint-args".split()
    command = parse_command(words, model_of_checkpoint)
    expected = configure(folder / "tokens").model
    assert (command.run.model.num_layers, command.run.model.hidden_size, command.run.model.vocab_size) == (2, 32, VOCABULARY)
    assert command.run.model.hidden_dropout == expected.hidden_dropout
    assert "num_layers 2" in command.from_checkpoint
    assert parse_command([*words, "--vocab-size", "500"], model_of_checkpoint).run.model.vocab_size == 500
    preset = parse_command([*words, "--preset", "debug-llama"], model_of_checkpoint).run.model
    assert (preset.num_layers, preset.hidden_size, preset.swiglu, preset.seq_length) == (2, 32, False, 16)


def test_what_flags_and_file_say_wins_beside_the_shape_of_the_checkpoints_model(ranks: Ranks, folder: Path, tmp_path: Path) -> None:
    ranks(1).run(saved_twice, folder / "tokens", f"--save {tmp_path}")
    words = f"{BARE} --load {tmp_path} --use-checkpoint-args".split()
    (tmp_path / "run.toml").write_text("[model]\nattention_dropout = 0.3\n")
    model = parse_command(
        [*words, "--seq-length", "8", "--hidden-dropout", "0.0", "--config", str(tmp_path / "run.toml")], model_of_checkpoint
    ).run.model
    assert (model.seq_length, model.hidden_dropout, model.attention_dropout, model.position_rows) == (8, 0.0, 0.3, 16)
    with pytest.raises(ConfigError, match=r"--seq-length 32 is longer than the position table of --max-position-embeddings 16"):
        parse_command([*words, "--seq-length", "32"], model_of_checkpoint, lambda run: run_faults(run, 1))
    with pytest.raises(ConfigError, match=r"another shape than asked for \(--num-layers 7, not 2, --swiglu True, not False\); leave these"):
        parse_command([*words, "--num-layers", "7", "--swiglu", "--kv-channels", "8"], model_of_checkpoint)
    same = ["--num-layers", "2", "--kv-channels", "8", "--ffn-hidden-size", "128"]  # as the checkpoint's resolve
    assert parse_command([*words, *same], model_of_checkpoint).run.model.num_layers == 2


def test_without_a_checkpoint_the_command_line_describes_the_model(tmp_path: Path) -> None:
    words = f"{BARE} --preset debug-gpt --vocab-size 90 --load {tmp_path} --use-checkpoint-args".split()
    assert parse_command(words, model_of_checkpoint).run.model.num_layers == 4
    with pytest.raises(ConfigError, match=r"--hidden-size.* no value given"):
        parse_command(f"{BARE} --load {tmp_path} --use-checkpoint-args".split(), model_of_checkpoint)
    with pytest.raises(ConfigError, match="give --load"):
        parse_command(f"{BARE} --use-checkpoint-args".split(), model_of_checkpoint)
