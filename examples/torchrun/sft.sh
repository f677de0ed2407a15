#!/usr/bin/env bash
# Supervised fine-tuning without Ray. Run it on every node, from the repository's root, in the training environment:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 GPUS_PER_NODE=8 bash examples/torchrun/sft.sh run.yaml
# NODE_RANK is 0 on the node of MASTER_ADDR; ports MASTER_PORT and MASTER_PORT + 1 are open there. run.yaml says
# method: sft, placement.nodes and placement.workers_per_node; run.dir is on a file system that all nodes see
# (checkpoint.shared_files: true), or checkpoint.remote is a bucket.
set -euo pipefail
config=${1:?give the configuration of the run (YAML)}
export NNODES=${NNODES:-1} NODE_RANK=${NODE_RANK:-0} MASTER_ADDR=${MASTER_ADDR:-127.0.0.1} MASTER_PORT=${MASTER_PORT:-29500}
# Says within seconds who is missing, twice, or different; then torchrun starts the ranks.
exec python -m trainer.ranks.torchrun --config "$config" --start "${GPUS_PER_NODE:-8}"
