"""Turn the base model that a user names into one that can be loaded, before any process is started for it.

    folder of a model                 used as it is
    folder of a LoRA adapter          the model that the adapter was trained on, with the adapter merged into it
    hub id                            used as it is, after a check that the hub, or its cache on this machine, has it

A merged model is stored in the data directory under the hash of its adapter, so each adapter is merged only once.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path

from art.config.base_models import ADAPTER_CONFIG, ADAPTER_WEIGHTS, find_folder, looks_like_path, resolve_base_model
from art.errors import ConfigError
from art.protocol.calls import MergeAdapter
from art.protocol.training import JobProgress
from art.runtime.jobs.file_jobs import run_file_call
from art.runtime.jobs.job import JobControl
from art.storage.layout import DataDir

logger = logging.getLogger(__name__)

HUB_TIMEOUT_S = 10.0
_CONFIG = "config.json"


async def prepare_base_model(
    name: str, data_dir: DataDir, check_folder: Callable[[Path], None] = lambda folder: None
) -> str:
    """Return a folder or hub id that engine and trainer can load.

    Args:
        check_folder: raises an error for a folder that must not be read. It is called before anything in the folder
            is looked at, also for the folder that an adapter names as its base model.

    Raises:
        ConfigError: there is no such model, or its files are incomplete. The message says what was looked for.
        ProcessError: the process that merges an adapter died.
    """
    base_model = resolve_base_model(name)
    if looks_like_path(base_model) or await asyncio.to_thread(Path(base_model).is_dir):
        await asyncio.to_thread(check_folder, Path(base_model))
    folder = await asyncio.to_thread(find_folder, base_model)
    if folder is None:
        await asyncio.to_thread(_check_hub, base_model)
        return base_model
    if not (folder / ADAPTER_CONFIG).is_file():
        return str(folder) if base_model.startswith("~") else base_model
    adapted_from = await prepare_base_model(_base_of(folder), data_dir, check_folder)
    target = data_dir.adapted(f"{folder.absolute().name}-{await asyncio.to_thread(_identify, folder, adapted_from)}")
    if not target.is_dir():
        logger.info("merging the adapter %s into its base model %s, as %s", folder, adapted_from, target)
        call = MergeAdapter(adapter=folder, base_model=adapted_from, target=target)
        await run_file_call(call, data_dir.logs / "files.log", JobControl(_ignore))
    return str(target.absolute())


def _base_of(adapter: Path) -> str:
    """The base model that an adapter names. A relative path starts at the working directory or the adapter's folder."""
    try:
        name = json.loads((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        name = None
    if not name or not isinstance(name, str):
        raise ConfigError(
            f"{adapter / ADAPTER_CONFIG} does not say which model the adapter is for; write its hub id or folder "
            "there, as `base_model_name_or_path`",
            param="base_model",
        )
    beside = adapter / name
    return str(beside) if not Path(name).is_dir() and beside.is_dir() else name


def _identify(adapter: Path, base_model: str) -> str:
    """A hash of the adapter's content and of the name of its base model, as 12 hexadecimal digits."""
    digest = hashlib.sha256(base_model.encode())
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        with (adapter / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:12]


def _check_hub(name: str) -> None:
    """Look for the model's configuration in the cache, then on the hub, once and without a retry.

    Raises:
        ConfigError: neither the cache nor the hub has it.
    """
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
        reason = f"the hub's repository has no {_CONFIG}. Download a LoRA adapter, and give its folder"
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


async def _ignore(_: JobProgress) -> None:
    return None
