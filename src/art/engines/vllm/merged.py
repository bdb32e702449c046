"""A vLLM server whose weights are exchanged: it holds one policy, in place of the base model.

vLLM keys its prefix cache by tokens alone then, and computes all requests with the weights that are there. So weights
come only when no request runs, the cache is emptied with them, and a request that names another policy than the one
that is there is refused, never served.
"""

from __future__ import annotations

from pathlib import Path

from art.engine import AdapterInfo
from art.engines.vllm.vllm_engine import Policy, VllmEngine, until_unused
from art.errors import AdapterError, NotFoundError


class MergedVllmEngine(VllmEngine):
    """Implements `art.engine.SleepingEngine`, but that weights come as folders, by `replace_weights`."""

    _current: tuple[str, Policy] | None = None
    """What is served, by the name that requests give it; `None` while that is not known for sure."""

    async def load_adapter(self, name: str, path: Path) -> AdapterInfo:
        raise AdapterError(f"{name!r}: this vLLM was started without adapters; it gets whole models")

    async def replace_weights(self, name: str, folder: Path) -> None:
        """Serve the model in `folder` as `name`, once no request runs any more; what was there before is gone.

        Raises:
            ProcessError: the server failed; nothing is served then.
        """
        async with self._load_lock:
            before, self._current = self._current, None  # no request comes in from here on
            if before is not None:
                await until_unused(before[1])
            await until_unused(self._base)
            for replica in self._replicas:
                await replica.replace_weights(folder)
            self._router.forget(0)
            self._current = name, Policy(self._base.served_name, None)

    async def unload_adapter(self, name: str) -> None:
        """Refuse requests for it from now on. Its weights stay in memory: there must be some."""
        if self._current is not None and self._current[0] == name:
            policy, self._current = self._current[1], None
            await until_unused(policy)

    def _policy(self, adapter: str | None) -> Policy:
        if self._current is not None and adapter == self._current[0]:
            return self._current[1]
        there = "nothing" if self._current is None else repr(self._current[0])
        wanted = "the base model" if adapter is None else repr(adapter)
        raise NotFoundError(
            f'{wanted} is not served: with `weights="merged"` vLLM holds one step at a time, now {there}. For older '
            'steps beside it, or the base model, use `weights="lora"` or the embedded engine',
            param="model",
        )
