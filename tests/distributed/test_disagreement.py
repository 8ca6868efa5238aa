"""Ranks that differ in what must be the same are told so, all in one form, before they train or wait for each other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from domino_lm.config.per_rank import MAY_DIFFER
from domino_lm.config.schema import settings
from domino_lm.config.settings import ConfigError
from domino_lm.data.indexed import IndexedDatasetWriter
from domino_lm.data.rank_facts import BLOCK_BYTES, sampled_hash
from domino_lm.launch.rank_facts import setting_facts, source_facts, sources_hash
from domino_lm.parallel.agreement import Alike, DisagreementError, require_agreement
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.parallel.rendezvous import Rendezvous
from domino_lm.pretrain import build_trainer
from tests.distributed.training_runs import REPOSITORY, TINY, configure, write_tokens
from tests.rank_pool import RankPool

Ranks = Callable[[int], RankPool]
RANKS = 4


def messages(*kinds_of_rank: list[Alike]) -> list[str]:
    """What each rank is told when they compare ``kinds_of_rank`` through one store."""
    store = dist.HashStore()

    def compare(rank: int) -> str:
        met = Rendezvous(store, rank, len(kinds_of_rank), timedelta(seconds=20))
        try:
            require_agreement(met.all_gather_text, kinds_of_rank[rank])
        except DisagreementError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(kinds_of_rank)) as pool:
        return list(pool.map(compare, range(len(kinds_of_rank))))


def settings_of(flags: str) -> list[Alike]:
    return [Alike(setting_facts(configure(Path("tokens"), flags)), "start every rank with the same flags")]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--lr 0.5", "--lr: 0.01 on ranks 0-1, 3, 0.5 on rank 2"),
        ("--weight-decay 0.2", "--weight-decay: 0.01 on ranks 0-1, 3, 0.2 on rank 2"),
        ("--eval-interval 7", "--eval-interval: 4 on ranks 0-1, 3, 7 on rank 2"),
        ("--load there", "--load: not given on ranks 0-1, 3, there on rank 2"),
        ("--save there", "--save: not given on ranks 0-1, 3, there on rank 2"),
        ("--save-interval 3", "--save-interval: not given on ranks 0-1, 3, 3 on rank 2"),
        ("--seed 9", "--seed: 1234 on ranks 0-1, 3, 9 on rank 2"),
        ("--bf16", "--bf16: off on ranks 0-1, 3, on on rank 2"),
        ("--tensor-model-parallel-size 2", "--tensor-model-parallel-size: 1 on ranks 0-1, 3, 2 on rank 2"),
        ("--distributed-backend nccl", "--distributed-backend: not given on ranks 0-1, 3, nccl on rank 2"),
    ],
)
def test_another_setting_on_one_rank_is_said_on_all(flags: str, said: str) -> None:
    same = settings_of("")
    expected = f"the ranks disagree on {said}; start every rank with the same flags."
    assert messages(same, same, settings_of(flags), same) == [expected] * RANKS


@pytest.mark.parametrize("name", MAY_DIFFER)
def test_a_setting_that_may_differ_is_one_and_is_not_compared(name: str) -> None:
    (setting,) = [item for item in settings() if item.name == name]
    value = {int: "3", float: "3", bool: ""}.get(setting.kind, "there")
    assert messages(settings_of(""), settings_of(f"{setting.flag} {value}")) == ["", ""]


def test_several_differences_are_one_message_with_a_line_each() -> None:
    other = [*settings_of("--lr 0.5 --seed 9"), Alike({"PyTorch": "2.13"}, "install the same version on all nodes")]
    (text, same) = messages([*settings_of(""), Alike({"PyTorch": "2.12"}, "install the same version on all nodes")], other)
    assert text == same
    assert text.splitlines() == [
        "the ranks disagree on:",
        "  - --lr: 0.01 on rank 0, 0.5 on rank 1; start every rank with the same flags.",
        "  - --seed: 1234 on rank 0, 9 on rank 1; start every rank with the same flags.",
        "  - PyTorch: 2.12 on rank 0, 2.13 on rank 1; install the same version on all nodes.",
    ]


def test_long_values_are_shown_where_they_differ() -> None:
    long = [Alike({"--data-path": " ".join(["/a/long/prefix"] * 40) + end}, "do") for end in (" first", " second")]
    text = messages([long[0]], [long[1]])[0]
    assert " first on rank 0, ..." in text
    assert " second on rank 1; do." in text
    assert len(text) < 250


def a_package(folder: Path, epsilon: str) -> Path:
    package = folder / "domino_lm"
    package.mkdir(parents=True)
    (package / "optimizer.py").write_text(f"EPSILON = {epsilon}\n")
    (package / "table.toml").write_text("")
    return package


def test_one_changed_source_file_is_named(tmp_path: Path) -> None:
    facts = [source_facts(package=a_package(tmp_path / end, end)) for end in ("1e-8", "1e-6")]
    text = messages(*[[Alike(each, "put the same program on all nodes")] for each in facts])[0]
    assert re.fullmatch(
        r"the ranks disagree on the source domino_lm/optimizer.py: \w{12} on rank 0, \w{12} on rank 1; put the same .*", text
    )
    assert sources_hash(facts[0]) != sources_hash(facts[1])  # which is what preflight compares


def test_the_sources_of_a_model_of_ones_own_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_model.py").write_text("import own_parts, json\n")
    (tmp_path / "own_parts.py").write_text("")
    (tmp_path / "unrelated.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    __import__("own_model")
    named = source_facts("own_model:Model").keys() - source_facts().keys()
    assert named == {"the source own_model.py of --model", "the source own_parts.py of --model"}


def test_blocks_all_over_a_large_file_are_hashed(tmp_path: Path) -> None:
    blocks = 8
    path, size = tmp_path / "tokens.bin", 3 * blocks * BLOCK_BYTES
    path.write_bytes(bytes(range(1, 251)) * (size // 250) + bytes(size % 250))
    hashes = {sampled_hash(path, size, blocks)}
    for begin, end in ((size // 2, size), (0, size // 8), (size * 7 // 8, size)):  # as copies that broke off leave them
        with (tmp_path / "other.bin").open("wb") as file:
            file.write(path.read_bytes()[:begin] + bytes(end - begin) + path.read_bytes()[end:])
        hashes.add(sampled_hash(tmp_path / "other.bin", size, blocks))
    assert len(hashes) == 4


def built_with_own_data(mesh: ParallelMesh, folders: list[Path], flags: str) -> str:
    """What this rank is told if it finds its own files where the flags look for them, as on a node of its own."""
    os.chdir(folders[mesh.world.rank])
    try:
        build_trainer(configure(Path("tokens"), f"{flags} --tensor-model-parallel-size {mesh.tp.size}"), mesh)
    except ConfigError as error:
        return str(error)
    finally:
        os.chdir("/")
    return ""


@pytest.mark.parametrize("kind", ["none", "half of the tokens are zeros", "another index"])
def test_other_data_on_one_rank_is_said_by_file(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        write_tokens(folder)
    path = folders[1] / "tokens.bin"
    if kind == "half of the tokens are zeros":
        half = path.stat().st_size // 2
        path.write_bytes(path.read_bytes()[:half] + bytes(path.stat().st_size - half))
    elif kind == "another index":
        with IndexedDatasetWriter(folders[1] / "tokens", "<u2") as writer:
            for _ in range(100):
                writer.add_document(range(17))
    told = ranks(2).run(built_with_own_data, folders, "")
    if kind == "none":
        assert told == ["", ""]
        return
    assert told[0] == told[1]
    assert re.search(
        r"tokens.bin: [\d,]+ bytes with hash \w{12} on rank 0, [\d,]+ bytes with hash \w{12} on rank 1; copy the same", told[0]
    )
    assert ("tokens.idx" in told[0]) == (kind == "another index")
    assert "samples" not in told[0]  # which would be a consequence


def refused_settings(mesh: ParallelMesh, tokens: Path) -> str:
    """What this rank is told if what it found when it built (an activation in a checkpoint, say) is not what the others found."""
    flags = "--openai-gelu" if mesh.world.rank else ""
    try:
        build_trainer(configure(tokens, f"{flags} --tensor-model-parallel-size {mesh.tp.size}"), mesh)
    except ConfigError as error:
        return str(error)
    return ""


def test_settings_that_follow_from_files_are_compared_before_the_model_is_built(ranks: Ranks, tmp_path: Path) -> None:
    told = ranks(2).run(refused_settings, write_tokens(tmp_path))
    assert (
        told
        == ["the ranks disagree on --openai-gelu: off on rank 0, on on rank 1; name a --load that is the same folder on all nodes."] * 2
    )


OWN_FLAGS = """
import os, sys
from domino_lm.pretrain import main
own = {OWN!r} if os.environ["RANK"] == {RANK!r} else ""
sys.exit(main([*sys.argv[1:], *own.split()]))
"""


def run_with_own_flags(tokens: Path, folder: Path, own: str, rank: str) -> tuple[int, str]:
    """Exit code and output of the real program on two ranks, of which one has flags of its ``own``."""
    script = folder / "program.py"
    script.write_text(OWN_FLAGS.replace("{OWN!r}", repr(own)).replace("{RANK!r}", repr(rank)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environment: dict[str, Any] = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    command += f"{TINY} --tensor-model-parallel-size 2 --data-path {tokens}".split()
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("own", "rank", "said"),
    [
        ("--lr 0.5", "1", "error: the ranks disagree on --lr: 0.01 on rank 0, 0.5 on rank 1;"),
        ("--save there", "0", "error: the ranks disagree on --save: there on rank 0, not given on rank 1;"),
        ("--tensor-model-parallel-size 1", "1", "error: the ranks disagree on --tensor-model-parallel-size: 2 on rank 0, 1 on rank 1;"),
        ("--micro-batch-size 3", "1", "error: rank 1: --global-batch-size 8 is not a multiple of --micro-batch-size 3"),
    ],
)
def test_the_program_ends_with_one_message(tmp_path: Path, own: str, rank: str, said: str) -> None:
    code, text = run_with_own_flags(write_tokens(tmp_path), tmp_path, own, rank)
    assert code != 0
    assert text.count(said) == 1
    assert text.count("error: ") == 1
    assert "domino_lm/pretrain.py" not in text  # no traceback of ours
