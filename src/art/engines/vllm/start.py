"""Make a vLLM engine from settings: start a server, or connect to servers that already run.

A started server listens on a socket file in a folder that only this user can open, since vLLM's development routes (for
sleep and the exchange of weights) require no key.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import secrets
import signal
import sys
import tempfile
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

from art.config import VllmConfig
from art.config.processes import DEFAULT_RUNNING
from art.engine import EngineInfo, GenerateRequest, only_chunk
from art.engines.vllm import grammars
from art.engines.vllm.command import (
    MODEL_NAME,
    Installation,
    find_installation,
    server_command,
    server_environment,
    vllm_python,
)
from art.engines.vllm.replica import Replica
from art.engines.vllm.vllm_engine import MergedVllmEngine, VllmEngine
from art.errors import ArtError, ConfigError, ProcessError
from art.memory import choose_max_running, shape_of
from art.protocol.calls import StartVllm

logger = logging.getLogger(__name__)

MAX_CONTEXT = 32_768
"""Longest context, in tokens, if `engine.max_context` is not set."""
_DTYPES = {"cpu": "float32", "cuda": "bfloat16"}


async def start_engine(call: StartVllm) -> tuple[VllmEngine, VllmServer | None]:
    """Start a vLLM server, or connect to those in `engine.urls`. Return the engine and the started server, if any.

    Raises:
        ConfigError: vLLM is not installed, or it cannot serve the model with these settings.
        ProcessError: a server did not start, or does not answer.
    """
    model, config = call.model, call.config
    model_config = await asyncio.to_thread(_read_model_config, model)
    if config.urls:
        return await _connect(model, config, model_config), None
    installation = await asyncio.to_thread(find_installation, vllm_python())
    if config.device not in ("auto", installation.device):
        problem = f"vLLM {installation.vllm} at {installation.python} is built for {installation.device}"
        hint = 'set it to "auto", or install the other build'
        raise ConfigError(f"`engine.device` is {config.device!r}, but {problem}; {hint}")
    limit = model_config.get("max_position_embeddings") or sys.maxsize
    if config.max_context is not None and config.max_context > limit:
        problem = f"`max_position_embeddings` of the model is {limit}"
        raise ConfigError(f"`engine.max_context` is {config.max_context}, but {problem}; use at most that")
    is_merged = config.weights == "merged"
    vocab_size = model_config["vocab_size"]
    vocabulary = await asyncio.to_thread(grammars.vocabulary_for, model, vocab_size, installation)
    info = EngineInfo(
        vocab_size=vocab_size,
        max_context=config.max_context or min(limit, MAX_CONTEXT),
        longest_context=model_config.get("max_position_embeddings"),
        dtype=config.dtype if config.dtype != "auto" else _DTYPES[installation.device],
        device=installation.device,
        draws_by_index=False,
        resumes_grammars=False,
        grammars=vocabulary is not None,
        one_policy=is_merged,
    )
    if config.max_running is None:
        try:
            shape = shape_of(model_config)
        except (KeyError, TypeError, ValueError) as error:
            logger.info("the shape of the model is unknown: %s", error)
            running = DEFAULT_RUNNING
        else:
            memory, context = call.memory_bytes, info.max_context
            running = choose_max_running(config, shape, device=info.device, memory_bytes=memory, context=context)
        logger.info("vLLM computes up to %d requests at once; `max_running` sets another number", running)
        config = config.model_copy(update={"max_running": running})
        info = replace(info, max_running=running * config.num_copies)
    command = server_command(installation, model, config, info, lora_rank=call.lora_rank, sleeps=call.sleeps)
    num_threads = config.num_threads if installation.device == "cpu" else None
    server = await VllmServer.start(installation, command, num_threads, with_control=call.sleeps or is_merged)
    kind = MergedVllmEngine if is_merged else VllmEngine
    engine = kind([server.replica], MODEL_NAME, info, shares_seed=config.num_copies > 1)
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
        problem = f"the vLLM servers allow {longest + 1} tokens, of which one is needed for scoring"
        hint = "start them with a larger --max-model-len"
        raise ConfigError(f"`engine.max_context` is {config.max_context}, but {problem}; {hint}")
    device = "cuda" if config.device == "auto" else config.device
    info = EngineInfo(
        vocab_size=model_config["vocab_size"],
        max_context=config.max_context or longest,
        longest_context=longest,
        dtype=config.dtype if config.dtype != "auto" else _DTYPES.get(device, "bfloat16"),
        device=device,
        draws_by_index=False,
        resumes_grammars=False,
    )
    engine = VllmEngine(replicas, served[0][0], info, shares_seed=len(replicas) > 1)
    await engine.serve_grammars(await asyncio.to_thread(grammars.vocabulary_for, model, info.vocab_size, None))
    return engine


async def _check_logprobs(replica: Replica, model: str) -> None:
    """Refuse a server that reports log-probs before temperature and top_p, as vLLM does by default."""
    prompt = [0, 0]
    request = GenerateRequest(
        request_id="check", adapter=None, prompt_token_ids=prompt, max_tokens=4, stop_token_ids=(), seed=0,
        temperature=2.0,
    )  # fmt: skip
    sampled = await only_chunk(replica.generate(request, model, stream=False))
    plain = await replica.score(prompt + sampled.token_ids, model)
    if all(abs(a - b) < 1e-3 for a, b in zip(sampled.logprobs, plain[len(prompt) - 1 :], strict=True)):
        problem = f"the vLLM server at {replica.url} reports log-probs before temperature and top_p"
        raise ConfigError(f"{problem}; start it with --logprobs-mode processed_logprobs")


def _read_model_config(model: str) -> dict[str, Any]:
    """The part of a model's config that describes its text model; multimodal models have it in `text_config`."""
    path = Path(model) / "config.json"
    try:
        if not Path(model).is_dir():
            from huggingface_hub import hf_hub_download

            path = Path(hf_hub_download(model, "config.json"))
        config: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:  # errors of huggingface_hub are subclasses
        problem = "is not a local folder with a readable config.json, and the Hugging Face hub does not have it"
        raise ConfigError(f"base model {model!r} {problem} ({error})") from error
    config = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    if not isinstance(size := config.get("vocab_size"), int):
        raise ConfigError(f"`vocab_size` in the model's config.json must be an integer, got {size!r}")
    return config


