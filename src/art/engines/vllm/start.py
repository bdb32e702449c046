"""From settings to an engine that samples: a server of our own, or those that run already."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import aclosing
from pathlib import Path
from typing import Any

from art.config import VllmConfig
from art.engine import EngineInfo, GenerateRequest
from art.engines.vllm.command import MODEL_NAME, find_installation, server_command, vllm_python
from art.engines.vllm.merged import MergedVllmEngine
from art.engines.vllm.replica import Limits, Replica
from art.engines.vllm.server import VllmServer
from art.engines.vllm.vllm_engine import VllmEngine
from art.errors import ArtError, ConfigError

MAX_CONTEXT = 32_768
"""Longest context if none is asked for."""


async def start_engine(
    model: str, config: VllmConfig, *, lora_rank: int | None, python: str | None = None, sleeps: bool = False
) -> tuple[VllmEngine, VllmServer | None]:
    """The engine, and the server that was started for it.

    Args:
        model: Folder or hub id of the base model.
        lora_rank: Of the adapters that will be loaded; `None` with `weights="merged"`.
        python: Interpreter of the environment with vLLM; by default that of ART_VLLM_PYTHON, else this one.
        sleeps: Whether it will be put to sleep.

    Raises:
        ConfigError: no vLLM is there, or it cannot serve this.
        ProcessError: a server did not start, or does not answer.
    """
    model_config = await asyncio.to_thread(_read_model_config, model)
    if config.urls:
        return await _connect(config, model_config), None
    installation = await asyncio.to_thread(find_installation, vllm_python(python))
    if config.device not in ("auto", installation.device):
        raise ConfigError(
            f"`engine.device` is {config.device!r}, but the vLLM {installation.vllm} of {installation.python} is built "
            f'for {installation.device}; set it to "auto", or install the other build'
        )
    max_context = _max_context(config, model_config)
    dtype = _dtype(config, installation.device)
    command = server_command(
        installation, model, config, dtype=dtype, max_context=max_context, lora_rank=lora_rank, sleeps=sleeps
    )
    num_threads = config.num_threads if installation.device == "cpu" else None
    is_merged = config.weights == "merged"
    server = await VllmServer.start(installation, command, num_threads, with_control=sleeps or is_merged)
    info = EngineInfo(
        vocab_size=_vocab_size(model_config),
        max_context=max_context,
        dtype=dtype,
        device=installation.device,
        draws_by_index=False,
        one_policy=is_merged,
    )
    engine = MergedVllmEngine if is_merged else VllmEngine
    return engine([server.replica], MODEL_NAME, info, config), server


async def _connect(config: VllmConfig, model_config: dict[str, Any]) -> VllmEngine:
    replicas = [Replica(url, os.environ.get("VLLM_API_KEY")) for url in config.urls]
    try:
        served = await asyncio.gather(*(replica.model() for replica in replicas))
        for replica, (name, _) in zip(replicas, served, strict=True):
            await _check_logprobs(replica, name)
    except ArtError:
        for replica in replicas:
            await replica.close()
        raise
    if len({name for name, _ in served}) > 1:
        raise ConfigError(f"the vLLM servers serve different models: {sorted({name for name, _ in served})}")
    longest = min(length for _, length in served) - 1  # see `score`: one more token is sampled
    if config.max_context is not None and config.max_context > longest:
        raise ConfigError(
            f"`engine.max_context` is {config.max_context}, but the vLLM servers allow {longest + 1} tokens, of which "
            "one is needed for scoring; start them with a larger --max-model-len"
        )
    device = "cuda" if config.device == "auto" else config.device
    info = EngineInfo(
        vocab_size=_vocab_size(model_config),
        max_context=config.max_context or longest,
        dtype=_dtype(config, device),
        device=device,
        draws_by_index=False,
    )
    return VllmEngine(replicas, served[0][0], info, config)


async def _check_logprobs(replica: Replica, model: str) -> None:
    """Log-probs must be those of the distribution that was sampled from, which is not vLLM's default."""
    prompt = [0, 0]
    request = GenerateRequest(
        request_id="check", adapter=None, prompt_token_ids=prompt, max_tokens=4, stop_token_ids=(), seed=0,
        temperature=2.0,
    )  # fmt: skip
    limits = Limits(vocab_size=1, max_context=len(prompt) + request.max_tokens)
    async with aclosing(replica.generate(request, model, limits, stream=False)) as chunks:
        sampled = await anext(chunks)
    plain = await replica.score(prompt + sampled.token_ids, model)
    if all(abs(a - b) < 1e-3 for a, b in zip(sampled.logprobs, plain[len(prompt) - 1 :], strict=True)):
        raise ConfigError(
            f"the vLLM server at {replica.url} reports log-probs before temperature and top_p; start it with "
            "--logprobs-mode processed_logprobs"
        )


def _dtype(config: VllmConfig, device: str) -> str:
    return ("float32" if device == "cpu" else "bfloat16") if config.dtype == "auto" else config.dtype


def _max_context(config: VllmConfig, model_config: dict[str, Any]) -> int:
    limit = _text_config(model_config).get("max_position_embeddings")
    if limit is None:
        return config.max_context or MAX_CONTEXT
    if config.max_context is not None and config.max_context > limit:
        raise ConfigError(f"`engine.max_context` is {config.max_context}, but the model is made for {limit} tokens")
    return config.max_context or min(int(limit), MAX_CONTEXT)


def _vocab_size(model_config: dict[str, Any]) -> int:
    size = _text_config(model_config).get("vocab_size")
    if not isinstance(size, int):
        raise ConfigError(f"the model's config.json has no `vocab_size`, got {size!r}")
    return size


def _text_config(model_config: dict[str, Any]) -> dict[str, Any]:
    """Models that see images keep what concerns text in a part of its own."""
    nested = model_config.get("text_config")
    return nested if isinstance(nested, dict) else model_config


def _read_model_config(model: str) -> dict[str, Any]:
    path = Path(model) / "config.json"
    try:
        if not Path(model).is_dir():
            from huggingface_hub import hf_hub_download

            path = Path(hf_hub_download(model, "config.json"))
        config: dict[str, Any] = json.loads(path.read_bytes())
        return config
    except (OSError, ValueError) as error:  # the hub's errors are among them
        raise ConfigError(
            f"base model {model!r} is neither a local folder with a config.json nor a model of the Hugging Face hub "
            f"({error})"
        ) from error
