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
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from art.costs import Prices, TokenPrice
from art.errors import ArtError, ConfigError
from art.model import Model
from art.recipes.comparing.compared_models import CompareConfig, ComparedModel, Endpoint, OwnModel, check_labels
from art.recipes.comparing.metered_http import Asking, RateLimit
from art.recipes.comparing.run_model import AskedModel, ModelRun, RolloutPlan, together
from art.recipes.comparing.scoring import (
    KeptRollouts,
    by_scenario,
    compare_with,
    file_of,
    measure,
    price_rollouts,
    scenario_names,
    scored,
)
from art.recipes.comparing.serving import Place, Servers, locate
from art.recipes.comparing.texts import parse_models
from art.recipes.progress import OnProgress, Progress, log_progress
from art.report.model_comparison import ModelComparison, ModelRow, ModelState, write_comparison
from art.storage.layout import DataDir
from art.task import Task, draw_scenarios, get_task

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
        The comparison. It is also in the folder that `config` names, as `comparison.json` and `comparison.md`.

    Raises:
        ConfigError: a model is not known, its key or checkpoint is missing, two have the same label, or only a judge
            rewards the task.
    """
    values = {} if config is None else config.model_dump(exclude_unset=True)
    config = CompareConfig(**{**values, **settings})
    return await _comparing(task, models, config, on_progress, on_update).run()


async def measure_pair(
    task: Task | str, reference: ComparedModel, candidate: ComparedModel, config: CompareConfig, on_progress: OnProgress
) -> tuple[list[list[float]], list[list[float]]]:
    """Roll out the same scenarios with two models, and return their rewards by scenario.

    Both lists have the same scenarios in the same order, and of each the rollouts that got a reward with both models.
    """
    run = _comparing(task, [reference, candidate], config, on_progress, lambda comparison: None)
    await run.run()
    sides = [scored(one.run.rows()) for one in run.contestants]
    common = sorted(sides[0].keys() & sides[1].keys())
    before, after = (by_scenario([side[place] for place in common], "reward") for side in sides)
    return list(before.values()), [after[name] for name in before]


def _comparing(
    task: Task | str,
    models: Sequence[str | ComparedModel | Model[Any, Any]],
    config: CompareConfig,
    on_progress: OnProgress,
    on_update: OnUpdate,
) -> _Comparing:
    config = config.model_copy(update={"data_dir": config.data_dir.resolve()})
    task = get_task(task) if isinstance(task, str) else task
    return _Comparing(task, _resolved(models, config.data_dir), config, on_progress, on_update)


def comparison_folder(task: Task, config: CompareConfig) -> Path:
    """Return the folder of a comparison: its table, and the rollouts that it keeps."""
    name = f"{task.label}-{config.split}-seed{config.seed}"
    return (config.out or DataDir(config.data_dir).comparisons / name).resolve()


def _resolved(models: Sequence[str | ComparedModel | Model[Any, Any]], data_dir: Path) -> list[ComparedModel]:
    resolved: list[ComparedModel] = []
    for model in [models] if isinstance(models, str) else models:
        if isinstance(model, str):
            resolved += parse_models([model], data_dir)
        else:
            resolved.append(OwnModel(label=model.name, model=model) if isinstance(model, Model) else model)
    check_labels(resolved)
    return resolved


@dataclass(slots=True, eq=False)
class _Contestant:
    """One model with its rollouts."""

    model: ComparedModel
    place: Place
    run: ModelRun
    state: ModelState = "waiting"
    problem: str | None = None
    listed: TokenPrice | None = None


@dataclass(slots=True)
class _Comparing:
    """One call of `compare_models`."""

    task: Task
    models: list[ComparedModel]
    config: CompareConfig
    on_progress: OnProgress
    on_update: OnUpdate
    started_at: float = field(default_factory=time.time)
    contestants: list[_Contestant] = field(default_factory=list)
    limits: dict[str, RateLimit] = field(default_factory=dict)
    slots: dict[str, asyncio.Semaphore] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    servers: Servers = field(init=False)
    updated: float = 0.0

    def __post_init__(self) -> None:
        self.servers = Servers(self.config.data_dir)

    @property
    def folder(self) -> Path:
        return comparison_folder(self.task, self.config)

    @property
    def reference(self) -> str:
        return self.config.reference or self.models[0].label

    async def run(self) -> ModelComparison:
        config = self.config
        if self.reference not in (labels := [model.label for model in self.models]):
            raise ConfigError(f"the reference {self.reference!r} is none of the models {', '.join(labels)}")
        if self.task.needs_judge:  # its own rewards are all 0
            raise ConfigError(
                f"task {self.task.label!r} gets its rewards from a judge only, and a comparison has none: every model "
                "would score 0. `art.recipes.compare_checkpoints` compares two checkpoints by a judge"
            )
        scenarios = draw_scenarios(self.task, config.split, seed=config.seed, count=config.games)
        if len(scenarios) < config.games:
            self.on_progress(Progress(f"The split {config.split} has {len(scenarios)} scenarios, not {config.games}"))
        self.names = scenario_names(self.task, scenarios)
        plan = RolloutPlan(
            task=self.task, scenarios=scenarios, names=self.names, rollouts=config.rollouts,
            timeout_s=config.rollout_timeout,
        )  # fmt: skip
        self.contestants = [self._contestant(model, plan) for model in self.models]
        await asyncio.to_thread(importlib.import_module, "openai.resources.chat.completions")  # half a second
        try:
            await self._price()
            elsewhere = [one for one in self.contestants if one.place.kind in ("endpoint", "scripted")]
            await together(self._run(one) for one in elsewhere)
            async with self.servers:
                for one in self.contestants:
                    if one not in elsewhere:
                        await self._run(one)
        finally:
            result = self._publish()
        return result

    def _contestant(self, model: ComparedModel, plan: RolloutPlan) -> _Contestant:
        place = locate(model, self.config.data_dir)
        asking = self._asking(model)
        identity = f"{place.identity} {sorted(asking.params.items())} {asking.omit} {asking.max_tokens}"
        kept = KeptRollouts(file_of(self.folder, model.label, identity))
        run = ModelRun(plan, kept, is_metered=place.kind != "scripted", on_rollout=self._update)
        if num_kept := len(scored(run.rows())):
            self.on_progress(Progress(f"{model.label}: {num_kept} rollouts are kept from an earlier run"))
        return _Contestant(model, place, run)

    def _asking(self, model: ComparedModel) -> Asking:
        config = self.config
        return Asking(
            timeout_s=config.call_timeout, attempts=config.attempts, patience_s=config.patience,
            max_tokens=model.max_tokens or config.max_tokens, params=model.params, omit=model.omit,
        )  # fmt: skip

    async def _price(self) -> None:
        if importlib.util.find_spec("litellm") is None:
            return
        for one in self.contestants:
            if isinstance(one.model, Endpoint) and one.model.price is None and not one.place.is_here:
                one.listed = await asyncio.to_thread(listed_price, one.model.model)

    async def _run(self, one: _Contestant) -> None:
        """Make the rollouts of a model that are left. What keeps it from being served is its own problem."""
        if not one.run.left():
            one.state = "done"
            return
        one.state = "running"
        self._update()
        concurrency = one.model.concurrency or self.config.concurrency
        slots = self.slots.setdefault(one.place.group, asyncio.Semaphore(concurrency))
        if one.place.kind == "scripted":
            assert isinstance(one.model, OwnModel)
            await one.run.run(one.model.model, slots, concurrency)
        else:
            await self._ask(one, slots, concurrency)
        if one.state == "running":
            one.state = "gave_up" if one.run.is_given_up else "done"
        if one.run.is_given_up:
            self.on_progress(Progress(f"{one.model.label} is given up: too many rollouts failed in a row", "warning"))

    async def _ask(self, one: _Contestant, slots: asyncio.Semaphore, concurrency: int) -> None:
        """Make the rollouts of a model that is asked over HTTP."""
        if one.place.kind in ("checkpoint", "local"):
            self.on_progress(Progress(f"{one.model.label}: serving it on this machine", "busy"))
        try:
            reached = await self.servers.reach(one.model)
        except ArtError as error:
            one.state, one.problem = "gave_up", str(error)
            self.on_progress(Progress(f"{one.model.label} cannot be served: {error}", "warning"))
            return
        asked = AskedModel(
            self._asking(one.model), self.limits.setdefault(reached.url, RateLimit()), name="model",
            project="compared", inference_base_url=reached.url, inference_api_key=reached.api_key,
            inference_model_name=reached.name,
        )  # fmt: skip
        try:
            await one.run.run(asked, slots, concurrency)
        finally:
            await asked.close()

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
        num_planned = len(self.names) * config.rollouts
        models: list[ModelRow] = []
        for one in self.contestants:
            label = one.model.label
            row = ModelRow(
                label=label, kind=one.place.kind, where=one.place.where, state=one.state, problem=one.problem
            )
            row = measure(row, rows[label], num_planned)
            machine = Prices(device_usd_per_hour=config.price_per_hour) if one.place.is_here else None
            usd, note = price_rollouts(rows[label], one.model.price, one.listed, machine)
            row = row.model_copy(update={"usd_per_1000": usd, "price_note": note})
            models.append(row if label == self.reference else compare_with(row, rows[label], against))
        have = [{name for name, _ in scored(rows[row.label])} for row in models if row.num_rollouts]
        return ModelComparison(
            id=self.folder.name, task=self.task.label, description=self.task.description,
            headline_metric=self.task.headline_metric, split=config.split, seed=config.seed,
            num_scenarios=len(self.names), rollouts_per_scenario=config.rollouts, reference=self.reference,
            num_common=len(set.intersection(*have)) if have else 0, concurrency=config.concurrency,
            started_at=self.started_at, updated_at=time.time(),
            is_complete=all(one.state in ("done", "gave_up") for one in self.contestants), models=models,
        )  # fmt: skip


def listed_price(name: str) -> TokenPrice | None:
    """Return a model's price in litellm's table, which must be installed; `None` if it is not listed."""
    litellm: Any = importlib.import_module("litellm")
    row: Mapping[str, Any] = litellm.model_cost.get(name, {})
    prompt, completion = row.get("input_cost_per_token"), row.get("output_cost_per_token")
    if prompt is None or completion is None:
        return None
    cached = row.get("cache_read_input_token_cost")
    return TokenPrice(
        prompt=prompt * 1e6, completion=completion * 1e6, cached=None if cached is None else cached * 1e6
    )  # fmt: skip
