# unfreeze on NVIDIA GPUs: torch's CUDA build brings CUDA's libraries; the host has the driver and the NVIDIA container toolkit.
#   docker build -f docker/cuda.Dockerfile -t unfreeze:cuda .
#   docker run --rm -it --gpus all --ipc host --user "$(id -u):$(id -g)" -v "$PWD:/data" unfreeze:cuda sft --model Qwen/Qwen3-0.6B --data chat.jsonl
# On several GPUs: --entrypoint torchrun … --nproc-per-node 8 -m unfreeze sft …
# Runs, models from the Hub and compiled kernels stay in the mounted folder.

FROM python:3.12-bookworm AS build
RUN python -m venv /opt/unfreeze
ENV PATH=/opt/unfreeze/bin:$PATH
COPY constraints.txt /src/
RUN pip install --no-cache-dir -c /src/constraints.txt torch
COPY . /src
RUN pip install --no-cache-dir -c /src/constraints.txt /src

FROM python:3.12-slim-bookworm
# Triton compiles the launcher of each kernel with a C compiler
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/unfreeze /opt/unfreeze
# USER in the environment: torch asks for a name, and --user may give a number that has none
ENV PATH=/opt/unfreeze/bin:$PATH \
    HOME=/data USER=unfreeze \
    HF_HOME=/data/.cache/huggingface NUMBA_CACHE_DIR=/data/.cache/numba TRITON_CACHE_DIR=/data/.cache/triton \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN useradd --uid 1000 --no-create-home unfreeze && install --directory --owner=unfreeze /data
USER 1000
WORKDIR /data
ENTRYPOINT ["unfreeze"]
CMD ["--help"]
