"""An engine that samples with one or more vLLM servers (replicas).

It adds what vLLM does not do by itself:
- Each load of an adapter gets a new name on the servers. vLLM's prefix cache depends on that name, so the KV of one
  policy version is never used for another. When an adapter is loaded again under the same name, requests that still
  run with the earlier weights are not affected.
- On CPU, vLLM 0.32 computes requests for the base model with some adapter's weights when requests for adapters are in
  the same batch (https://github.com/vllm-project/vllm/issues/48421). Once an adapter is loaded, requests for the base
  model therefore use an adapter of zeros.
- A replica that was restarted and has lost an adapter gets it again. A replica that does not answer gets no requests
  for a while, if there are others; the requests that it was sampling continue elsewhere (`art.engines.process`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import secrets
import tempfile
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from art.config import VllmConfig
from art.config.engines import DEFAULT_RUNNING
from art.engine import AdapterInfo, EngineInfo, GenerateRequest, TokenChunk, check_request, check_score
from art.engines.vllm import grammars
from art.engines.vllm.adapters import read_adapter, write_zeros
from art.engines.vllm.replica import ConnectionLostError, Replica
from art.engines.vllm.routing import Router
from art.errors import AdapterError, NotFoundError, OverloadedError, ProcessError
from art.kernels.grammar import Vocabulary

logger = logging.getLogger(__name__)

MAX_SCORED_TOKENS = 32_768
"""Tokens of prompts that a server scores at once."""
MAX_SCORED_PROMPTS = 8
PROBE_TOKENS = 64
AGREEMENT_NATS = 0.05
"""Largest root mean square difference between log-probs of two replicas. bfloat16 on different devices causes less."""


class ScoreLimit:
    """Bounds how many prompts, and tokens of them, one server scores at once. It belongs to one event loop."""

    def __init__(self, max_tokens: int = MAX_SCORED_TOKENS, max_prompts: int = MAX_SCORED_PROMPTS) -> None:
        self._max_tokens = max_tokens
        self._prompts = asyncio.Semaphore(max_prompts)
        self._changed = asyncio.Condition()
        self.num_tokens = 0
        """Tokens that are being scored."""

    @asynccontextmanager
    async def taken(self, num_tokens: int) -> AsyncIterator[None]:
        """Wait for room, and hold it during the body. A prompt that is longer than the limit is scored alone."""
        async with self._prompts:
            async with self._changed:
                await self._changed.wait_for(
                    lambda: not self.num_tokens or self.num_tokens + num_tokens <= self._max_tokens
                )
                self.num_tokens += num_tokens
            try:
                yield
            finally:
                self.num_tokens -= num_tokens
                async with self._changed:
                    self._changed.notify_all()


@dataclass(eq=False, slots=True)
class Policy:
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

    def __init__(
        self,
        replicas: list[Replica],
        base_name: str,
        info: EngineInfo,
        config: VllmConfig,
        *,
        shares_seed: bool = False,
    ) -> None:
        """
        Args:
            shares_seed: several copies of the model may draw with the same random numbers, so every request gets a
                seed of its own. Otherwise equal prompts of a group could get equal answers.
        """
        self._replicas = replicas
        self._shares_seed = shares_seed
        self._score_limits = [ScoreLimit() for _ in replicas]
        self._info = replace(info, grammars=False)
        self._vocabulary: Vocabulary | None = None
        self._max_requests = ((config.max_running or DEFAULT_RUNNING) + config.max_waiting) * len(replicas)
        self._router = Router(len(replicas))
        self._base = Policy(base_name, None)
        self._zeros: Policy | None = None
        self._needs_zeros = info.device == "cpu"
        self._zeros_folder = tempfile.TemporaryDirectory(prefix="art-vllm-")
        self._adapters: dict[str, Policy] = {}
        self._load_lock = asyncio.Lock()
        """Held while adapters are loaded or unloaded, and from `sleep` to `wake`, when the servers have no memory."""
        self.asleep = False
        self._switching = asyncio.Lock()
        self._retiring: set[asyncio.Task[None]] = set()
        self._instance = secrets.token_hex(3)
        self._counter = itertools.count(1)
        self._num_requests = 0

    async def serve_grammars(self, vocabulary: Vocabulary | None) -> None:
        """Honour grammars from now on, if every server proves that it does."""
        if vocabulary is None:
            return
        trials = (
            grammars.samples_as_replayed(r, self._base.served_name, vocabulary, self._info) for r in self._replicas
        )
        if all(await asyncio.gather(*trials)):
            self._vocabulary = vocabulary
            self._info = replace(self._info, grammars=True)

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
        if self._num_requests >= self._max_requests:
            raise OverloadedError(f"{self._num_requests} requests are running or waiting; try again later")
        # vLLM refuses longer completions, and stop tokens outside the vocabulary.
        room = self._info.max_context - len(request.prompt_token_ids)
        stop = tuple(token for token in request.stop_token_ids if 0 <= token < self._info.vocab_size)
        request = replace(request, max_tokens=min(request.max_tokens, room), stop_token_ids=stop)
        self._num_requests += 1
        try:
            watch = None
            if self._vocabulary is not None and request.grammar is not None:
                watch = await grammars.watch(self._vocabulary, request)
            with self._use(policy, request.prompt_token_ids) as replica:
                for is_last_try in (False, True):
                    try:
                        async with aclosing(replica.generate(request, policy.served_name, stream=stream)) as chunks:
                            async for chunk in chunks:
                                if watch is not None:
                                    watch.check(chunk)
                                yield chunk
                        return
                    except NotFoundError:  # before the first token
                        if is_last_try or policy.path is None:
                            raise
                        await self._restore(replica, policy)
        finally:
            self._num_requests -= 1

    async def load_adapter(self, name: str, path: Path) -> AdapterInfo:
        info = await asyncio.to_thread(read_adapter, name, path)
        async with self._load_lock:
            try:
                if self._needs_zeros and self._zeros is None:
                    await self._load_zeros(path)
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
            async with self._score_limits[self._replicas.index(replica)].taken(len(token_ids)):
                return await self._score(replica, token_ids, policy)

    async def _score(self, replica: Replica, token_ids: list[int], policy: Policy) -> list[float]:
        try:
            return await replica.score(token_ids, policy.served_name)
        except NotFoundError:
            if policy.path is None:
                raise
            await self._restore(replica, policy)
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

    def _policy(self, adapter: str | None) -> Policy:
        if adapter is None:
            return self._zeros or self._base
        if adapter not in self._adapters:
            raise NotFoundError(f"adapter {adapter!r} is not loaded (loaded: {sorted(self._adapters)})", param="model")
        return self._adapters[adapter]

    @contextmanager
    def _use(self, policy: Policy, token_ids: list[int]) -> Iterator[Replica]:
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

    async def _restore(self, replica: Replica, policy: Policy) -> None:
        assert policy.path is not None
        logger.warning("%s has lost adapter %s; loading it again", replica.url, policy.served_name)
        self._router.forget(self._replicas.index(replica))
        await replica.load_adapter(policy.served_name, policy.path)

    async def _load(self, name: str, path: Path) -> Policy:
        """Load an adapter into all servers that answer. The others get it with the first request that needs it.

        If a server refuses it or computes other log-probs, or if none answers, it is unloaded everywhere.
        """
        served_name = f"{name}.{self._instance}-{next(self._counter)}"
        loads = [replica.load_adapter(served_name, path) for replica in self._replicas]
        results = await asyncio.gather(*loads, return_exceptions=True)
        policy = Policy(served_name, path)
        lost = [error for error in results if isinstance(error, ConnectionLostError)]
        errors = [error for error in results if error is not None and error not in lost]
        try:
            if errors or len(lost) == len(results):
                raise [*errors, *lost][0]
            pairs = zip(self._replicas, results, strict=True)
            await self._check_agreement(policy, [replica for replica, error in pairs if error is None])
        except BaseException:
            await self._unload(policy)
            raise
        return policy

    async def _check_agreement(self, policy: Policy, replicas: list[Replica]) -> None:
        """Check that all replicas compute the same log-probs, since the handshake checks only one of them."""
        if len(replicas) < 2:
            return
        path = [token % self._info.vocab_size for token in range(min(PROBE_TOKENS, self._info.max_context))]
        first, *others = await asyncio.gather(*(replica.score(path, policy.served_name) for replica in replicas))
        for replica, scores in zip(replicas[1:], others, strict=True):
            gap = math.sqrt(math.fsum((a - b) ** 2 for a, b in zip(first, scores, strict=True)) / len(first))
            if not gap <= AGREEMENT_NATS:
                raise AdapterError(
                    f"{policy.served_name}: log-probs of {replica.url} differ from those of {replicas[0].url} by "
                    f"{gap:.3g} nats (root mean square; at most {AGREEMENT_NATS} is allowed). Check that both serve "
                    f"the same model and see the same files in {policy.path}"
                )

    async def _load_zeros(self, source: Path) -> None:
        folder = Path(self._zeros_folder.name) / "zeros"
        await asyncio.to_thread(write_zeros, source, folder)
        self._zeros = await self._load("zeros", folder)
        await self._base.until_unused()  # requests for the real base model must not share a batch with an adapter

    async def _retire(self, policy: Policy) -> None:
        """Unload an adapter once its last request has ended."""
        await policy.until_unused()
        async with self._load_lock:
            await self._unload(policy)

    async def _unload(self, policy: Policy) -> None:
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

    _current: tuple[str, Policy] | None = None
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
            self._current = name, Policy(self._base.served_name, None)

    async def unload_adapter(self, name: str) -> None:
        """Refuse requests for the policy from now on. Its weights stay in memory until others replace them."""
        if self._current is not None and self._current[0] == name:
            policy, self._current = self._current[1], None
            await policy.until_unused()

    def _policy(self, adapter: str | None) -> Policy:
        if self._current is not None and adapter == self._current[0]:
            return self._current[1]
        current = "nothing" if self._current is None else repr(self._current[0])
        requested = "the base model" if adapter is None else repr(adapter)
        raise NotFoundError(
            f'{requested} is not served: with `weights="merged"` vLLM holds one step at a time, now {current}. To '
            'sample from other steps or the base model, use `weights="lora"` or the embedded engine',
            param="model",
        )
