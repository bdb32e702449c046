"""An engine that samples with one or more vLLM servers (replicas).

It adds what vLLM does not do by itself:
- Each load of an adapter gets a new name on the servers. vLLM's prefix cache depends on that name, so the KV of one
  policy version is never used for another. When an adapter is loaded again under the same name, requests that still
  run with the earlier weights are not affected.
- On CPU, vLLM 0.32 computes requests for the base model with some adapter's weights when requests for adapters are in
  the same batch (https://github.com/vllm-project/vllm/issues/48421). Once an adapter is loaded, requests for the base
  model therefore use an adapter of zeros.
- A replica that was restarted and has lost an adapter gets it again. A replica that does not answer gets no requests
  for a while, if there are others; the requests that it was sampling continue elsewhere (`ProcessEngine`).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import secrets
import tempfile
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from art.engine import AdapterInfo, EngineInfo, GenerateRequest, TokenChunk, check_request, check_score
from art.engines.routing import Router
from art.engines.vllm import grammars
from art.engines.vllm.replica import ConnectionLostError, Replica
from art.errors import AdapterError, NotFoundError, ProcessError
from art.kernels.grammar import Vocabulary

logger = logging.getLogger(__name__)

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
Weights = dict[str, npt.NDArray[Any]]
MAX_SCORED_PROMPTS = 8
"""Prompts that a server scores at once."""
PROBE_TOKENS = 64
AGREEMENT_NATS = 0.05
"""Largest root mean square difference between log-probs of two replicas. bfloat16 on different devices causes less."""


@dataclass(eq=False, slots=True)
class ServedPolicy:
    """Weights that requests can use: the base model, or one load of an adapter."""

    served_name: str
    path: Path | None
    num_users: int = 0
    unused: asyncio.Event = field(default_factory=asyncio.Event)

    async def until_unused(self) -> None:
        if self.num_users:
            await self.unused.wait()


class VllmEngine:
    """An engine that samples with vLLM servers. `close()` closes the connections, not the servers."""

    def __init__(self, replicas: list[Replica], base_name: str, info: EngineInfo, *, shares_seed: bool = False) -> None:
        """
        Args:
            shares_seed: several copies of the model may draw with the same random numbers, so every request is sent
                with its seed. Otherwise equal prompts of a group could get equal answers.
        """
        self._replicas = replicas
        self._shares_seed = shares_seed
        self._scoring = [asyncio.Semaphore(MAX_SCORED_PROMPTS) for _ in replicas]
        self._info = replace(info, grammars=False)
        self._vocabulary: Vocabulary | None = None
        self._router = Router(len(replicas))
        self._base = ServedPolicy(base_name, None)
        self._zeros: ServedPolicy | None = None
        self._zeros_folder = tempfile.TemporaryDirectory(prefix="art-vllm-")
        self._adapters: dict[str, ServedPolicy] = {}
        self._load_lock = asyncio.Lock()
        """Held while adapters are loaded or unloaded, and from `sleep` to `wake`, when the servers have no memory."""
        self.asleep = False
        self._switching = asyncio.Lock()
        self._retiring: set[asyncio.Task[None]] = set()
        self._instance = secrets.token_hex(3)
        self._counter = itertools.count(1)

    async def serve_grammars(self, vocabulary: Vocabulary | None) -> None:
        """Honour grammars from now on, if every server proves that it does."""
        if vocabulary is not None:
            name, prove = self._base.served_name, grammars.samples_as_replayed
            if all(await asyncio.gather(*(prove(r, name, vocabulary, self._info) for r in self._replicas))):
                self._vocabulary, self._info = vocabulary, replace(self._info, grammars=True)

    async def close(self) -> None:
        for task in self._retiring:
            task.cancel()
        for replica in self._replicas:
            await replica.close()
        self._zeros_folder.cleanup()

    async def info(self) -> EngineInfo:
        return self._info

    async def generate(self, request: GenerateRequest, *, stream: bool) -> AsyncGenerator[TokenChunk, None]:
        check_request(request, self._info)
        if self._shares_seed:
            request = replace(request, repeatable=True)
        policy = self._policy(request.adapter)
        # vLLM refuses longer completions, and stop tokens outside the vocabulary.
        room = self._info.max_context - len(request.prompt_token_ids)
        stop = tuple(token for token in request.stop_token_ids if 0 <= token < self._info.vocab_size)
        request = replace(request, max_tokens=min(request.max_tokens, room), stop_token_ids=stop)
        matcher = None if self._vocabulary is None else await grammars.matcher_for(self._vocabulary, request)
        with self._use(policy, request.prompt_token_ids) as replica:
            for is_last_try in (False, True):
                try:
                    async with aclosing(replica.generate(request, policy.served_name, stream=stream)) as chunks:
                        async for chunk in chunks:
                            if matcher is not None:
                                grammars.follow(matcher, chunk)
                            yield chunk
                    return
                except NotFoundError as error:  # before the first token
                    if is_last_try:
                        raise
                    await self._restore(replica, policy, error)

    async def load_adapter(self, name: str, path: Path) -> AdapterInfo:
        info = await asyncio.to_thread(read_adapter, name, path)
        async with self._load_lock:
            try:
                if self._info.device == "cpu" and self._zeros is None:
                    folder = Path(self._zeros_folder.name) / "zeros"
                    await asyncio.to_thread(write_zeros, path, folder)
                    self._zeros = await self._load("zeros", folder)
                    # Requests for the real base model must not share a batch with an adapter.
                    await self._base.until_unused()
                policy = await self._load(name, path)
            except AdapterError as error:
                raise AdapterError(f"adapter {name!r}: {error.message}") from error
            previous = self._adapters.get(name)
            self._adapters[name] = policy
        if previous is not None:
            task = asyncio.create_task(self._retire(previous), name=f"retire-{previous.served_name}")
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)
        return info

    async def unload_adapter(self, name: str) -> None:
        policy = self._adapters.pop(name, None)
        if policy is not None:
            await self._retire(policy)

    async def sleep(self) -> None:
        """Put the servers to sleep. Running requests are paused, and continue after `wake` with their random numbers.

        So the trainer need not wait for the longest request. After `wake`, vLLM computes their keys and values again.
        """
        async with self._switching:
            if self.asleep:
                return
            await self._load_lock.acquire()
            self.asleep = True
            await asyncio.gather(*(replica.sleep() for replica in self._replicas))

    async def wake(self) -> None:
        async with self._switching:
            if not self.asleep:
                return
            await asyncio.gather(*(replica.wake() for replica in self._replicas))
            self.asleep = False
            self._load_lock.release()

    async def score(self, token_ids: list[int], adapter: str | None) -> list[float]:
        check_score(token_ids, self._info)
        policy = self._policy(adapter)
        with self._use(policy, token_ids) as replica:
            async with self._scoring[self._replicas.index(replica)]:
                try:
                    return await replica.score(token_ids, policy.served_name)
                except NotFoundError as error:
                    await self._restore(replica, policy, error)
                    return await replica.score(token_ids, policy.served_name)

    async def stats(self) -> dict[str, float]:
        totals: defaultdict[str, float] = defaultdict(float)
        for metrics in await asyncio.gather(*(replica.metrics() for replica in self._replicas)):
            for name, value in metrics.items():
                totals[name] += value
        return {
            "running": totals["num_requests_running"],
            "waiting": totals["num_requests_waiting"],
            "adapters": float(len(self._adapters)),
            "generated_tokens": totals["generation_tokens"],
            "prefill_tokens": totals["prompt_tokens"] - totals["prompt_tokens_cached"],
            "cached_tokens": totals["prompt_tokens_cached"],
            "kv_cache_usage": totals["kv_cache_usage_perc"] / len(self._replicas),
            "preemptions": totals["num_preemptions"],
        }

    def _policy(self, adapter: str | None) -> ServedPolicy:
        if adapter is None:
            return self._zeros or self._base
        if adapter not in self._adapters:
            raise NotFoundError(f"adapter {adapter!r} is not loaded (loaded: {sorted(self._adapters)})", param="model")
        return self._adapters[adapter]

    @contextmanager
    def _use(self, policy: ServedPolicy, token_ids: list[int]) -> Iterator[Replica]:
        """Choose the replica for a request, and count the request as a user of both while it runs."""
        number = self._router.choose(policy.served_name, token_ids)
        self._router.running[number] += 1
        policy.num_users += 1
        policy.unused.clear()
        try:
            yield self._replicas[number]
        except ConnectionLostError:
            self._router.avoid(number)
            raise
        finally:
            self._router.running[number] -= 1
            policy.num_users -= 1
            if policy.num_users == 0:
                policy.unused.set()

    async def _restore(self, replica: Replica, policy: ServedPolicy, error: NotFoundError) -> None:
        """Load an adapter again that a server has lost, as its `error` says."""
        if policy.path is None:
            raise error
        logger.warning("%s has lost adapter %s; loading it again", replica.url, policy.served_name)
        self._router.forget(self._replicas.index(replica))
        await replica.load_adapter(policy.served_name, policy.path)

    async def _load(self, name: str, path: Path) -> ServedPolicy:
        """Load an adapter into all servers that answer. The others get it with the first request that needs it.

        If a server refuses it or computes other log-probs, or if none answers, it is unloaded everywhere.
        """
        served_name = f"{name}.{self._instance}-{next(self._counter)}"
        loads = [replica.load_adapter(served_name, path) for replica in self._replicas]
        results = await asyncio.gather(*loads, return_exceptions=True)
        policy = ServedPolicy(served_name, path)
        lost = [error for error in results if isinstance(error, ConnectionLostError)]
        errors = [error for error in results if error is not None and error not in lost]
        try:
            if errors or len(lost) == len(results):
                raise [*errors, *lost][0]
            pairs = zip(self._replicas, results, strict=True)
            loaded = [replica for replica, error in pairs if error is None]
            if len(loaded) > 1:
                await self._check_agreement(policy, loaded)
        except BaseException:
            await self._unload(policy)
            raise
        return policy

    async def _check_agreement(self, policy: ServedPolicy, replicas: list[Replica]) -> None:
        """Check that all replicas compute the same log-probs, since the handshake checks only one of them."""
        path = [token % self._info.vocab_size for token in range(min(PROBE_TOKENS, self._info.max_context))]
        first, *others = await asyncio.gather(*(replica.score(path, policy.served_name) for replica in replicas))
        for replica, scores in zip(replicas[1:], others, strict=True):
            gap = math.sqrt(math.fsum((a - b) ** 2 for a, b in zip(first, scores, strict=True)) / len(first))
            if not gap <= AGREEMENT_NATS:
                raise AdapterError(
                    f"log-probs of {replica.url} differ from those of {replicas[0].url} by {gap:.3g} nats (root mean "
                    f"square; at most {AGREEMENT_NATS} is allowed). Check that both serve the same model and see the "
                    f"same files in {policy.path}"
                )

    async def _retire(self, policy: ServedPolicy) -> None:
        """Unload an adapter once its last request has ended."""
        await policy.until_unused()
        async with self._load_lock:
            await self._unload(policy)

    async def _unload(self, policy: ServedPolicy) -> None:
        unloads = [replica.unload_adapter(policy.served_name) for replica in self._replicas]
        for error in await asyncio.gather(*unloads, return_exceptions=True):
            if isinstance(error, ProcessError):
                logger.info("%s was not unloaded, since its server does not answer: %s", policy.served_name, error)
            elif error is not None:
                raise error


class MergedVllmEngine(VllmEngine):
    """A vLLM engine that holds one policy at a time, whose weights `replace_weights` loads. It loads no adapters.

    vLLM computes every request with the weights that it has, and its prefix cache does not know which weights computed
    an entry. So weights are exchanged only while no request runs, and the cache is emptied at the same time. A request
    for another policy than the loaded one is refused.
    """

    _current: tuple[str, ServedPolicy] | None = None
    """The policy that is served, with its name in requests; `None` while the weights are being exchanged."""

    async def load_adapter(self, name: str, path: Path) -> AdapterInfo:
        raise AdapterError(f'{name!r}: with `weights="merged"` vLLM serves whole models, not adapters')

    async def replace_weights(self, name: str, folder: Path) -> None:
        """Wait until no request runs, replace the weights by the model in `folder`, and serve it as `name`.

        Raises:
            ProcessError: the server failed. Nothing is served then.
        """
        async with self._load_lock:
            previous, self._current = self._current, None  # from here on new requests are refused
            if previous is not None:
                await previous[1].until_unused()
            await self._base.until_unused()
            for replica in self._replicas:
                await replica.replace_weights(folder)
            self._router.forget(0)
            self._current = name, ServedPolicy(self._base.served_name, None)

    async def unload_adapter(self, name: str) -> None:
        """Refuse requests for the policy from now on. Its weights stay in memory until others replace them."""
        if self._current is not None and self._current[0] == name:
            policy, self._current = self._current[1], None
            await policy.until_unused()

    def _policy(self, adapter: str | None) -> ServedPolicy:
        if self._current is not None and adapter == self._current[0]:
            return self._current[1]
        current = "nothing" if self._current is None else repr(self._current[0])
        requested = "the base model" if adapter is None else repr(adapter)
        raise NotFoundError(
            f'{requested} is not served: with `weights="merged"` vLLM holds one step at a time, now {current}. To '
            'sample from other steps or the base model, use `weights="lora"` or the embedded engine',
            param="model",
        )


def read_adapter(name: str, path: Path) -> AdapterInfo:
    """Check the adapter in folder `path` before vLLM loads it, since vLLM says little about what is wrong with it.

    `norm` is `None`: vLLM cannot report what it holds, and a norm of the file would only repeat the manifest's hash.
    What vLLM computes with it is checked later, when its log-probs are compared with the trainer's.

    Raises:
        AdapterError: the adapter cannot be used. The message names the file at fault.
    """
    config, weights = _read(name, path)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float):
        expected = "`r` must be a positive integer and `lora_alpha` a number"
        raise AdapterError(f"adapter {name!r}: {path / CONFIG_FILE}: {expected}, got {rank!r} and {alpha!r}")
    num_layers = sum(".lora_A." in key for key in weights)
    if not num_layers:
        raise AdapterError(f"adapter {name!r}: {path / WEIGHTS_FILE} contains no LoRA weights")
    return AdapterInfo(name=name, num_layers=num_layers, rank=rank, norm=None)


def write_zeros(source: Path, target: Path) -> None:
    """Write a copy of the adapter `source` in which every B is zero, so that it changes no weight.

    Raises:
        AdapterError: `source` cannot be read.
    """
    config, weights = _read("zeros", source)
    target.mkdir(parents=True, exist_ok=True)
    zeroed = {key: np.zeros_like(value) if ".lora_B." in key else value for key, value in weights.items()}
    save_file(zeroed, target / WEIGHTS_FILE)
    (target / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")


def _read(name: str, path: Path) -> tuple[dict[str, Any], Weights]:
    if not (path / CONFIG_FILE).exists() and (path / "model.safetensors").exists():
        hint = "the vLLM engine serves LoRA adapters. Train LoRA, or use the embedded engine"
        raise AdapterError(f"adapter {name!r}: {path} contains a whole model; {hint}")
    config_file = file = path / CONFIG_FILE
    try:
        config: Any = json.loads(file.read_bytes())
        file = path / WEIGHTS_FILE
        weights: Weights = load_file(file)
    except (OSError, ValueError, SafetensorError, TypeError) as error:
        raise AdapterError(f"adapter {name!r}: {file} is missing or corrupted ({error})") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = "`peft_type` must be 'LORA', the only kind that ART serves by vLLM"
        raise AdapterError(f"adapter {name!r}: {config_file}: {kind}")
    return config, weights
