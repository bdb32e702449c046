"""Register a model: find its base model, start its processes, make its first checkpoint, serve its newest one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from art.config import ModelSettings
from art.config.base_models import find_folder, looks_like_path, resolve_base_model
from art.errors import ConfigError
from art.memory import read_shape
from art.protocol.training import ModelStatus, RegisterRequest
from art.runtime.hosting.host import Hosts
from art.runtime.jobs.queue import JobQueue
from art.runtime.memory import MemoryPlan, check_memory
from art.runtime.models import Models, status_of
from art.runtime.placement import FASTER, SLOW, Devices, check_placement, find_devices, is_slow, with_engine
from art.runtime.registry import RegisteredModel, Registry
from art.storage import checkpoints
from art.storage.layout import validate_name

logger = logging.getLogger(__name__)

HUB_TIMEOUT_S = 10.0
_CONFIG = "config.json"


async def find_base_model(name: str, check_folder: Callable[[Path], None] = lambda folder: None) -> str:
    """Return the folder or hub id that engine and trainer can load, before any process is started for it.

    `check_folder` raises an error for a folder that must not be read. It is called before anything in the folder is
    looked at. Raises `ConfigError` if there is no such model, or its files are incomplete; the message says what was
    looked for.
    """
    base_model = resolve_base_model(name)
    if looks_like_path(base_model) or await asyncio.to_thread(Path(base_model).is_dir):
        await asyncio.to_thread(check_folder, Path(base_model))
    folder = await asyncio.to_thread(find_folder, base_model)
    if folder is None:
        await asyncio.to_thread(_check_hub, base_model)
        return base_model
    return str(folder) if base_model.startswith("~") else base_model


def _check_hub(name: str) -> None:
    """Look for the model's configuration in the cache, then on the hub, once and without a retry. Raises `ConfigError`
    if neither the cache nor the hub has it."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache  # slow to import
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        if isinstance(try_to_load_from_cache(name, _CONFIG), str):
            return
        get_hf_file_metadata(hf_hub_url(name, _CONFIG), timeout=HUB_TIMEOUT_S)
        return
    except GatedRepoError:
        reason = "the hub gives it only to accounts that have accepted its terms; do so, then set HF_TOKEN"
    except RepositoryNotFoundError:
        reason = "the hub has no such model, or it is private and HF_TOKEN is not set to a token that may read it"
    except EntryNotFoundError:
        reason = f"the hub's repository has no {_CONFIG}, so it is no model; a LoRA adapter must be merged first"
    except HFValidationError:
        reason = "no hub id looks like that"
    except Exception as error:  # no network, offline mode and time-outs have no common base class
        offline = " (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else ""
        reason = (
            f"it is not in the hub's cache on this machine ({constants.HF_HUB_CACHE}), and {constants.ENDPOINT} cannot "
            f"be reached{offline}: {type(error).__name__}. Give the folder of a model that you have"
        )
    raise ConfigError(
        f"base model {name!r}: there is no folder of this name ({Path(name).absolute()}), and as a hub id: {reason}",
        param="base_model",
    )


