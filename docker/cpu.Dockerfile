# unfreeze on CPUs. From the root of a clone (.git goes in, so that --version names the commit):
#   docker build -f docker/cpu.Dockerfile -t unfreeze:cpu .
#   docker run --rm -it --user "$(id -u):$(id -g)" -v "$PWD:/data" unfreeze:cpu sft --model Qwen/Qwen3-0.6B --data chat.jsonl
# Runs, models from the Hub and compiled loops stay in the mounted folder.

FROM python:3.12-bookworm AS build
RUN python -m venv /opt/unfreeze
ENV PATH=/opt/unfreeze/bin:$PATH
COPY constraints.txt /src/
RUN pip install --no-cache-dir -c /src/constraints.txt --index-url https://download.pytorch.org/whl/cpu torch
COPY . /src
RUN pip install --no-cache-dir -c /src/constraints.txt /src

FROM python:3.12-slim-bookworm
COPY --from=build /opt/unfreeze /opt/unfreeze
# USER in the environment: torch asks for a name, and --user may give a number that has none
ENV PATH=/opt/unfreeze/bin:$PATH \
    HOME=/data USER=unfreeze \
    HF_HOME=/data/.cache/huggingface NUMBA_CACHE_DIR=/data/.cache/numba
RUN useradd --uid 1000 --no-create-home unfreeze && install --directory --owner=unfreeze /data
USER 1000
WORKDIR /data
ENTRYPOINT ["unfreeze"]
CMD ["--help"]