# -- the server process --

POLL_S = 0.2
CAUSE_WINDOW_S = 30.0
"""The first error that the server printed in this many seconds before its death is reported as the cause."""
DRAIN_TIMEOUT_S = 2.0
GUARD = Path(__file__).with_name("guard.py")
_PREFIX = re.compile(r"^\(\w+ pid=\d+\) (?:ERROR [\d-]+ [\d:]+ \[[^\]]*\] ?)?")
"""The prefix of error lines and of lines printed without a logger. It leaves warnings with text before the cause."""
_CAUSE = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt)(?:: |$)|.* died unexpectedly")
_NO_CAUSE = re.compile(r"Engine core initialization failed|EngineDeadError|WorkerProc initialization failed")


class VllmServer:
    """A vLLM server that this process has started, and the `replica` that calls it."""

    def __init__(
        self, process: asyncio.subprocess.Process, replica: Replica, folder: tempfile.TemporaryDirectory[str]
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
            with_control: open vLLM's development routes.

        Raises:
            ProcessError: the server ended before it was ready. The message has the error that it printed.
        """
        key = secrets.token_urlsafe(24)
        folder = tempfile.TemporaryDirectory(prefix="art-vllm-")
        path = Path(folder.name) / "socket"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(GUARD), *command, f"--uds={path}"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=server_environment(installation, key, num_threads, with_control=with_control),
            start_new_session=True,
            limit=2**20,
        )
        server = cls(process, Replica("http://vllm", key, path), folder)
        try:
            await server._until_ready()
        except BaseException:
            await server.close()
            raise
        return server

    async def close(self) -> None:
        await self._end()
        await self.replica.close()

    async def death(self) -> ProcessError:
        """Wait until the server is dead. Returns the reason, as far as it is known."""
        await self._exit()
        await self._end()  # the guard may have been killed alone
        recent = [text for at, text in self._errors if time.monotonic() - at < CAUSE_WINDOW_S]
        # The exit status tells nothing: it is that of the guard, which kills itself together with its group.
        return ProcessError("the vLLM server died" + (f": {recent[0]}" if recent else ""))

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
