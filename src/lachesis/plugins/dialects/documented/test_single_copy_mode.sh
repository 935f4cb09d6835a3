#!/bin/bash
# A few steps of the whole loop with one copy of the weights: rollout API, server, environment, trainer.
#   ./test_single_copy_mode.sh [flags of lachesis run]
# MODEL, ENVIRONMENT and STEPS may be set.
set -euo pipefail
exec lachesis run --model-name "${MODEL:-Qwen/Qwen2.5-1.5B-Instruct}" --weight-bridge-mode shared_vllm \
    --environment "${ENVIRONMENT:-gsm8k}" --environment-args "--env.group_size 4 ${ENVIRONMENT_ARGS:-}" \
    --training-steps "${STEPS:-3}" --batch-size 4 --gradient-accumulation-steps 4 --kl-coef 0 \
    --gpu-memory-utilization "${GPU_MEMORY:-0.45}" --save-path "${SAVE_PATH:-single_copy_test}" --overwrite "$@"
