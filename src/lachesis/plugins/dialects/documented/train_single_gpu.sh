#!/bin/bash
# Trains on one GPU, with the server on another.
#   ./train_single_gpu.sh [CONFIG] [flags of lachesis train]
# GPU: which one, 1 if unset. PORT: of the server, 8000 if unset.
set -euo pipefail
CONFIG=custom_dataset_config.yaml
if [[ $# -gt 0 && $1 != --* ]]; then
    CONFIG=$1
    shift
fi
PORT=${PORT:-8000}
if ! curl --silent --fail --output /dev/null "http://127.0.0.1:$PORT/health"; then
    echo "no server answers on port $PORT: start it in another terminal with ./start_vllm_server.sh $CONFIG" >&2
    exit 1
fi
export CUDA_VISIBLE_DEVICES=${GPU:-1}
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export TOKENIZERS_PARALLELISM=false
exec lachesis train "$CONFIG" "$@"
