"""The recipe `compare_models`, which `art compare` calls: several models on the same scenarios of a task.

    comparison = await art.recipes.compare_models("tic_tac_toe", ["agent@0", "agent@latest", "openai/gpt-5"])
    print(comparison.row("agent@latest").difference.text(sign=True))

Endpoints are asked at the same time, models of this machine one after the other. Every finished rollout is kept at
once, so a later call with the same arguments goes on, and asks nothing again that has a score.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self
from urllib.parse import urlsplit

from art.config import ModelSettings
from art.costs import Prices
from art.errors import ArtError, ConfigError
from art.local_backend import LocalBackend
from art.model import Model, TrainableModel
from art.storage import checkpoints
from art.storage.database import check_format
from art.storage.layout import DataDir
from art.storage.local_key import LOOPBACK, find_local_key
from art.storage.lock import lock_holder
from art.task import Scenario, Task, draw_scenarios, get_task
from art_recipes.comparing.compared_models import (
    NO_KEY,
    BaseModel,
    Checkpoint,
    CompareConfig,
    ComparedModel,
    Endpoint,
    OwnModel,
    check_labels,
    parse_model,
)
from art_recipes.comparing.metered_http import Asking
from art_recipes.comparing.model_comparison import ModelComparison, ModelKind, ModelRow, ModelState, write_comparison
from art_recipes.comparing.run_model import (
    MeteredModel,
    ModelRun,
    by_scenario,
    compare_with,
    file_of,
    measure,
    price_rollouts,
    scenario_names,
    scored,
    together,
)
from art_recipes.training.progress import OnProgress, Progress, log_progress

_PROJECT = "compared"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlace:
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


def locate(model: ComparedModel, data_dir: Path) -> ModelPlace:
    """Find out where a model is and what identifies it, without starting anything.

    Raises:
        ConfigError: its key is not set, or there is no such checkpoint.
    """
    if isinstance(model, Endpoint):
        model.key()
        place = f"{model.model} at {model.url}"
        is_here = urlsplit(model.url).hostname in LOOPBACK
        return ModelPlace(kind="endpoint", where=place, identity=place, is_here=is_here, group=model.url)
    if isinstance(model, Checkpoint):
        path = _checkpoint_path(model, data_dir)
        where = f"{model.project}/{model.name}@{int(path.name)}"
        identity = f"{where} {checkpoints.identify(path)}"
        return ModelPlace(kind="checkpoint", where=where, identity=identity, is_here=True, group="here")
    if isinstance(model, BaseModel):
        folder = Path(model.path)
        files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
        stamps = " ".join(f"{file.name}:{file.stat().st_size}:{file.stat().st_mtime_ns}" for file in files)
        identity = f"{model.path} {stamps}"
        return ModelPlace(kind="local", where=model.path, identity=identity, is_here=True, group="here")
    assert isinstance(model, OwnModel)
    own = model.model
    if own.inference_base_url is None or hasattr(own, "playing"):
        return ModelPlace(kind="scripted", where=own.name, identity=f"own {own.name}", is_here=True, group=model.label)
    where = f"{own.get_inference_name()} at {own.inference_base_url}"
    return ModelPlace(kind="endpoint", where=where, identity=where, is_here=False, group=own.inference_base_url)


def _checkpoint_path(model: Checkpoint, data_dir: Path) -> Path:
    folder = DataDir(data_dir).model(model.project, model.name).checkpoints
    steps = checkpoints.list_steps(folder)
    step: Any = max(steps, default=None) if model.step == "latest" else model.step
    if step == "promoted":
        found = _read_row(model, data_dir, "SELECT step FROM promoted WHERE project = ? AND name = ?")
        if found is None:
            raise ConfigError(f"{model.label!r}: no checkpoint of {model.project}/{model.name} was promoted")
        (step,) = found
    if step is None or step not in steps:
        raise ConfigError(
            f"{model.label!r}: {model.project}/{model.name} has no checkpoint of step {model.step} in {data_dir}; it "
            f"has {', '.join(map(str, steps)) or 'none'}"
        )
    return folder / f"{step:04d}"


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

    async def reach(self, model: ComparedModel) -> dict[str, str]:
        """Serve a model if nobody does, and return how to ask it until the next model of this machine is reached.

        Returns:
            Arguments of `MeteredModel`: address, key and name.

        Raises:
            ArtError: it cannot be served.
        """
        if isinstance(model, Endpoint):
            return _at(model.url, model.key(), model.model)
        if isinstance(model, OwnModel):
            own: Model[Any, Any] = model.model
            assert own.inference_base_url is not None
            return _at(own.inference_base_url, own.inference_api_key or NO_KEY, own.get_inference_name())
        if isinstance(model, BaseModel):
            fresh = TrainableModel(name="model", project=_PROJECT, base_model=model.path, report_metrics=[])
            return await self._serve(fresh, None, 0)
        assert isinstance(model, Checkpoint)
        step = int(_checkpoint_path(model, self._data_dir).name)
        if (running := _running_server(DataDir(self._data_dir))) is not None:
            url, key = running
            return _at(f"{url}/projects/{model.project}/v1", key, f"{model.project}/{model.name}@{step}")
        base_model, settings = registered(model, self._data_dir)
        trained = TrainableModel(
            name=model.name, project=model.project, base_model=base_model, settings=settings, report_metrics=[]
        )
        return await self._serve(trained, self._data_dir, step)

    async def _serve(self, model: TrainableModel[Any, Any], data_dir: Path | None, step: int) -> dict[str, str]:
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
        return _at(model.inference_base_url, model.inference_api_key, model.get_inference_name(step))


def _at(url: str, api_key: str, name: str) -> dict[str, str]:
    return {"inference_base_url": url, "inference_api_key": api_key, "inference_model_name": name}


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
    row = _read_row(model, data_dir, "SELECT base_model, settings FROM models WHERE project = ? AND name = ?")
    if row is not None:
        return str(row[0]), ModelSettings.model_validate(json.loads(row[1]))
    state = checkpoints.read_state(_checkpoint_path(model, data_dir))
    return state.base_model, ModelSettings.model_validate({"lora": state.lora})


def _read_row(model: Checkpoint, data_dir: Path, query: str) -> tuple[Any, ...] | None:
    """Read what the database has of a model; `None` if it has nothing, or there is none."""
    paths = DataDir(data_dir)
    if not paths.database.exists():
        return None
    with closing(sqlite3.connect(f"{paths.database.absolute().as_uri()}?mode=ro", uri=True)) as database:
        try:
            check_format(database, paths.database)
            row: tuple[Any, ...] | None = database.execute(query, (model.project, model.name)).fetchone()
        except sqlite3.Error:
            return None
    return row


OnUpdate = Callable[[ModelComparison], None]
_UPDATE_S = 1.0


async def compare_models(
    task: Task | str,
    models: Sequence[str | ComparedModel | Model[Any, Any]],
    *,
    config: CompareConfig | None = None,
    on_progress: OnProgress = log_progress,
    on_update: OnUpdate = lambda comparison: None,
    **settings: Any,
) -> ModelComparison:
    """Roll out the same held-out scenarios with several models, and compare their scores pair by pair.

    Rollouts of the same scenario and index draw the same random numbers with every model. A rollout in which the model
    does not answer gets no score and is left out of every mean; it is counted, and tried again by the next call.

    Args:
        task: the task, or its name, or `module:attribute`.
        models: models as `--models` names them, objects such as `Endpoint`, or model objects with an address.
        config: settings as a whole.
        on_progress: called with lines for people.
        on_update: called with what is known so far, at most once per second.
        settings: single settings by name, see `CompareConfig`; they replace those of `config`.

    Returns:
        The comparison. It is also in the folder that `config` names, as `comparison.json`.

    Raises:
        ConfigError: a model is not known, its key or checkpoint is missing, two have the same label, or only a judge
            rewards the task.
    """
    config = CompareConfig(**{**({} if config is None else config.model_dump(exclude_unset=True)), **settings})
    return await _Comparing(task, models, config, on_progress, on_update).run()


async def measure_pair(
    task: Task | str, reference: ComparedModel, candidate: ComparedModel, config: CompareConfig, on_progress: OnProgress
) -> tuple[list[list[float]], list[list[float]]]:
    """Roll out the same scenarios with two models, and return their rewards by scenario.

    Both lists have the same scenarios in the same order, and of each the rollouts that got a reward with both models.
    """
    run = _Comparing(task, [reference, candidate], config, on_progress, lambda comparison: None)
    await run.run()
    sides = [scored(one.run.rows()) for one in run.contestants]
    common = sorted(sides[0].keys() & sides[1].keys())
    before, after = (by_scenario([side[place] for place in common], "reward") for side in sides)
    return list(before.values()), [after[name] for name in before]


def comparison_folder(task: Task, config: CompareConfig) -> Path:
    """Return the folder of a comparison: its table, and the rollouts that it keeps."""
    name = f"{task.label}-{config.split}-seed{config.seed}"
    return (config.out or DataDir(config.data_dir).comparisons / name).resolve()


@dataclass(slots=True, eq=False)
class _Contestant:
    """One model with its rollouts."""

    model: ComparedModel
    place: ModelPlace
    asking: Asking
    run: ModelRun
    state: ModelState = "waiting"
    problem: str | None = None


class _Comparing:
    """One call of `compare_models`."""

    def __init__(
        self,
        task: Task | str,
        models: Sequence[str | ComparedModel | Model[Any, Any]],
        config: CompareConfig,
        on_progress: OnProgress,
        on_update: OnUpdate,
    ) -> None:
        self.config = config.model_copy(update={"data_dir": config.data_dir.resolve()})
        self.task = get_task(task) if isinstance(task, str) else task
        self.models: list[ComparedModel] = []
        for model in [models] if isinstance(models, str) else models:
            if isinstance(model, str):
                self.models.append(parse_model(model, self.config.data_dir))
            else:
                self.models.append(OwnModel(label=model.name, model=model) if isinstance(model, Model) else model)
        check_labels(self.models)
        self.reference = config.reference or self.models[0].label
        self.folder = comparison_folder(self.task, self.config)
        self.on_progress, self.on_update = on_progress, on_update
        self.started_at, self.updated = time.time(), 0.0
        self.contestants: list[_Contestant] = []
        self.slots: dict[str, asyncio.Semaphore] = {}
        self.scenarios: dict[str, Scenario] = {}
        self.servers = Servers(self.config.data_dir)

    async def run(self) -> ModelComparison:
        config = self.config
        if self.reference not in (labels := [model.label for model in self.models]):
            raise ConfigError(f"the reference {self.reference!r} is none of the models {', '.join(labels)}")
        if self.task.needs_judge and type(self.task).score_messages is Task.score_messages:  # all rewards are 0
            raise ConfigError(
                f"task {self.task.label!r} gets its rewards from a judge only, and a comparison has none: every model "
                "would score 0. `art.recipes.compare_checkpoints` compares two checkpoints by a judge"
            )
        scenarios = draw_scenarios(self.task, config.split, seed=config.seed, count=config.held_out)
        if len(scenarios) < config.held_out:
            self.on_progress(
                Progress(f"The split {config.split} has {len(scenarios)} scenarios, not {config.held_out}")
            )
        self.scenarios = dict(zip(scenario_names(self.task, scenarios), scenarios, strict=True))
        self.contestants = [self._contestant(model) for model in self.models]
        await asyncio.to_thread(importlib.import_module, "openai.resources.chat.completions")  # half a second
        try:
            elsewhere = [one for one in self.contestants if one.place.kind in ("endpoint", "scripted")]
            await together(self._run(one) for one in elsewhere)
            async with self.servers:
                for one in self.contestants:
                    if one not in elsewhere:
                        await self._run(one)
        finally:
            result = self._publish()
        return result

    def _contestant(self, model: ComparedModel) -> _Contestant:
        place, config = locate(model, self.config.data_dir), self.config
        asking = Asking(
            timeout_s=config.call_timeout, attempts=config.attempts,
            max_tokens=model.max_tokens or config.max_tokens, params=model.params,
        )  # fmt: skip
        identity = f"{place.identity} {sorted(asking.params.items())} () {asking.max_tokens}"
        path = file_of(self.folder, model.label, identity)
        is_metered = place.kind != "scripted"
        run = ModelRun(self.task, self.scenarios, config, path, is_metered=is_metered, on_rollout=self._update)
        if num_kept := len(scored(run.rows())):
            self.on_progress(Progress(f"{model.label}: {num_kept} rollouts are kept from an earlier run"))
        return _Contestant(model, place, asking, run)

    async def _run(self, one: _Contestant) -> None:
        """Make the rollouts of a model that are left. What keeps it from being served is its own problem."""
        if not one.run.left():
            one.state = "done"
            return
        one.state = "running"
        self._update()
        slots = self.slots.setdefault(one.place.group, asyncio.Semaphore(self.config.concurrency))
        if one.place.kind == "scripted":
            assert isinstance(one.model, OwnModel)
            await one.run.run(one.model.model, slots)
        else:
            if one.place.kind in ("checkpoint", "local"):
                self.on_progress(Progress(f"{one.model.label}: serving it on this machine", "busy"))
            try:
                address = await self.servers.reach(one.model)
            except ArtError as error:
                one.state, one.problem = "gave_up", str(error)
                self.on_progress(Progress(f"{one.model.label} cannot be served: {error}", "warning"))
                return
            asked = MeteredModel(one.asking, name="model", project=_PROJECT, **address)
            try:
                await one.run.run(asked, slots)
            finally:
                await asked.close()
        one.state = "gave_up" if one.run.is_given_up else "done"
        if one.run.is_given_up:
            self.on_progress(Progress(f"{one.model.label} is given up: too many rollouts failed in a row", "warning"))

    # -- results --

    def _update(self) -> None:
        if time.monotonic() - self.updated >= _UPDATE_S:
            self._publish()

    def _publish(self) -> ModelComparison:
        """Write what is known so far, and tell the caller."""
        result = self._result()
        write_comparison(self.folder, result)
        self.on_update(result)
        self.updated = time.monotonic()
        return result

    def _result(self) -> ModelComparison:
        config = self.config
        rows = {one.model.label: one.run.rows() for one in self.contestants}
        against = rows[self.reference]
        num_planned = len(self.scenarios) * config.rollouts
        models: list[ModelRow] = []
        for one in self.contestants:
            label = one.model.label
            row = ModelRow(
                label=label, kind=one.place.kind, where=one.place.where, state=one.state, problem=one.problem
            )
            row = measure(row, rows[label], num_planned)
            machine = Prices(device_usd_per_hour=config.price_per_hour) if one.place.is_here else None
            usd, note = price_rollouts(rows[label], one.model.price, machine)
            row = row.model_copy(update={"usd_per_1000": usd, "price_note": note})
            models.append(row if label == self.reference else compare_with(row, rows[label], against))
        have = [{name for name, _ in scored(rows[row.label])} for row in models if row.num_rollouts]
        return ModelComparison(
            id=self.folder.name, task=self.task.label, description=self.task.description,
            headline_metric=self.task.headline_metric, split=config.split, seed=config.seed,
            num_scenarios=len(self.scenarios), rollouts_per_scenario=config.rollouts, reference=self.reference,
            num_common=len(set.intersection(*have)) if have else 0, concurrency=config.concurrency,
            started_at=self.started_at, updated_at=time.time(),
            is_complete=all(one.state in ("done", "gave_up") for one in self.contestants), models=models,
        )  # fmt: skip
