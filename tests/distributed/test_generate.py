"""`domino-lm-generate` and `domino-lm-eval` on checkpoints of every kind: transformers' likelihoods, the same at any layout, clear errors."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import types
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from domino_lm.checkpoint.convert.conversion import convert
from domino_lm.checkpoint.save_load import save_checkpoint
from domino_lm.data.indexed import IndexedDatasetWriter
from domino_lm.model.build import build_stack
from domino_lm.parallel.collectives import Communicator
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.tools import evaluate
from domino_lm.tools import generate as generate_tool
from domino_lm.tools.scoring import Piece, score
from domino_lm.tools.trained_model import TrainedModel, open_model, read_run
from tests.distributed.test_any_transformer import MODEL as PAGE_MODEL
from tests.distributed.test_any_transformer import save_page
from tests.distributed.training_runs import write_tokens
from tests.documents import ROOT, attempt, commands_for
from tests.golden.checkpoint_files import unpack
from tests.golden.make_hugging_face_models import FOLDER, MODELS
from tests.rank_pool import RankPool
from tests.unit.test_convert import saved
from tests.unit.test_convert_hugging_face import recorded

Ranks = Callable[[int], RankPool]
NUMBERS = "--tokenizer-type NullTokenizer"
CORPUS = ROOT / "examples/data"


def converted(name: str, folder: Path) -> str:
    """A native checkpoint of a model of Hugging Face's."""
    convert(load=FOLDER / name, save=folder, to="native")
    return str(folder)


def opened(mesh: ParallelMesh, flags: str) -> TrainedModel:
    own, rest = evaluate.flag_parser().parse_known_args(f"{flags} --tensor-model-parallel-size {mesh.tp.size}".split())
    return open_model(read_run(own, rest, mesh.world.size), mesh)


def scored(mesh: ParallelMesh, flags: str, pieces: list[Piece]) -> list[tuple[float, bool]]:
    return list(score(opened(mesh, flags), pieces, 2))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_likelihoods_are_those_that_transformers_gives_the_model(ranks: Ranks, tmp_path: Path, name: str, tp: int) -> None:
    tokens, logits = recorded(name)  # [b, s], [b, s, v]
    log_likelihoods = logits.double().log_softmax(-1)
    pieces, expected = [], []
    for sample, (begin, end) in enumerate([(4, 10), (1, 24)]):
        pieces.append(Piece(tokens[sample, :end].tolist(), end - begin))
        of_labels = log_likelihoods[sample, begin - 1 : end - 1].gather(-1, tokens[sample, begin:end, None])
        expected.append(of_labels.sum().item())
    best = logits[0, 11].argmax().item()
    pieces.append(Piece([*tokens[0, :12].tolist(), best], 1))
    expected.append(log_likelihoods[0, 11, best].item())
    for found in ranks(tp).run(scored, f"--load {converted(name, tmp_path)}", pieces):
        assert [each for each, _ in found] == pytest.approx(expected, abs=1e-4)
        assert [greedy for _, greedy in found] == [False, False, True]


def test_replicas_share_the_pieces(ranks: Ranks, tmp_path: Path) -> None:
    flags = f"--load {converted('llama', tmp_path)}"
    pieces = [Piece([*range(3, 5 + i)], 1 + i % 3) for i in range(2, 9)]
    alone = scored(ParallelMesh.single(torch.device("cpu")), flags, pieces)
    for found in ranks(2).run(scored, flags, pieces, tp=1):
        assert found == alone


def generated(mesh: ParallelMesh, flags: str, words: list[str]) -> int:
    own, rest = generate_tool.flag_parser().parse_known_args([*f"{flags} --tensor-model-parallel-size {mesh.tp.size}".split(), *words])
    model = open_model(read_run(own, rest, mesh.world.size), mesh)
    spoken: list[str] = []
    original = generate_tool.say
    generate_tool.say = lambda model, text: spoken.append(text)
    try:
        generate_tool.continue_text(model, own, own.prompt)
    finally:
        generate_tool.say = original
    return "".join(spoken)  # type: ignore[return-value]


