# The ART server, for machines with and without a GPU; docs/images.md explains both:
#     docker build --target cpu --tag art-server:cpu .
#     docker build --target cuda --tag art-server:cuda .
# A build that never changes names the base image by its digest: --build-arg PYTHON_IMAGE=python@sha256:...
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ENV PATH=/opt/art/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/art
WORKDIR /src

FROM build AS build-cpu
# Packages that are large and seldom change get a layer of their own. PyTorch's index has torch without CUDA.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY constraints.txt ./
RUN pip install --no-deps --index-url "${TORCH_INDEX}" --constraint constraints.txt torch
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install --constraint constraints.txt ".[local]"

FROM build AS build-cuda
# The wheels bring CUDA's libraries. Of the machine only NVIDIA's driver and its container toolkit are needed.
COPY deploy/constraints-cuda.txt ./
RUN pip install --constraint constraints-cuda.txt torch vllm
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install --constraint constraints-cuda.txt ".[local,vllm]"

FROM ${PYTHON_IMAGE} AS server
# Tini is process 1: it passes signals on, and reaps processes whose parent was killed. Debian keeps only the newest
# release of a package, so those below have no version; the digest of the base image says which Debian it is.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini \
    && apt-get clean \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --user-group --home-dir /models --shell /usr/sbin/nologin art \
    && install --directory --owner art --group art --mode 0700 /data /models
# What libraries download and compile lies in the home folder, which is a volume. All else may be read-only.
ENV PATH=/opt/art/bin:$PATH PYTHONUNBUFFERED=1 HOME=/models HF_HOME=/models/huggingface \
    TORCHINDUCTOR_CACHE_DIR=/models/.cache/inductor
WORKDIR /data
VOLUME ["/data", "/models"]
EXPOSE 5000
# Whether it answers. Whether its models are loaded is /ready, which takes as long as a download the first time.
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s --retries=4 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:5000/health', timeout=4)"]
# SIGTERM ends the server within 10 s; give it that long.
STOPSIGNAL SIGTERM
ENTRYPOINT ["tini", "--", "art-server", "--host", "0.0.0.0", "--port", "5000", "--data-dir", "/data"]
# Where it comes from is for who builds it to say: --label org.opencontainers.image.source=... and .revision=...
LABEL org.opencontainers.image.title="ART server" \
    org.opencontainers.image.description="On-the-job training for LLM agents: an OpenAI-compatible server that trains its models" \
    org.opencontainers.image.version="0.1.0" \
    org.opencontainers.image.licenses="Apache-2.0"

FROM server AS cuda
# A compiler, for Triton's kernels.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && apt-get clean \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build-cuda /opt/art /opt/art
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001

FROM server AS cpu
COPY --from=build-cpu /opt/art /opt/art
USER 10001:10001
