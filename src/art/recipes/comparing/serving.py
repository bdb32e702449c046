"""Makes each model of a comparison reachable: an address, a key and a name to ask for, and what identifies it.

Models of this machine are served one after the other, so that they do not share its cores or GPUs while their latency
is measured. Checkpoints of a data directory whose server runs already are asked there.
"""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self
from urllib.parse import urlsplit

from art.backends.local import LocalBackend
from art.config import ModelSettings
from art.errors import ConfigError
from art.model import Model, TrainableModel
from art.recipes.comparing.compared_models import NO_KEY, BaseModel, Checkpoint, ComparedModel, Endpoint, OwnModel
from art.report.model_comparison import ModelKind
from art.storage import checkpoints
from art.storage.database import check_format
from art.storage.layout import DataDir
from art.storage.local_key import LOOPBACK, find_local_key
from art.storage.lock import lock_holder

_PROJECT = "compared"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What is known of a model before it is asked."""

    kind: ModelKind
    where: str
    """Address, checkpoint or folder, for people."""
    identity: str
    """Changes whenever the model may answer in another way."""
    is_here: bool
    """Whether it runs on this machine, which is then its price."""
    group: str
    """Models of one group share a limit of rollouts at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """A model that can be asked now."""

    url: str
    api_key: str
    name: str
    """Name to send as `model`."""


def locate(model: ComparedModel, data_dir: Path) -> Place:
    """Find out where a model is and what identifies it, without starting anything.

    Raises:
        ConfigError: its key is not set, or there is no such checkpoint.
    """
    if isinstance(model, Endpoint):
        model.key()
        place = f"{model.model} at {model.url}"
        is_here = urlsplit(model.url).hostname in LOOPBACK
        return Place(kind="endpoint", where=place, identity=place, is_here=is_here, group=model.url)
    if isinstance(model, Checkpoint):
        path = _checkpoint_path(model, data_dir)
        where = f"{model.project}/{model.name}@{int(path.name)}"
        identity = f"{where} {checkpoints.identify(path)}"
        return Place(kind="checkpoint", where=where, identity=identity, is_here=True, group="here")
    if isinstance(model, BaseModel):
        identity = f"{model.path} {_weights_stamp(Path(model.path))}"
        return Place(kind="local", where=model.path, identity=identity, is_here=True, group="here")
    assert isinstance(model, OwnModel)
    own = model.model
    if own.inference_base_url is None or hasattr(own, "playing"):
        return Place(kind="scripted", where=own.name, identity=f"own {own.name}", is_here=True, group=model.label)
    where = f"{own.get_inference_name()} at {own.inference_base_url}"
    return Place(kind="endpoint", where=where, identity=where, is_here=False, group=own.inference_base_url)


def _checkpoint_path(model: Checkpoint, data_dir: Path) -> Path:
    folder = DataDir(data_dir).model(model.project, model.name).checkpoints
    steps = checkpoints.list_steps(folder)
    step = max(steps, default=None) if model.step == "latest" else model.step
    if step is None or step not in steps:
        raise ConfigError(
            f"{model.label!r}: {model.project}/{model.name} has no checkpoint of step {model.step} in {data_dir}; it "
            f"has {', '.join(map(str, steps)) or 'none'}"
        )
    return folder / f"{step:04d}"


def _weights_stamp(folder: Path) -> str:
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    return " ".join(f"{file.name}:{file.stat().st_size}:{file.stat().st_mtime_ns}" for file in files)


class Servers:
    """Serves the models of this machine, one base model at a time. Use it as an asynchronous context manager."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._open = AsyncExitStack()
        self._backend: LocalBackend | None = None
        self._base_model = ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    async def reach(self, model: ComparedModel) -> Reached:
        """Serve a model if nobody does, and return how to ask it until the next model of this machine is reached.

        Raises:
            ArtError: it cannot be served.
        """
        if isinstance(model, Endpoint):
            return Reached(url=model.url, api_key=model.key(), name=model.model)
        if isinstance(model, OwnModel):
            own: Model[Any, Any] = model.model
            assert own.inference_base_url is not None
            key = own.inference_api_key or NO_KEY
            return Reached(url=own.inference_base_url, api_key=key, name=own.get_inference_name())
        if isinstance(model, BaseModel):
            fresh = TrainableModel(name="model", project=_PROJECT, base_model=model.path, report_metrics=[])
            return await self._serve(fresh, None, 0)
        assert isinstance(model, Checkpoint)
        step = int(_checkpoint_path(model, self._data_dir).name)
        if (running := _running_server(DataDir(self._data_dir))) is not None:
            url, key = running
            project = f"{url}/projects/{model.project}/v1"
            return Reached(url=project, api_key=key, name=f"{model.project}/{model.name}@{step}")
        base_model, settings = registered(model, self._data_dir)
        trained = TrainableModel(
            name=model.name, project=model.project, base_model=base_model, settings=settings, report_metrics=[]
        )
        return await self._serve(trained, self._data_dir, step)

    async def _serve(self, model: TrainableModel[Any, Any], data_dir: Path | None, step: int) -> Reached:
        """Serve a model from a data directory, or from one that is deleted afterwards."""
        is_same = data_dir is not None and self._base_model == model.base_model
        if self._backend is None or not is_same:
            await self._open.aclose()
            folder = data_dir or Path(self._open.enter_context(TemporaryDirectory(prefix="art-compare-")))
            self._backend = await self._open.enter_async_context(LocalBackend(path=folder, show_page=False))
            self._base_model = "" if data_dir is None else model.base_model
        await model.register(self._backend)
        assert model.inference_base_url is not None
        assert model.inference_api_key is not None
        name = model.get_inference_name(step)
        return Reached(url=model.inference_base_url, api_key=model.inference_api_key, name=name)


def _running_server(data_dir: DataDir) -> tuple[str, str] | None:
    """Address and key of the server that runs on a data directory; `None` if there is none."""
    try:
        if lock_holder(data_dir.lock) is None:
            return None
        url = data_dir.address.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    key = os.environ.get("ART_API_KEY") or find_local_key(url)
    if key is None:
        raise ConfigError(
            f"the server at {url} runs on {data_dir.root}, and its key is not known here: set ART_API_KEY, or end it"
        )
    return url, key


def registered(model: Checkpoint, data_dir: Path) -> tuple[str, ModelSettings]:
    """Return base model and settings that a model was registered with."""
    paths = DataDir(data_dir)
    if paths.database.exists():
        with closing(sqlite3.connect(f"{paths.database.absolute().as_uri()}?mode=ro", uri=True)) as database:
            try:
                check_format(database, paths.database)
                row = database.execute(
                    "SELECT base_model, settings FROM models WHERE project = ? AND name = ?",
                    (model.project, model.name),
                ).fetchone()
            except sqlite3.Error:
                row = None
        if row is not None:
            return str(row[0]), ModelSettings.model_validate(json.loads(row[1]))
    state = checkpoints.read_state(_checkpoint_path(model, data_dir))
    return state.base_model, ModelSettings.model_validate({"lora": state.lora})
