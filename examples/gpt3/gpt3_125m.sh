#!/usr/bin/env bash
# GPT-3 125M: 300 billion tokens, half a million a step, on 2 GPUs of 24 GiB, fewer or more of them; each holds a replica.
set -euo pipefail
folder=$(cd "$(dirname "$0")" && pwd)
: "${DATA_PATH:?is the prefix of a .bin/.idx pair, or a blend: weight prefix weight prefix}"
TOKENIZER=${TOKENIZER:---tokenizer-type GPT2BPETokenizer --vocab-file ${VOCAB_FILE:?is GPT-2 vocab.json} --merge-file ${MERGE_FILE:?is GPT-2 merges.txt}}
# shellcheck disable=SC2086  # DATA_PATH and TOKENIZER may be lists of words
exec "$folder/../launch.sh" \
  --preset gpt3-125m --tensor-model-parallel-size "${TP:-1}" --bf16 --use-distributed-optimizer \
  --data-path $DATA_PATH --split 969,30,1 $TOKENIZER \
  --micro-batch-size 8 --global-batch-size 256 --train-samples 146484375 --lr-decay-samples 126953125 --lr-warmup-samples 183105 \
  --lr 6e-4 --min-lr 6e-5 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 \
  --log-interval 10 --eval-interval 1000 --eval-iters 10 --save-interval 1000 \
  --save "${CHECKPOINTS:-checkpoints/gpt3_125m}" --load "${CHECKPOINTS:-checkpoints/gpt3_125m}" \
  --tensorboard-dir "${LOGS:-runs/gpt3_125m}" --metrics-file "${LOGS:-runs/gpt3_125m}/metrics.jsonl"
