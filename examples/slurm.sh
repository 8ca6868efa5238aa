#!/usr/bin/env bash
# Runs one of the scripts beside it on every node of a Slurm job, one torchrun a node:
#   sbatch --nodes 4 --export ALL,DATA_PATH=...,TOKENIZER_MODEL=... examples/slurm.sh examples/llama/llama2_7b.sh
#SBATCH --job-name=domino-lm
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --signal=TERM@120
set -euo pipefail
script=${1:?is the script to run, for example examples/gpt3/gpt3_13b.sh}

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR NNODES="$SLURM_JOB_NUM_NODES" MASTER_PORT="${MASTER_PORT:-29500}"
export PREFLIGHT="${PREFLIGHT-$PWD}"  # the nodes must share this folder; PREFLIGHT= looks at nothing
# Two minutes before its time is up Slurm sends SIGTERM, at which the run saves and leaves; a longer step and save need a longer time.
srun --cpu-bind=none bash -c "NODE_RANK=\$SLURM_NODEID exec $script"