@pytest.mark.parametrize("name", ["gpt2", "llama31"])
def test_the_same_text_with_and_without_a_cache_on_one_rank_and_two(ranks: Ranks, tmp_path: Path, name: str) -> None:
    flags = f"--load {converted(name, tmp_path)} {NUMBERS} --max-new-tokens 12"
    for words in ([], ["--temperature", "0.7", "--top-p", "0.9", "--seed", "5"]):
        texts = {
            text
            for size in (1, 2)
            for cache in ([], ["--no-kv-cache"])
            for text in ranks(size).run(generated, flags, ["--prompt", "5 17 3", *words, *cache])
        }
        (text,) = texts
        assert len(text.split()) == 12


@pytest.fixture(scope="module")
def megatrons(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("megatron"))


@pytest.mark.parametrize("name", ["gpt_legacy_tp2", "gpt_torch_dist_tp2", "llama_legacy_tp1", "llama_torch_dist_tp2"])
def test_checkpoints_of_megatrons_are_read_as_they_are(megatrons: Path, tmp_path: Path, name: str, ranks: Ranks) -> None:
    convert(load=megatrons / name, save=tmp_path / "hf", to="hf")
    convert(load=tmp_path / "hf", save=tmp_path / "native", to="native")
    pieces = [Piece([3, 1, 4, 1, 5, 9, 2, 6], 5)]
    ((direct, _),) = ranks(2).run(scored, f"--load {megatrons / name}", pieces)[0]
    ((exported, _),) = scored(ParallelMesh.single(torch.device("cpu")), f"--load {tmp_path / 'native'}", pieces)
    assert direct == pytest.approx(exported, abs=1e-4)


def test_a_model_of_ones_own_continues_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_page()
    load = saved(tmp_path, PAGE_MODEL)
    words = ["--load", str(load), *NUMBERS.split(), "--prompt", "4 5", "--max-new-tokens", "5"]
    assert generate_tool.main(words) == 2
    assert f"its code is imported only if you say so: add --model {PAGE_MODEL.model}" in capfd.readouterr().err
    assert generate_tool.main([*words, "--model", str(PAGE_MODEL.model)]) == 0
    out, told = capfd.readouterr()
    assert len(out.split()) == 5
    assert "without a key-value cache" not in told


# What the checkpoint says, and what it does not.


def test_tokenizer_and_number_format_are_the_checkpoints(tmp_path: Path) -> None:
    folder = trained(tmp_path, {"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": str(CORPUS / "sp4096.model"), "bf16": True})
    model = opened(ParallelMesh.single(torch.device("cpu")), f"--load {folder}")
    assert (model.stack.embedding.weight.dtype, model.text_tokenizer().vocab_size) == (torch.bfloat16, 4096)
    model = opened(ParallelMesh.single(torch.device("cpu")), f"--load {folder} --no-bf16 --tokenizer-type NullTokenizer")
    assert (model.stack.embedding.weight.dtype, model.text_tokenizer().decode([1, 2])) == (torch.float32, "1 2")


def trained(folder: Path, settings: dict[str, Any], positions: int = 20, break_it: bool = False) -> Path:
    """A native checkpoint of a small model, with the settings of the run that made it."""
    model = replace(PAGE_MODEL, model=None, vocab_size=4096, max_position_embeddings=positions)
    stack = build_stack(model, Communicator.single(), seed=1)
    if break_it:
        next(stack.final_norm.parameters()).data.fill_(3e38)  # products overflow; nan would not load
    state = {"model": asdict(model), "tokenizer": None, "settings": settings, "consumed_samples": 0}
    save_checkpoint(folder, 3, stack, None, state, ParallelMesh.single(torch.device("cpu")))
    return folder


