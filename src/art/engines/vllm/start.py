"""Make a vLLM engine from settings: start a server, or connect to servers that already run.

A started server listens on a free loopback port and requires a key. vLLM's development routes require no key, so a
server that needs them listens on a socket file instead, in a folder that only this user can open.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import re
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from art.config import VllmConfig
from art.config.engines import DEFAULT_RUNNING
from art.engine import EngineInfo, GenerateRequest
from art.engines.vllm import grammars
from art.engines.vllm.command import (
    MODEL_NAME,
    Installation,
    find_installation,
    replicas_share_seed,
    server_command,
    server_environment,
    vllm_python,
)
from art.engines.vllm.replica import Replica
from art.engines.vllm.vllm_engine import MergedVllmEngine, VllmEngine
from art.errors import ArtError, ConfigError, ProcessError
from art.memory.engine import max_running_of
from art.memory.shape import shape_of

logger = logging.getLogger(__name__)

MAX_CONTEXT = 32_768
"""Longest context, in tokens, if `engine.max_context` is not set."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What a server is started for, beside its settings."""

    lora_rank: int | None
    """Rank of the adapters that will be loaded; `None` with `weights="merged"`."""
    python: str | None = None
    """Interpreter of the environment with vLLM; by default that of ART_VLLM_PYTHON, else this one."""
    sleeps: bool = False
    """Whether the engine will be put to sleep."""
    memory_bytes: int | None = None
    """Memory of the smallest of its GPUs, if known."""


async def start_engine(model: str, config: VllmConfig, launch: Launch) -> tuple[VllmEngine, VllmServer | None]:
    """Start a vLLM server, or connect to those in `engine.urls`. Return the engine and the started server, if any.

    Args:
        model: folder or hub id of the base model.

    Raises:
        ConfigError: vLLM is not installed, or it cannot serve the model with these settings.
        ProcessError: a server did not start, or does not answer.
    """
    model_config = await asyncio.to_thread(_read_model_config, model)
    if config.urls:
        return await _connect(model, config, model_config), None
    installation = await asyncio.to_thread(find_installation, vllm_python(launch.python))
    if config.device not in ("auto", installation.device):
        raise ConfigError(
            f"`engine.device` is {config.device!r}, but vLLM {installation.vllm} in the environment of "
            f'{installation.python} is built for {installation.device}; set `engine.device` to "auto", or install the '
            "other build"
        )
    is_merged = config.weights == "merged"
    vocab_size = _vocab_size(model_config)
    vocabulary = await asyncio.to_thread(grammars.load_vocabulary, model, vocab_size, installation)
    info = EngineInfo(
        vocab_size=vocab_size,
        max_context=_max_context(config, model_config),
        longest_context=model_config.get("max_position_embeddings"),
        dtype=_dtype(config, installation.device),
        device=installation.device,
        draws_by_index=False,
        resumes_grammars=False,
        grammars=vocabulary is not None,
        one_policy=is_merged,
    )
    if config.max_running is None:
        running = _max_running(config, model_config, info, launch.memory_bytes)
        config = config.model_copy(update={"max_running": running})
        info = replace(info, max_running=running * config.num_replicas)
    command = server_command(installation, model, config, info, lora_rank=launch.lora_rank, sleeps=launch.sleeps)
    num_threads = config.num_threads if installation.device == "cpu" else None
    server = await VllmServer.start(installation, command, num_threads, with_control=launch.sleeps or is_merged)
    kind = MergedVllmEngine if is_merged else VllmEngine
    engine = kind([server.replica], MODEL_NAME, info, config, shares_seed=replicas_share_seed(installation, config))
    await engine.serve_grammars(vocabulary)
    return engine, server


async def _connect(model: str, config: VllmConfig, model_config: dict[str, Any]) -> VllmEngine:
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
    longest = min(length for _, length in served) - 1  # `Replica.score` samples one token more
    if config.max_context is not None and config.max_context > longest:
        raise ConfigError(
            f"`engine.max_context` is {config.max_context}, but the vLLM servers allow {longest + 1} tokens, of which "
            "one is needed for scoring; start them with a larger --max-model-len"
        )
    device = "cuda" if config.device == "auto" else config.device
    info = EngineInfo(
        vocab_size=_vocab_size(model_config),
        max_context=config.max_context or longest,
        longest_context=longest,
        dtype=_dtype(config, device),
        device=device,
        draws_by_index=False,
        resumes_grammars=False,
    )
    engine = VllmEngine(replicas, served[0][0], info, config, shares_seed=len(replicas) > 1)
    await engine.serve_grammars(await asyncio.to_thread(grammars.load_vocabulary, model, info.vocab_size, None))
    return engine


