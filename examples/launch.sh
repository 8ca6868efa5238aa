#!/usr/bin/env bash
# Starts domino_lm.pretrain under torchrun with the flags given here. What differs by machine comes from the environment:
#   NPROC        processes on this node, one a GPU (8)
#   NNODES       nodes (1); with more than one, NODE_RANK and MASTER_ADDR must be set on each, MASTER_PORT may be (29500)
#   PYTHON       interpreter of the environment (python)
#   EXTRA_ARGS   further flags; they win over those of the script
set -euo pipefail

if [ "${NNODES:-1}" -gt 1 ]; then
  : "${NODE_RANK:?says which of the nodes this is, from 0}" "${MASTER_ADDR:?is the address of node 0}"
  rendezvous=(--nnodes "$NNODES" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
else
  rendezvous=(--standalone)
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# shellcheck disable=SC2086  # EXTRA_ARGS is a list of words
exec "${PYTHON:-python}" -m torch.distributed.run "${rendezvous[@]}" --nproc-per-node "${NPROC:-8}" -m domino_lm.pretrain "$@" ${EXTRA_ARGS:-}
