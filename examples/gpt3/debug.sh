#!/usr/bin/env bash
# A GPT of a million parameters, to see that everything works: on 2 processes of 1 GiB, CPUs will do.
set -euo pipefail
folder=$(cd "$(dirname "$0")" && pwd)
: "${DATA_PATH:?is the prefix of a .bin/.idx pair, or a blend: weight prefix weight prefix}"
TOKENIZER=${TOKENIZER:---tokenizer-type GPT2BPETokenizer --vocab-file ${VOCAB_FILE:?is GPT-2 vocab.json} --merge-file ${MERGE_FILE:?is GPT-2 merges.txt}}
# shellcheck disable=SC2086  # DATA_PATH and TOKENIZER may be lists of words
exec "$folder/../launch.sh" \
  --preset debug-gpt --tensor-model-parallel-size "${TP:-2}" \
  --data-path $DATA_PATH --split 969,30,1 $TOKENIZER \
  --micro-batch-size 8 --global-batch-size 32 --train-iters 300 --lr-warmup-iters 30 \
  --lr 3e-3 --min-lr 3e-4 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 \
  --log-interval 10 --eval-interval 1000 --eval-iters 10 --save-interval 1000 \
  --save "${CHECKPOINTS:-checkpoints/debug}" --load "${CHECKPOINTS:-checkpoints/debug}" \
  --tensorboard-dir "${LOGS:-runs/debug}" --metrics-file "${LOGS:-runs/debug}/metrics.jsonl"
