#!/usr/bin/env bash
# Starts domino_lm.pretrain under torchrun with the flags given here. What differs by machine comes from the environment:
#   NPROC        processes on this node, one a GPU (8)
#   NNODES       nodes (1); with more than one, NODE_RANK and MASTER_ADDR must be set on each, MASTER_PORT may be (29500)
#   PYTHON       interpreter of the environment (python)
#   EXTRA_ARGS   further flags; they win over those of the script
#   PREFLIGHT    folders that all nodes must share; the nodes are checked first, and nothing starts if one is unfit (not checked);
#                each needs PREFLIGHT_FREE_GIB (10) of free disk
#   MAX_RESTARTS how often torchrun starts all ranks again after one has failed; they go on from the last checkpoint (0)
set -euo pipefail

# How the nodes find each other, at port $1. Nodes that start again together must meet again, which a fixed list of ranks cannot.
rendezvous() {
  if [ "${NNODES:-1}" -gt 1 ] && [ "${MAX_RESTARTS:-0}" -gt 0 ]; then
    local host=false
    [ "$NODE_RANK" -eq 0 ] && host=true
    echo "--nnodes $NNODES --rdzv-backend c10d --rdzv-id port-$1 --rdzv-endpoint $MASTER_ADDR:$1 --rdzv-conf is_host=$host"
  elif [ "${NNODES:-1}" -gt 1 ]; then
    echo "--nnodes $NNODES --node-rank $NODE_RANK --master-addr $MASTER_ADDR --master-port $1"
  else
    echo --standalone
  fi
}

if [ "${NNODES:-1}" -gt 1 ]; then
  : "${NODE_RANK:?says which of the nodes this is, from 0}" "${MASTER_ADDR:?is the address of node 0}"
fi
port=${MASTER_PORT:-29500}
if [ "${MAX_RESTARTS:-0}" -gt 0 ]; then
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # or restarted ranks would find the addresses of those that died
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
torchrun=("${PYTHON:-python}" -m torch.distributed.run --nproc-per-node "${NPROC:-8}")
if [ -n "${PREFLIGHT:-}" ]; then
  tensor_parallel=1 previous=
  for word in "$@"; do
    [ "$previous" = --tensor-model-parallel-size ] && tensor_parallel=$word
    previous=$word
  done
  # A port of its own, which no node can still hold when the next one asks for it. PREFLIGHT is a list of folders.
  # shellcheck disable=SC2046,SC2086
  "${torchrun[@]}" $(rendezvous $((port + 1))) "$(dirname "$0")/../tools/preflight.py" \
    --tensor-model-parallel-size "$tensor_parallel" --shared $PREFLIGHT --min-free-gib "${PREFLIGHT_FREE_GIB:-10}"
fi
# shellcheck disable=SC2046,SC2086  # EXTRA_ARGS is a list of words
exec "${torchrun[@]}" $(rendezvous "$port") --max-restarts "${MAX_RESTARTS:-0}" -m domino_lm.pretrain "$@" ${EXTRA_ARGS:-}
