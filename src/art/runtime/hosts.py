"""The hosts of all models. A host runs the engine and the trainer of a base model.

Models with the same base model and the same settings of these processes share a host.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from art.config import ModelSettings, ServerConfig, VllmConfig
from art.engine import Sender
from art.runtime.host import BaseModelHost, short_name
from art.runtime.placement.devices import Devices
from art.runtime.placement.placement import Placement, choose_placement
from art.runtime.registry import RegisteredModel
from art.runtime.supervision.launch import WarmParent
from art.runtime.supervision.process import ChildProcess
from art.storage.layout import DataDir


class Hosts:
    """Creates the host of a base model when a model first needs it, and ends it when no model needs it any more."""

    def __init__(self, data_dir: DataDir, config: ServerConfig) -> None:
        self._data_dir = data_dir
        self._config = config
        self.vllm_python = config.vllm_python
        self.on_sampled: Callable[[Sender, str, float], None] = lambda sender, name, device_s: None
        """The callback of the same name of each host."""
        self._warm_parent = WarmParent()
        self._hosts: dict[str, BaseModelHost] = {}
        self._by_model: dict[str, tuple[str, ModelSettings, BaseModelHost]] = {}
        """A cache for requests, which saves comparing settings."""
        self._pinned: dict[str, BaseModelHost] = {}
        """Hosts that run whether or not a model uses them."""

    def of(self, model: RegisteredModel, *, is_new: bool = False) -> BaseModelHost:
        """The host of a model. `is_new` says that the model is being registered, should its host have to be made."""
        base_model, settings, host = self._by_model.get(model.key, (None, None, None))
        if host is not None and settings is model.settings and base_model == model.base_model:
            return host
        host = self._of(host_key(model), model.base_model, model.settings, is_new=is_new)
        host.note_needed()
        self._by_model[model.key] = model.base_model, model.settings, host
        return host

    def existing(self, model: RegisteredModel) -> BaseModelHost | None:
        """The host of a model if it was made already. May be called from any thread."""
        return self._hosts.get(host_key(model))

    def pin(self, base_model: str, settings: ModelSettings) -> None:
        """Start the processes of a base model and keep them running, whether or not a model uses them."""
        key = _key(base_model, settings)
        self._pinned[key] = self._of(key, base_model, settings)
        self._pinned[key].start()

    def expect(self, base_model: str, settings: ModelSettings) -> None:
        """Start the processes of a base model that is still being made. They load it when a model needs it."""
        self._of(_key(base_model, settings), base_model, settings, is_new=True).start_ahead()

    def pinned(self) -> list[BaseModelHost]:
        return list(self._pinned.values())

    def _of(self, key: str, base_model: str, settings: ModelSettings, *, is_new: bool = False) -> BaseModelHost:
        if key not in self._hosts:
            name = self._free_name(base_model)
            self._hosts[key] = BaseModelHost(
                base_model,
                settings,
                self._data_dir,
                self._config,
                name,
                self._warm_parent,
                in_use=self._in_use(),
                is_new=is_new,
            )
            self._hosts[key].on_sampled = self.on_sampled
        return self._hosts[key]

    def placement_of(self, model: RegisteredModel, devices: Devices) -> Placement:
        """Return the devices that engine and trainer of a model have, or would get now."""
        if (host := self.existing(model)) is not None:
            return host.placement
        return choose_placement(model.settings, devices, self._in_use())

    def _in_use(self) -> Counter[int]:
        """Count the engines and trainers on each GPU."""
        places = [place for host in self._hosts.values() for place in (host.placement.engine, host.placement.trainer)]
        return Counter(index for place in places for index in place.indices)

    def _free_name(self, base_model: str) -> str:
        """Choose a name for a new host's processes and logs that no other host has."""
        name, taken = short_name(base_model), {host.name for host in self._hosts.values()}
        names = [name, *(f"{name}-{number}" for number in range(2, len(taken) + 2))]
        return next(name for name in names if name not in taken)

    async def close_unused(self, models: Iterable[RegisteredModel]) -> None:
        """End the hosts that none of `models` uses. Pinned hosts keep running."""
        await self._close({host_key(model) for model in models} | self._pinned.keys())

    async def _close(self, needed: set[str]) -> None:
        unused = {key: host for key, host in self._hosts.items() if key not in needed}
        for key in unused:
            del self._hosts[key]
        kept = list(self._hosts.values())
        self._by_model = {name: entry for name, entry in self._by_model.items() if entry[2] in kept}
        await asyncio.gather(*(host.close() for host in unused.values()))

    async def close(self) -> None:
        await self._close(set())
        await self._warm_parent.close()

    def all(self) -> list[BaseModelHost]:
        return list(self._hosts.values())

    def processes(self) -> list[ChildProcess]:
        return [process for host in self._hosts.values() for process in (host.engine_process, host.trainer_process)]

    def status(self) -> list[dict[str, Any]]:
        return [host.status() for host in self._hosts.values()]


def host_key(model: RegisteredModel) -> str:
    key, engine = _key(model.base_model, model.settings), model.settings.engine
    if isinstance(engine, VllmConfig) and engine.weights == "merged":
        key += f"|{model.key}"  # the engine holds one policy, so models cannot share it
    return key


def _key(base_model: str, settings: ModelSettings) -> str:
    parts = (settings.engine, settings.trainer, settings.render)
    key = "|".join([base_model, *(part.model_dump_json() for part in parts)])
    if isinstance(settings.engine, VllmConfig) and settings.lora is not None:
        key += f"|{settings.lora.rank}"  # vLLM must know the rank of its adapters when it starts
    return key