async def _check_logprobs(replica: Replica, model: str) -> None:
    """Refuse a server that reports log-probs before temperature and top_p, as vLLM does by default."""
    prompt = [0, 0]
    request = GenerateRequest(
        request_id="check", adapter=None, prompt_token_ids=prompt, max_tokens=4, stop_token_ids=(), seed=0,
        temperature=2.0,
    )  # fmt: skip
    async with aclosing(replica.generate(request, model, stream=False)) as chunks:
        sampled = await anext(chunks)
    plain = await replica.score(prompt + sampled.token_ids, model)
    if all(abs(a - b) < 1e-3 for a, b in zip(sampled.logprobs, plain[len(prompt) - 1 :], strict=True)):
        raise ConfigError(
            f"the vLLM server at {replica.url} reports log-probs before temperature and top_p; start it with "
            "--logprobs-mode processed_logprobs"
        )


def _max_running(config: VllmConfig, model: dict[str, Any], info: EngineInfo, memory_bytes: int | None) -> int:
    try:
        shape = shape_of(model)
    except (KeyError, TypeError, ValueError) as error:
        logger.info("the shape of the model is unknown (%s): vLLM computes %d requests at once", error, DEFAULT_RUNNING)
        return DEFAULT_RUNNING
    running = max_running_of(config, shape, device=info.device, memory_bytes=memory_bytes, context=info.max_context)
    logger.info("vLLM computes up to %d requests at once; `max_running` sets another number", running)
    return running


def _dtype(config: VllmConfig, device: str) -> str:
    return ("float32" if device == "cpu" else "bfloat16") if config.dtype == "auto" else config.dtype


def _max_context(config: VllmConfig, model_config: dict[str, Any]) -> int:
    limit = model_config.get("max_position_embeddings") or math.inf
    if config.max_context is not None and config.max_context > limit:
        raise ConfigError(
            f"`engine.max_context` is {config.max_context}, but the model supports at most {limit} tokens "
            "(`max_position_embeddings`)"
        )
    return config.max_context or int(min(limit, MAX_CONTEXT))


def _vocab_size(model_config: dict[str, Any]) -> int:
    size = model_config.get("vocab_size")
    if not isinstance(size, int):
        raise ConfigError(f"`vocab_size` in the model's config.json must be an integer, got {size!r}")
    return size


def _read_model_config(model: str) -> dict[str, Any]:
    """The part of a model's config that describes its text model; multimodal models have it in `text_config`."""
    path = Path(model) / "config.json"
    try:
        if not Path(model).is_dir():
            from huggingface_hub import hf_hub_download

            path = Path(hf_hub_download(model, "config.json"))
        config: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:  # errors of huggingface_hub are subclasses
        raise ConfigError(
            f"base model {model!r} is not a local folder with a readable config.json, and the Hugging Face hub does "
            f"not provide it ({error})"
        ) from error
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


# -- the server process --

POLL_S = 0.2
CAUSE_WINDOW_S = 30.0
"""The first error that the server printed in this many seconds before its death is reported as the cause."""
DRAIN_TIMEOUT_S = 2.0
GUARD = Path(__file__).with_name("guard.py")
_PREFIX = re.compile(r"^\(\w+ pid=\d+\) (?:ERROR [\d-]+ [\d:]+ \[[^\]]*\] ?)?")
"""The prefix of error lines and of lines printed without a logger. It leaves warnings with text before the cause."""
_CAUSE = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt)(?:: |$)|.* died unexpectedly")
_HINTS = {
    "module 'triton": "with adapters, vLLM needs Triton for mixtures of experts, and there is no working Triton here; "
    "vLLM's CPU package does not include it",
    "is not supported by MLA": "on CPU, vLLM supports multi-head latent attention only in the width of DeepSeek-V3: "
    "512 + 64",
}
"""Explanations of causes that are hard to understand, by a part of their text."""
_NO_CAUSE = re.compile(r"Engine core initialization failed|EngineDeadError|WorkerProc initialization failed")


