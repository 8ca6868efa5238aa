"""From text to a trained model on two CPU processes: ``make demo`` runs this. Each command that it runs is shown first."""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from domino_lm.data.indexed import IndexedDataset

EXAMPLES = Path("examples/data")
OUTPUT = Path("runs/demo")
TOKENIZER = f"--tokenizer-type Llama2Tokenizer --tokenizer-model {EXAMPLES}/sp4096.model"
TOKENS = OUTPUT / "corpus_text_document"
PREPROCESS = (
    f"tools/preprocess_data.py --input {EXAMPLES}/corpus.jsonl --output-prefix {OUTPUT}/corpus {TOKENIZER} --append-eod --workers 2"
)
LAUNCH = "-m torch.distributed.run --standalone --nproc-per-node 2"
TRAIN = (
    f"-m domino_lm.pretrain --preset debug-gpt --tensor-model-parallel-size 2 --schedule domino --domino-row-slices 2 "
    f"--data-path {TOKENS} --split 95,5,0 {TOKENIZER} "
    "--micro-batch-size 8 --train-iters 600 --lr 3e-3 --min-lr 3e-4 --lr-warmup-iters 30 --weight-decay 0.1 --adam-beta2 0.95 "
    f"--log-interval 50 --eval-interval 300 --eval-iters 20 --save {OUTPUT}/checkpoints --tensorboard-dir {OUTPUT}/tensorboard "
    f"--metrics-file {OUTPUT}/metrics.jsonl --timeline {OUTPUT}/timeline --timeline-iteration 20"
)
PLOT = f"tools/plot_run.py {OUTPUT}/metrics.jsonl --output {OUTPUT}/curves.png"


def main() -> int:
    """Preprocess, train, sum up; returns the exit code."""
    began = time.monotonic()
    os.chdir(Path(__file__).parents[1])
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir(parents=True)
    say("1. Text to tokens")
    if run(PREPROCESS) is None:
        return 1
    say("2. Train a small GPT, its matrices cut over two processes; the Domino schedule lets one row travel while the other computes")
    log = run(f"{LAUNCH} {TRAIN}")
    if log is None or run(PLOT) is None:
        return 1
    return sum_up(log, time.monotonic() - began)


def say(heading: str) -> None:
    print(f"\n== {heading}\n", flush=True)


def run(arguments: str) -> str | None:
    """Show and run one Python command of this environment; its output is shown and returned, None if it failed."""
    print(f"$ python {arguments}\n", flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.getcwd()}
    command = [sys.executable, *shlex.split(arguments)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
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


def sum_up(log: str, seconds: float) -> int:
    """Say in plain words what came out; the exit code is 0 if the model learned to use context."""
    first_loss = float(re.findall(r"first loss ([0-9.]+)", log)[-1])
    losses = [float(value) for value in re.findall(r"lm loss value: (\S+)", log)]
    ended = re.findall(r"training ended: .*", log)[-1]
    vocabulary = int(re.findall(r"vocabulary (\d+)", log)[-1])
    entropy, final = unigram_entropy(TOKENS), losses[-1]
    learned = final < entropy
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
  {OUTPUT}/checkpoints                 the trained model
  {OUTPUT}/curves.png                  loss, learning rate, gradient norm, throughput; metrics.jsonl holds every step
  {OUTPUT}/tensorboard                 the same: {Path(sys.executable).parent}/tensorboard --logdir {OUTPUT}/tensorboard
  {OUTPUT}/timeline.png                what ran when in step 20: communication under compute; timeline.json opens in Perfetto

what to try next
  train on:        the second command again, with --load {OUTPUT}/checkpoints --train-iters 1200 --override-opt-param-scheduler
  another order:   --schedule baseline in place of --schedule domino --domino-row-slices 2; the losses stay the same
  another model:   --preset debug-llama
  your own text:   one {{"text": "..."}} a line; see README.md""")
    return 0 if learned else 1


if __name__ == "__main__":
    sys.exit(main())