def test_all_positions_of_a_table_are_used(tmp_path: Path) -> None:
    model = opened(ParallelMesh.single(torch.device("cpu")), f"--load {trained(tmp_path, {})}")
    assert model.positions == 20  # its samples had 16 tokens


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return converted("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--prompt", ""], "--prompt is empty"),
        (["--prompt-file", "nothing.txt"], "--prompt-file nothing.txt: no such file or directory"),
        ([], "--prompt or --prompt-file says what to continue"),
        (["--prompt", "1", "--prompt-file", "a"], "--prompt or --prompt-file says what to continue"),
        (["--prompt", " ".join(["1"] * 25)], "the prompt has 25 tokens, but the model has 24 positions"),
        (["--prompt", "97"], "id 97 is outside the model's vocabulary of 97"),
        (["--prompt", "one"], "word 1 is 'one', not a number"),
        (["--prompt", "1", "--stop", ""], "--stop is empty"),
        (["--prompt", "1", "--top-p", "0"], "--top-p 0 must be above 0 and at most 1"),
        (["--prompt", "1", "--top-p", "1.5"], "--top-p 1.5 must be above 0 and at most 1"),
        (["--prompt", "1", "--top-p", "nan"], "--top-p nan must be above 0 and at most 1"),
        (["--prompt", "1", "--temperature", "-1"], "--temperature -1 must be 0 or a number above it"),
        (["--prompt", "1", "--temperature", "nan"], "--temperature nan must be 0 or a number above it"),
        (["--prompt", "1", "--temperature", "0", "--top-p", "0.5"], "--top-p 0.5 cuts what --temperature 0 never draws from"),
        (["--prompt", "1", "--max-new-tokens", "0"], "--max-new-tokens 0 must be above 0"),
        (["--prompt", "1", "--seed", "-1"], "--seed -1 must be from 0"),
        (["--prompt", "1", "--load", "nowhere"], "--load nowhere holds no checkpoint"),
        (["--prompt", "1", "--load", str(FOLDER / "llama")], "convert it with"),
        (["--prompt", "1", "--lr", "1"], "--lr is a flag of training that has no meaning here"),
        (["--prompt", "1", "--hidden-sise", "1"], "nearest: --hidden-size"),
        (["--prompt", "1", "--num-layers", "3"], "has another shape than asked for (--num-layers 3, not 2)"),
        (["--prompt", "1", "--norm-epsilon", "0.1"], "has another shape than asked for (--norm-epsilon 0.1, not 1e-06)"),
        (["--prompt", "1", "--tensor-model-parallel-size", "2"], "does not divide the 1 ranks"),
        (["--prompt", "1", "--ckpt-step", "7"], "iter_0000007"),
        (["--prompt", "1", "--tokenizer-type", "Llama2Tokenizer"], "also needs --tokenizer-model"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_wrong_input_gets_one_clear_error(llama: str, words: list[str], fault: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert generate_tool.main(["--load", llama, *NUMBERS.split(), *words]) in (1, 2)
    out, told = capfd.readouterr()
    assert out == ""
    assert told.startswith("error: ")
    assert fault in told
    assert told.count("\n") == 1


def test_a_checkpoint_without_a_tokenizer_asks_for_one(llama: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert generate_tool.main(["--load", llama, "--prompt", "1"]) == 2
    assert "does not say which tokenizer it was trained with: give --tokenizer-type" in capfd.readouterr().err


def test_weights_that_are_no_numbers_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = trained(tmp_path, {}, break_it=True)
    (tmp_path / "numbers.txt").write_text("1 2 3")
    words = ["--load", str(folder), *NUMBERS.split()]
    assert generate_tool.main([*words, "--prompt", "1 2"]) == 1
    assert "the logits of token 2 are not finite: its weights hold such numbers" in capfd.readouterr().err
    assert evaluate.main([*words, str(tmp_path / "numbers.txt")]) == 1
    assert "a log-likelihood is not a number: its weights hold such numbers" in capfd.readouterr().err


def test_the_prompt_may_come_from_a_file_and_stop_where_told(llama: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompt.txt").write_text("5 17 3")
    words = ["--load", llama, *NUMBERS.split(), "--max-new-tokens", "8"]
    assert generate_tool.main([*words, "--prompt-file", str(tmp_path / "prompt.txt")]) == 0
    whole = capfd.readouterr().out
    third = whole.split()[2]
    assert generate_tool.main([*words, "--prompt", "5 17 3", "--stop", f" {third}"]) == 0
    out, told = capfd.readouterr()
    assert whole.startswith(out.rstrip("\n"))
    assert f" {third}" not in out
    assert "ended: stop text" in told


def test_generation_ends_with_the_positions(llama: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert generate_tool.main(["--load", llama, *NUMBERS.split(), "--prompt", " ".join(["5"] * 20)]) == 0
    out, told = capfd.readouterr()
    assert "ended: end of document" in told or ("the model's 24 positions are full" in told and len(out.split()) == 5)


# Perplexity.


@pytest.fixture
def held_out(tmp_path: Path) -> Path:
    (tmp_path / "one.txt").write_text("3 1 4 1 5 9 2 6 5 3 5 8 9 7 9 3 2 3 8 4 6 2 6 4 3 3 8 3 2 7 9 5")
    (tmp_path / "lines.jsonl").write_text('{"text": "3 1 4"}\n\n{"text": "1 5 9 2", "other": "6 5"}\n')
    with IndexedDatasetWriter(tmp_path / "tokens", "uint16") as writer:  # type: ignore[arg-type]
        writer.add_document([3, 1, 4])
        writer.add_document([1, 5, 9, 2])
    return tmp_path


def judged(capfd: pytest.CaptureFixture[str], *words: object) -> list[dict[str, Any]]:
    assert evaluate.main([*map(str, words), "--json"]) == 0
    files: list[dict[str, Any]] = json.loads(capfd.readouterr().out)["files"]
    return files


def test_lines_and_token_files_of_the_same_documents_are_judged_alike(
    llama: str, held_out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines, tokens = judged(capfd, "--load", llama, *NUMBERS.split(), held_out / "lines.jsonl", held_out / "tokens")
    assert lines["loss"] == pytest.approx(tokens["loss"], rel=1e-9)
    assert (lines["documents"], lines["tokens"], lines["bytes"]) == (2, 7, 12)
    assert "bytes" not in tokens
    assert lines["bits_per_byte"] == pytest.approx(lines["loss"] * 7 / math.log(2) / 12)
    assert lines["perplexity"] == pytest.approx(math.exp(lines["loss"]))
    (both,) = judged(capfd, "--load", llama, *NUMBERS.split(), held_out / "lines.jsonl", "--json-keys", "text")
    assert both == lines


def test_the_loss_is_the_models_in_windows_of_any_stride(llama: str, held_out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    numbers = [96, *map(int, (held_out / "one.txt").read_text().split())]
    model = opened(ParallelMesh.single(torch.device("cpu")), f"--load {llama}")
    windows = {24: [(0, 25, 24), (24, 33, 8)], 5: [(0, 25, 24), (5, 30, 5), (10, 33, 3)]}
    for stride, places in windows.items():
        pieces = [Piece(numbers[begin:end], judged_tokens) for begin, end, judged_tokens in places]
        expected = -sum(each for each, _ in score(model, pieces, 1)) / 32
        (found,) = judged(capfd, "--load", llama, *NUMBERS.split(), held_out / "one.txt", "--stride", stride)
        assert (found["tokens"], found["loss"]) == (32, pytest.approx(expected, rel=1e-6))


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ([], "nothing to judge"),
        (["nothing.txt"], "nothing.txt: no such file"),
        (["one.txt", "--stride", "25"], "--stride 25 would leave tokens out"),
        (["one.txt", "--stride", "0"], "--stride 0 must be above 0"),
        (["empty.txt"], "empty.txt holds no token"),
        (["damaged.jsonl"], "damaged.jsonl, line 2: not a JSON object with text"),
        (["latin.txt"], "latin.txt is not UTF-8 text"),
        (["large"], "id 300 is outside the model's vocabulary of 97"),
        (["--tasks", "arc_easy"], "which is not installed: pip install lm-eval"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_files_get_one_clear_error(
    llama: str, held_out: Path, words: list[str], fault: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (held_out / "empty.txt").touch()
    (held_out / "damaged.jsonl").write_text('{"text": "1"}\n{"title": "2"}\n')
    (held_out / "latin.txt").write_bytes(b"1 \xe9")
    with IndexedDatasetWriter(held_out / "large", "uint16") as writer:  # type: ignore[arg-type]
        writer.add_document([300, 1])
    monkeypatch.chdir(held_out)
    assert evaluate.main(["--load", llama, *NUMBERS.split(), *words]) in (1, 2)
    told = capfd.readouterr().err
    assert told.startswith("error: ")
    assert fault in told
    assert told.count("\n") == 1


# lm-evaluation-harness.


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """The adapter, with as much of ``lm_eval`` as it needs."""
    names = ("lm_eval", "lm_eval.api", "lm_eval.api.model")
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["lm_eval.api.model"].LM = type("LM", (), {})  # type: ignore[attr-defined]
    import domino_lm.tools.harness as module

    yield module
    sys.modules.pop("domino_lm.tools.harness")


def asked(*args: object) -> Namespace:
    return Namespace(args=args)


def test_the_harness_gets_likelihoods_greedy_answers_and_text(llama: str, harness: types.ModuleType) -> None:
    model = opened(ParallelMesh.single(torch.device("cpu")), f"--load {llama} {NUMBERS}")
    adapter = harness.HarnessModel(model, batch_size=2)
    tokens, logits = recorded("llama")
    expected = logits[0].double().log_softmax(-1)
    context, rest = tokens[0, :6].tolist(), tokens[0, 6:9].tolist()
    text, best = " ".join(map(str, context)), int(logits[0, 5].argmax())
    answers = adapter.loglikelihood([asked(text, " " + " ".join(map(str, rest))), asked(text, f" {best}"), asked("", text)])
    assert answers[0][0] == pytest.approx(sum(float(expected[5 + i, token]) for i, token in enumerate(rest)), abs=1e-4)
    assert answers[1] == (pytest.approx(float(expected[5, best]), abs=1e-4), True)
    (whole,) = adapter.loglikelihood_rolling([asked(text)])
    assert whole == pytest.approx(answers[2][0], abs=1e-5)
    (continued,) = adapter.generate_until([asked(text, {"until": ["\n"], "max_gen_toks": 4})])
    assert continued.split()[0] == str(best)
    long = " ".join(["7"] * 60)
    assert adapter.loglikelihood([asked(long, " 8")])[0][0] < 0
    assert len(adapter.loglikelihood_rolling([asked(long), asked(text)])) == 2


# The programs themselves.


def program(*words: object, ranks: int = 1, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *launcher, *map(str, words)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.long
def test_two_ranks_under_torchrun_say_what_one_says(llama: str) -> None:
    words = [ROOT / "tools/generate.py", "--load", llama, *NUMBERS.split(), "--prompt", "5 17 3", "--max-new-tokens", "6"]
    one, two = program(*words), program(*words, ranks=2)
    assert (one.returncode, two.returncode) == (0, 0), one.stderr + two.stderr
    assert one.stdout == two.stdout
    assert len(one.stdout.split()) == 6


@pytest.mark.long
def test_the_commands_of_the_page_on_generation_run(tmp_path: Path) -> None:
    for name in ("tools", "domino_lm"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "bin").mkdir()
    for command, module in (("domino-lm-generate", "generate"), ("domino-lm-eval", "evaluate")):
        (tmp_path / "bin" / command).write_text(f'#!/bin/sh\nexec {sys.executable} -m domino_lm.tools.{module} "$@"\n')
        (tmp_path / "bin" / command).chmod(0o755)
    settings = {"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": str(CORPUS / "sp4096.model")}
    trained(tmp_path / "checkpoints/my", settings, positions=128)
    (tmp_path / "data").mkdir()
    write_tokens(tmp_path / "data")
    for suffix in (".bin", ".idx"):
        (tmp_path / f"data/tokens{suffix}").rename(tmp_path / f"data/my_text_document{suffix}")
    for name in ("held_out.jsonl", "my.jsonl"):
        (tmp_path / name).write_text("".join((CORPUS / "corpus.jsonl").read_text().splitlines(keepends=True)[1:3]))
    for name in ("act.txt", "notes.txt"):
        (tmp_path / name).write_text("To be, or not to be")
    for command in commands_for("test_the_commands_of_the_page_on_generation_run"):
        done = attempt(tmp_path, command, PATH=f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}")
        if "--tasks" in command and importlib.util.find_spec("lm_eval") is None:
            assert "pip install lm-eval" in done.stderr
            continue
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        assert "perplexity" in done.stdout or "tokens of prompt" in done.stderr


def test_tasks_of_ones_own_are_given_to_the_harness(llama: str, harness: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for: dict[str, Any] = {}
    tasks = types.ModuleType("lm_eval.tasks")
    tasks.TaskManager = lambda **words: ("manager", words)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", tasks)
    sys.modules["lm_eval"].simple_evaluate = lambda **words: asked_for.update(words) or {"results": {}}  # type: ignore[attr-defined]
    model = opened(ParallelMesh.single(torch.device("cpu")), f"--load {llama} {NUMBERS}")
    harness.evaluate(model, ["mine"], 2, None, limit=3)
    assert "task_manager" not in asked_for
    harness.evaluate(model, ["mine"], 2, "folder", limit=3)
    assert (asked_for["task_manager"], asked_for["limit"]) == (("manager", {"include_path": "folder"}), 3)


def test_a_folder_of_tasks_that_is_missing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate.main(["--load", "x", "--tasks", "mine", "--include-path", "nowhere"]) != 0
    assert "--include-path nowhere: no such folder" in capsys.readouterr().err


LOCAL_TASKS = {
    "choose": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "doc_to_choice": "{{choices}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "continue": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
    "perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
}
"""One task of each kind of request, as files of their own (YAML reads JSON)."""


@pytest.mark.long
def test_the_real_harness_measures_local_tasks_without_a_net(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    settings = {"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": str(CORPUS / "sp4096.model")}
    trained(tmp_path / "model", settings, positions=128)
    questions = [{"question": text, "choices": ["be", "xylophone"], "answer": 0} for text in ("To be, or not to", "", "My lord, the ")]
    (tmp_path / "questions.json").write_text(json.dumps(questions))
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": one["question"]}) + "\n" for one in questions if one["question"]))
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "questions.json")}}, "test_split": "test"}
    (tmp_path / "tasks").mkdir()
    for name, task in LOCAL_TASKS.items():
        (tmp_path / f"tasks/{name}.yaml").write_text(json.dumps({"task": f"own_{name}", **source, **task}))
    names = [f"own_{name}" for name in LOCAL_TASKS]
    flags = ["--load", str(tmp_path / "model"), "--json", "--include-path", str(tmp_path / "tasks"), "--tasks", *names]
    done = program(ROOT / "tools/evaluate.py", str(tmp_path / "texts.jsonl"), *flags)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    results = found["tasks"]
    assert 0 <= results["own_choose"]["acc,none"] <= 1
    assert results["own_continue"]["exact_match,none"] == 0
    assert results["own_perplexity"]["bits_per_byte,none"] == pytest.approx(found["files"][0]["bits_per_byte"], rel=1e-6)


@pytest.mark.long
def test_two_ranks_say_an_error_once_and_share_a_file(llama: str, held_out: Path) -> None:
    words = ["--load", llama, *NUMBERS.split()]
    wrong = program(ROOT / "tools/generate.py", *words, "--prompt", "", ranks=2)
    assert wrong.returncode != 0
    assert wrong.stderr.count("--prompt is empty") == 1
    lines = [
        program(ROOT / "tools/evaluate.py", *words, held_out / "one.txt", *layout, ranks=2).stdout
        for layout in ([], ["--tensor-model-parallel-size", "1"])
    ]
    assert lines[0] == lines[1] == program(ROOT / "tools/evaluate.py", *words, held_out / "one.txt").stdout
    assert "32 tokens in 1 documents" in lines[0]
