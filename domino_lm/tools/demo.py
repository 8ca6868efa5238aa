"""From text to a model that speaks, on two CPU processes. Each command that it runs is shown first; all files go to runs/demo."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy

from domino_lm.config.foreign_text import int_of_flag
from domino_lm.data.indexed import IndexedDataset

PACKAGE = Path(__file__).resolve().parents[1]
OUTPUT = Path("runs/demo")
TOKENS = OUTPUT / "corpus_text_document"
CHECKPOINTS = OUTPUT / "checkpoints"
PROMPT = "To be, or"
TIMELINE_STEP = 20
MODULES = {
    "domino-lm-preprocess": "-m domino_lm.tools.preprocess_data",
    "domino-lm-plot": "-m domino_lm.tools.plot_run",
    "domino-lm-generate": "-m domino_lm.tools.generate",
    "torchrun": "-m torch.distributed.run",
}
"""How this environment's Python starts the commands that are shown, whether they are on PATH or not."""


def commands(train_iters: int) -> dict[str, str]:
    """The commands of the demo, by what they are for."""
    data = Path(os.path.relpath(PACKAGE / "tools/demo_data"))
    data = data if not str(data).startswith("..") else PACKAGE / "tools/demo_data"
    tokenizer = f"--tokenizer-type Llama2Tokenizer --tokenizer-model {shlex.quote(str(data / 'sp4096.model'))}"
    corpus = shlex.quote(str(data / "corpus.jsonl"))
    return {
        "preprocess": f"domino-lm-preprocess --input {corpus} --output-prefix {OUTPUT}/corpus {tokenizer} --append-eod --workers 2",
        "train": "torchrun --standalone --nproc-per-node 2 -m domino_lm.pretrain "
        "--preset debug-gpt --tensor-model-parallel-size 2 --schedule domino --domino-row-slices 2 "
        f"--data-path {TOKENS} --split 95,5,0 {tokenizer} "
        f"--micro-batch-size 8 --train-iters {train_iters} --lr 3e-3 --min-lr 3e-4 --lr-warmup-iters {train_iters // 20} --weight-decay 0.1 --adam-beta2 0.95 "
        f"--log-interval 50 --eval-interval 300 --eval-iters 20 --save {CHECKPOINTS} --tensorboard-dir {OUTPUT}/tensorboard "
        f"--metrics-file {OUTPUT}/metrics.jsonl --timeline {OUTPUT}/timeline --timeline-iteration {TIMELINE_STEP}",
        "generate": f"domino-lm-generate --load {CHECKPOINTS} --prompt {shlex.quote(PROMPT)} --max-new-tokens 40 --temperature 0.8 --top-p 0.9",
        "plot": f"domino-lm-plot {OUTPUT}/metrics.jsonl --output {OUTPUT}/curves.png",
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Preprocess, train, sum up, generate; returns the exit code."""
    parser = flag_parser()
    train_iters = parser.parse_args(argv).train_iters
    if train_iters < TIMELINE_STEP:
        parser.error(f"--train-iters {train_iters}: step {TIMELINE_STEP} is recorded; give at least as many")
    began = time.monotonic()
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir(parents=True)
    shown = commands(train_iters)
    say("1. Text to tokens")
    if run(shown["preprocess"]) is None:
        return 1
    say("2. Train a small GPT, its matrices cut over two processes; the Domino schedule lets one row travel while the other computes")
    log = run(shown["train"])
    if log is None:
        return 1
    can_draw = importlib.util.find_spec("matplotlib") is not None
    if can_draw and run(shown["plot"]) is None:
        return 1
    learned = sum_up(log, time.monotonic() - began, can_draw, train_iters)
    say("4. What it says")
    text = run(shown["generate"], quiet=True)
    if text is None:
        return 1
    print(PROMPT + " / ".join(line for line in text.splitlines() if line.strip()), flush=True)
    return 0 if learned else 1


def flag_parser() -> argparse.ArgumentParser:
    """The flags of this tool."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--train-iters", type=int_of_flag, default=600, metavar="N", help="steps to train for (default: 600, about three minutes)"
    )
    return parser


def say(heading: str) -> None:
    print(f"\n== {heading}\n", flush=True)


def run(command: str, quiet: bool = False) -> str | None:
    """Show and run a command of this environment; its output is shown, unless ``quiet``, and returned, None if it failed."""
    print(f"$ {command}\n", flush=True)
    program, *words = shlex.split(command)
    path = os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    errors = subprocess.DEVNULL if quiet else subprocess.STDOUT
    arguments = [sys.executable, *MODULES[program].split(), *words]
    with subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            if not quiet:
                print(line, end="", flush=True)
            lines.append(line)
    if process.returncode:
        print(f"\nthe command above failed with exit code {process.returncode}", file=sys.stderr)
        return None
    return "".join(lines)


def unigram_entropy(prefix: Path) -> float:
    """Nats per token of the best model that looks at no context: the entropy of the token frequencies."""
    dataset = IndexedDataset(prefix)
    counts = numpy.bincount(numpy.concatenate([dataset.get(i) for i in range(len(dataset))]))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * numpy.log(shares)).sum())


def sum_up(log: str, seconds: float, drawn: bool, train_iters: int) -> bool:
    """Say in plain words what came out; whether the model learned to use context."""
    first_loss = float(re.findall(r"first loss ([0-9.]+)", log)[-1])
    losses = [float(value) for value in re.findall(r"lm loss value: (\S+)", log)]
    ended = re.findall(r"training ended: .*", log)[-1]
    vocabulary = int(re.findall(r"vocabulary (\d+)", log)[-1])
    entropy, final = unigram_entropy(TOKENS), losses[-1]
    learned = final < entropy
    picture = f"\n  {OUTPUT}/curves.png                  loss, learning rate, gradient norm, throughput" if drawn else ""
    timeline = (
        f"\n  {OUTPUT}/timeline.png                what ran when in step {TIMELINE_STEP}: communication under compute" if drawn else ""
    )
    say("3. What came out")
    print(f"""\
loss, in nats per token (smaller is better; each nat less makes the true next token e = 2.7 times as likely)
  {math.log(vocabulary):5.2f}  guessing blindly among the {vocabulary} pieces of the vocabulary
  {first_loss:5.2f}  this model before training
  {entropy:5.2f}  knowing how frequent each piece is, and nothing else (unigram entropy of this corpus)
  {final:5.2f}  this model now, on text that it was not trained on: {"it uses context" if learned else "it has NOT learned to use context"}

{ended}
whole demo: {seconds:.0f} s

where everything lies
  {TOKENS}.bin, .idx   the tokens
  {CHECKPOINTS}                 the trained model
  {OUTPUT}/metrics.jsonl               every step{picture}
  {OUTPUT}/tensorboard                 the same: {Path(sys.executable).parent}/tensorboard --logdir {OUTPUT}/tensorboard
  {OUTPUT}/timeline.json               step {TIMELINE_STEP}; opens in Perfetto{timeline}

what to try next (the commands lie in {Path(sys.executable).parent})
  train on:        the second command again, with --load {CHECKPOINTS} --train-iters {2 * train_iters} --override-opt-param-scheduler
  let it speak:    the last command again, with another --prompt
  another order:   --schedule baseline in place of --schedule domino --domino-row-slices 2; the losses stay the same
  another model:   --preset debug-llama
  your own text:   one {{"text": "..."}} a line; see README.md""")
    return learned


if __name__ == "__main__":
    sys.exit(main())
