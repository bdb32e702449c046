"""A vLLM engine that exchanges the weights of its servers: it holds one policy, in place of the base model.

vLLM computes every request with the weights that it has, and its prefix cache does not know which weights computed an
entry. So weights are exchanged only while no request runs, and the cache is emptied at the same time. A request for
another policy than the loaded one is refused.
"""

from __future__ import annotations

from pathlib import Path

from art.engine import AdapterInfo
from art.engines.vllm.vllm_engine import Policy, VllmEngine
from art.errors import AdapterError, NotFoundError


class MergedVllmEngine(VllmEngine):
    """A vLLM engine that holds one policy at a time, whose weights `replace_weights` loads. It loads no adapters."""

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
