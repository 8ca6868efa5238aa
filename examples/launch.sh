#!/usr/bin/env bash
# Starts domino_lm.pretrain under torchrun with the flags given here. Signals go to the ranks: docs/training.md. What differs by machine comes from the environment:
#   NPROC        processes on this node, one a GPU (8)
#   NNODES       nodes (1); with more than one, NODE_RANK and MASTER_ADDR must be set on each, MASTER_PORT may be (29500)
#   JOIN_SECONDS how long the nodes wait for each other (300); they say what they wait for
#   PYTHON       interpreter of the environment (python)
#   EXTRA_ARGS   further flags; they win over those of the script
#   PREFLIGHT    folders that all nodes must share; the nodes are checked first, and nothing starts if one is unfit (not checked);
#                each needs PREFLIGHT_FREE_GIB (10) of free disk
#   MAX_RESTARTS how often torchrun starts all ranks again after one has failed; they go on from the last checkpoint (0);
#                the death of node 0 is not covered, for it holds the list of nodes
set -euo pipefail

trap '' USR1  # has a run save and go on; nothing listens to it yet
if [ "${NNODES:-1}" -gt 1 ]; then
  : "${NODE_RANK:?says which of the nodes this is, from 0}" "${MASTER_ADDR:?is the address of node 0}"
fi
# shellcheck disable=SC2086  # PREFLIGHT and EXTRA_ARGS are lists of words
exec "${PYTHON:-python}" -m domino_lm.launch.torchrun --nproc-per-node "${NPROC:-8}" --nnodes "${NNODES:-1}" --node-rank "${NODE_RANK:-0}" \
  --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-29500}" --max-restarts "${MAX_RESTARTS:-0}" \
  --join-seconds "${JOIN_SECONDS:-300}" \
  --preflight ${PREFLIGHT:-} --min-free-gib "${PREFLIGHT_FREE_GIB:-10}" -- \
  -m domino_lm.pretrain "$@" ${EXTRA_ARGS:-}
