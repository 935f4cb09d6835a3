#!/bin/bash
# Trains on several GPUs, with servers on others.
#   ./train_multi_gpu.sh [CONFIG] [flags of lachesis train]
# GPUS: those that train, 2,3 if unset. PORTS: of the servers, 8000 if unset; two are "8000 8001".
set -euo pipefail
CONFIG=multi_gpu_config.yaml
if [[ $# -gt 0 && $1 != --* ]]; then
    CONFIG=$1
    shift
fi
GPUS=${GPUS:-2,3}
for PORT in ${PORTS:-8000}; do
    if ! curl --silent --fail --output /dev/null "http://127.0.0.1:$PORT/health"; then
        echo "no server answers on port $PORT: start it in another terminal, on other GPUs than $GPUS, with" >&2
        echo "GPU=0,1 ./start_vllm_server.sh $CONFIG --port $PORT" >&2
        exit 1
    fi
done
export CUDA_VISIBLE_DEVICES=$GPUS
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export TOKENIZERS_PARALLELISM=false
IFS=, read -r -a EACH <<<"$GPUS"
exec torchrun --nproc-per-node "${#EACH[@]}" -m lachesis train "$CONFIG" "$@"
