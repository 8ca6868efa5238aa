#!/usr/bin/env bash
# LLaMA 2 7B: two trillion tokens, four million a step, on 8 GPUs of 40 GiB or more of them.
set -euo pipefail
folder=$(cd "$(dirname "$0")" && pwd)
: "${DATA_PATH:?is the prefix of a .bin/.idx pair, or a blend: weight prefix weight prefix}"
TOKENIZER=${TOKENIZER:---tokenizer-type Llama2Tokenizer --tokenizer-model ${TOKENIZER_MODEL:?is a SentencePiece model}}
# shellcheck disable=SC2086  # DATA_PATH and TOKENIZER may be lists of words
exec "$folder/../launch.sh" \
  --preset llama2-7b --tensor-model-parallel-size "${TP:-8}" --bf16 --use-distributed-optimizer \
  --data-path $DATA_PATH --split 969,30,1 $TOKENIZER \
  --micro-batch-size 2 --global-batch-size 1024 --train-iters 480000 --lr-warmup-iters 2000 \
  --lr 3e-4 --min-lr 3e-5 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 \
  --log-interval 10 --eval-interval 1000 --eval-iters 10 --save-interval 1000 \
  --save "${CHECKPOINTS:-checkpoints/llama2_7b}" --load "${CHECKPOINTS:-checkpoints/llama2_7b}" \
  --tensorboard-dir "${LOGS:-runs/llama2_7b}" --metrics-file "${LOGS:-runs/llama2_7b}/metrics.jsonl"
