# syntax=docker/dockerfile:1
# The ART server. For the CPU: `docker build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .`
# Wheels of torch for CUDA bring its libraries; of the machine only NVIDIA's driver and container toolkit are needed.
ARG PYTHON_VERSION=3.12

FROM python:${PYTHON_VERSION}-slim AS build
ARG TORCH_INDEX=https://pypi.org/simple
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/art
WORKDIR /src
# Large and seldom changed: a layer of its own.
RUN /opt/art/bin/pip install --index-url "${TORCH_INDEX}" "torch>=2.11,<2.14"
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN /opt/art/bin/pip install ".[local]"

FROM python:${PYTHON_VERSION}-slim
# A compiler, for torch.compile and Triton's kernels; curl is not needed, Python asks for the health.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --user-group --create-home --shell /usr/sbin/nologin art \
    && install --directory --owner art --group art --mode 0700 /data /models /home/art/.cache
COPY --from=build /opt/art /opt/art
ENV PATH=/opt/art/bin:$PATH PYTHONUNBUFFERED=1 HF_HOME=/models/huggingface \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER art
WORKDIR /data
VOLUME ["/data", "/models"]
EXPOSE 5000
# Whether it answers. Whether its models are loaded is /ready, which takes as long as a download the first time.
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s --retries=4 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:5000/health', timeout=4)"]
# SIGTERM ends it within 10 s, or `drain_s` later; give it that long.
STOPSIGNAL SIGTERM
ENTRYPOINT ["art-server", "--host", "0.0.0.0", "--port", "5000", "--data-dir", "/data"]