class VllmServer:
    """A vLLM server that this process has started, and the `replica` that calls it."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        replica: Replica,
        folder: tempfile.TemporaryDirectory[str] | None = None,
    ) -> None:
        self._process = process
        self._folder = folder
        self._errors: deque[tuple[float, str]] = deque(maxlen=50)
        self.replica = replica
        self._output = asyncio.get_running_loop().create_task(self._forward_output(), name="vllm-output")

    @classmethod
    async def start(
        cls, installation: Installation, command: list[str], num_threads: int | None, *, with_control: bool = False
    ) -> VllmServer:
        """Start a server and wait until it can sample.

        Args:
            with_control: open vLLM's development routes, to this user only.

        Raises:
            ProcessError: the server ended before it was ready. The message has the error that it printed.
        """
        key = secrets.token_urlsafe(24)
        if with_control:
            folder = tempfile.TemporaryDirectory(prefix="art-vllm-")
            path = Path(folder.name) / "socket"
            address, replica = f"--uds={path}", Replica("http://vllm", key, path)
        else:
            port, folder = _free_port(), None
            address, replica = f"--port={port}", Replica(f"http://127.0.0.1:{port}", key)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(GUARD), *command, address),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=server_environment(installation, key, num_threads, with_control=with_control),
            start_new_session=True,
            limit=2**20,
        )
        server = cls(process, replica, folder)
        try:
            await server._until_ready()
        except BaseException:
            await server.close()
            raise
        return server

    @property
    def pid(self) -> int:
        """Process id of the guard, the parent of all processes of the server."""
        return self._process.pid

    async def close(self) -> None:
        await self._end()
        await self.replica.close()

    async def death(self) -> ProcessError:
        """Wait until the server is dead. Returns the reason, as far as it is known."""
        await self._exit()
        await self._end()  # the guard may have been killed alone
        recent = [text for at, text in self._errors if time.monotonic() - at < CAUSE_WINDOW_S]
        # The exit status tells nothing: it is that of the guard, which kills itself together with its group.
        hints = [f" ({hint})" for part, hint in _HINTS.items() if recent and part in recent[0]]
        return ProcessError("the vLLM server died" + (f": {recent[0]}" if recent else "") + "".join(hints))

    async def _exit(self) -> None:
        """Wait until the guard has ended. `Process.wait` would also wait for children that keep its output open."""
        while self._process.returncode is None:
            await asyncio.sleep(POLL_S)

    async def _end(self) -> None:
        """Kill the group, and read the output to its end, which comes when no process of the group is left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._exit()
        await asyncio.wait([self._output], timeout=DRAIN_TIMEOUT_S)
        self._output.cancel()
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._folder is not None:
            self._folder.cleanup()

    async def _until_ready(self) -> None:
        death = asyncio.ensure_future(self.death())
        try:
            while not await self.replica.is_healthy():
                await asyncio.wait([death], timeout=POLL_S)
                if death.done():
                    raise death.result()
            # The first request compiles and allocates. Do that now, so that it is not mistaken for a stall later.
            await self.replica.score([0, 0], MODEL_NAME)
        except ArtError as error:
            if death.done() or not isinstance(error, ProcessError):
                raise
            raise await death from error
        finally:
            death.cancel()

    async def _forward_output(self) -> None:
        """Copy the server's output to this process's log, and remember errors that may be the cause of a death."""
        assert self._process.stdout is not None
        while not self._process.stdout.at_eof():
            try:
                line = await self._process.stdout.readline()
            except ValueError:  # longer than the limit; asyncio has dropped the line
                line = b"[a very long line]\n"
            sys.stderr.write(line.decode(errors="replace"))
            sys.stderr.flush()
            text = _PREFIX.sub("", line.decode(errors="replace")).strip()
            if _CAUSE.match(text) and not _NO_CAUSE.search(text):
                self._errors.append((time.monotonic(), text[:1000]))


def _free_port() -> int:
    """Find a free port. If another program takes it before vLLM does, vLLM ends and is started again on another."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port
