#!/bin/bash
# Serves the model of a configuration on one GPU, and stays there.
#   ./start_vllm_server.sh [CONFIG] [flags of lachesis vllm-serve]
# GPU: which one, 0 if unset.
set -euo pipefail
CONFIG=custom_dataset_config.yaml
if [[ $# -gt 0 && $1 != --* ]]; then
    CONFIG=$1
    shift
fi
export CUDA_VISIBLE_DEVICES=${GPU:-0}
exec lachesis vllm-serve "$CONFIG" "$@"