class Registrar:
    """Registers models, one at a time, so that they can be trained and sampled from."""

    def __init__(self, registry: Registry, models: Models, hosts: Hosts, jobs: JobQueue) -> None:
        self._registry = registry
        self._models = models
        self._hosts = hosts
        self._jobs = jobs
        self._lock = asyncio.Lock()

    async def register(
        self, request: RegisterRequest, check_folder: Callable[[Path], None] = lambda folder: None
    ) -> ModelStatus:
        """Make a model known and ready: its processes run, a first checkpoint exists, and its newest one is served.

        If the last server ended during a step of the model, that step is finished first. `check_folder` raises a
        `PermissionDeniedError` for a folder that the caller may not name.

        Raises:
            ConfigError: there is no such base model, or the model was registered before with another base model or
                other adapter settings, or it needs devices that this machine does not have.
            DirectoryGoneError: the data directory is gone.
        """
        self._registry.check_file()
        validate_name(request.project, param="project")
        validate_name(request.name, param="name")
        self._models.data_dir.model(request.project, request.name).check_spelling()
        await self._jobs.idle(request.project, request.name, recovered_only=True)
        async with self._lock:
            base_model = await find_base_model(request.base_model, check_folder)
            devices = await asyncio.to_thread(find_devices)
            settings = await asyncio.to_thread(with_engine, request.settings, devices)
            request = request.model_copy(update={"base_model": base_model, "settings": settings})
            known = self._models.by_key.get(f"{request.project}/{request.name}")
            if known is not None:
                _check_same(known, request)
            step = await (self._restore_steps(known) if known else asyncio.to_thread(self._step_on_disk, request))
            model = RegisteredModel(
                project=request.project, name=request.name, base_model=request.base_model, settings=request.settings,
                step=step, created_at=known.created_at if known else time.time(),
            )  # fmt: skip
            if known is not None and known.host_key != model.host_key:
                # End the processes that ran with the model's earlier settings, unless other models use them.
                await self._jobs.idle(model.project, model.name)
                logger.info("%s gets new settings: its processes are started again", model.key)
                self._models.replace(model)
                await self._hosts.close_unused(self._models.by_key.values())
            try:
                await self._make_ready(model, devices)
            except BaseException:
                if known is not None:
                    self._models.replace(known)
                await self._hosts.close_unused(self._models.by_key.values())
                raise
            self._models.replace(model)
            self._hosts.of(model).note_registered()
        return status_of(self._models.by_key[model.key])

    def _step_on_disk(self, request: RegisterRequest) -> int:
        """The first step of a model that the database does not know: the newest checkpoint in its folder, which may
        have been copied from elsewhere, or 0."""
        paths = self._models.data_dir.model(request.project, request.name)
        step = checkpoints.latest(paths.checkpoints)
        if step is None:
            return 0
        state = checkpoints.read_state(paths.checkpoint(step))
        lora = _lora_of(request.settings)
        if (state.base_model, state.lora) == (request.base_model, lora):
            return step
        if step == 0:  # left by a registration that failed later on
            checkpoints.delete(paths.checkpoint(0))
            return 0
        raise ConfigError(
            f"{paths.checkpoint(step)} was trained from base model {state.base_model!r} with LoRA settings "
            f"{state.lora}; got {request.base_model!r} and {lora} (None is full fine-tuning). Use another model "
            "name, or the same base model and settings"
        )

    async def _restore_steps(self, model: RegisteredModel) -> int:
        """Return the newest step of a registered model, after its database has learnt again of steps that it lost.

        A disk that did not keep what it had confirmed, or a copy of the database, can be older than the checkpoints.
        """
        paths, step = self._models.paths(model), model.step
        while step + 1 in await asyncio.to_thread(checkpoints.list_steps, paths.checkpoints):
            path = paths.checkpoint(step + 1)
            state = await asyncio.to_thread(checkpoints.read_state, path)
            is_own = (state.base_model, state.lora) == (model.base_model, _lora_of(model.settings))
            identity = await asyncio.to_thread(checkpoints.identify, path)
            if not is_own or not await self._jobs.store.restore(model, state, path, identity):
                break
            step += 1
            self._models.set_step(model.key, step)
            logger.warning("step %d of %s, which the database did not know, is restored from %s", step, model.key, path)
        return step

    async def _make_ready(self, model: RegisteredModel, devices: Devices) -> None:
        """Start the processes, make or check the newest checkpoint, let the engine prove and serve it, and store it."""
        shape = await asyncio.to_thread(read_shape, model.base_model)
        placement, settings = self._hosts.placement_of(model, devices)
        check_placement(placement, settings, devices)
        if shape is not None:
            check_memory(MemoryPlan(placement, settings, devices, shape))
        host = self._hosts.of(model, is_new=True)
        host.retry()
        if is_slow(model.settings, host.placement.engine.kind):
            logger.warning("%s: %s; %s", model.key, SLOW, FASTER)
        is_first = model.step == 0 and not (newest := self._models.checkpoint(model, 0)).exists()
        if is_first:
            host.start()
            await host.trainer.init_checkpoint(newest, model.settings.lora)
        else:
            newest = await asyncio.to_thread(self._models.published, model, model.step)
        await host.prove_layers(model.settings.lora)
        identity = await asyncio.to_thread(checkpoints.identify, newest)
        await host.adapters.ensure_loaded(model.adapter_id(model.step), newest)
        await self._registry.save_model(model)
        if is_first or self._registry.identity(model, model.step) is None:
            await self._registry.save_identity(model, model.step, identity)


def _lora_of(settings: ModelSettings) -> dict[str, Any] | None:
    """The LoRA settings as a checkpoint has them; `None` for full fine-tuning."""
    return None if settings.lora is None else settings.lora.model_dump(mode="json")


def _check_same(known: RegisteredModel, request: RegisterRequest) -> None:
    if known.base_model != request.base_model:
        raise ConfigError(
            f"model {known.key} was trained from base model {known.base_model!r}; got {request.base_model!r}. "
            "Use another model name, or the same base model; if its directory has moved, leave a symbolic link at the "
            "old path and register with that",
            param="base_model",
        )
    if known.settings.lora != request.settings.lora:
        raise ConfigError(
            f"model {known.key} was trained with LoRA settings {known.settings.lora!r}; got {request.settings.lora!r} "
            "(None is full fine-tuning). Use another model name, or the same settings",
            param="settings",
        )
