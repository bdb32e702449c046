"""`ArtClient` runs and trains an agent on an `art-server`, by its task; `ruler_score_group` judges a list."""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, overload

import art
from art.backend import BackendModel, ModelRegistration
from art.errors import ConfigError
from art.metrics.scores import mean_with_interval
from art.protocol.training import ModelStatus
from art.rewards import GroupScorer, Judge, Ruler
from art.rewards import ruler_score_group as score_group
from art.rewards.judge import RewardFunction
from art.task import Split, Task, get_task
from art_recipes.training.training_loop import StepReport, evaluate, train_task

logger = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_MODEL = ("openpipe", "agent")
"""Project and name of the model to register if none is given."""
MAX_RUNS = 10_000
"""Number of rollouts of `run_agent` that are remembered, because `train` uses rewards that are set on them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEvaluation:
    """The result of `evaluate`: rewards of a model on held-out scenarios of a task."""

    task: str
    mean_reward: float
    interval: tuple[float, float]
    """95 % confidence interval of the mean reward."""
    n: int
    """Number of rollouts that ended with a reward."""
    num_failed: int
    """Number of rollouts that failed without the model's fault; they are left out of the mean."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Mean of each metric of the task."""
    trajectories: list[art.Trajectory] = field(default_factory=list, repr=False)


@dataclass(frozen=True, slots=True)
class _Run:
    """A rollout of `run_agent`, with its first reward."""

    task: str
    scenario_id: str
    trajectory: art.Trajectory
    reward: float


class AsyncArtClient:
    """A client that runs and trains one model on an `art-server`."""

    def __init__(
        self,
        server_url: str | None = None,
        api_key: str | None = None,
        *,
        model: str | None = None,
        base_model: str | None = None,
    ) -> None:
        """
        Args:
            server_url: address of an `art-server`; by default the variable ART_SERVER_URL.
            api_key: API key; by default the variable ART_API_KEY, or the key that a server on this machine made.
            model: `project/name`; by default the only model of the server.
            base_model: base model to register the model with if the server does not know it; by default the only one
                that the server has loaded.
        """
        if model is not None and model.count("/") != 1:
            raise ConfigError(f"`model` is written project/name, got {model!r}")
        self._backend = _Attached(server_url, api_key)
        self._model_path = model
        self._base_model = base_model
        self._model: art.TrainableModel | None = None
        self._task: Task | None = None
        self._runs: deque[_Run] = deque(maxlen=MAX_RUNS)

    async def run_agent(
        self, task: str | Task, prompt: str | None = None, *, index: int = 0, step: int | None = None
    ) -> art.Trajectory:
        """Run one rollout of a task and return it with its reward.

        Another call with the same prompt or index makes another rollout of the same scenario. `train` uses rewards that
        are set on the result, by hand or by `ruler_score_group`.

        Args:
            task: name of the task, `module:attribute`, or the task itself; `train` uses the same task.
            prompt: what the user says; without a prompt, held-out scenario number `index` is used.
            step: checkpoint to act with; by default the newest.

        Raises:
            ConfigError: the task is unknown, it has no scenario for a text of the user, or the server has several
                models and none is given.
        """
        chosen = self._choose(task, "run_agent")
        if prompt is None:
            scenario = chosen.scenarios("val", seed=0, count=index + 1)[index]
        else:
            scenario = chosen.prompt_scenario(prompt)
        known = sum(run.scenario_id == scenario.id for run in self._runs)
        trajectory = await chosen.rollout(await self._ready(), scenario, rollout_index=known, step=step)
        self._runs.append(_Run(chosen.name, scenario.id, trajectory, trajectory.reward))
        return trajectory

    async def train(
        self,
        iterations: int,
        *,
        task: str | Task | None = None,
        learning_rate: float | None = None,
        groups: int | None = None,
        rollouts: int | None = None,
        seed: int = 0,
        on_step: Callable[[StepReport], None] | None = None,
        judge: str | art.Model[Any, Any] | Judge | RewardFunction | None = None,
    ) -> list[StepReport]:
        """Train the model for `iterations` steps. The weights of each step are served when the next begins.

        If rewards were set on results of `run_agent` since the last call, the first step trains on those rollouts. All
        other steps make rollouts of their own.

        Args:
            iterations: number of steps.
            task: task to train; by default that of the last `run_agent`.
            learning_rate: learning rate; by default the task's own.
            groups: scenarios per step; by default the task's own.
            rollouts: rollouts per scenario; by default the task's own.
            seed: seed of the scenarios.
            on_step: called with the report of each step.
            judge: gives the rewards instead of the task: a model that compares the rollouts of a group (`openai/o3`),
                or any judge of `art.rewards`.

        Raises:
            ConfigError: no task is known yet.
            TrainingError: for several steps in a row there was nothing to learn.
        """
        chosen = self._choose(task, "train")
        sizes = {"learning_rate": learning_rate, "groups_per_step": groups, "rollouts_per_group": rollouts}
        changes: dict[str, Any] = {name: value for name, value in sizes.items() if value is not None}
        # The number of further calls is unknown, so the rate does not fall towards the end of this call.
        defaults = replace(chosen.defaults, schedule="constant", **changes)
        model = await self._ready()
        await asyncio.to_thread(lambda: wait(list(_pending)))  # for judgements that `ruler_score_group` has started
        return await train_task(
            model, chosen, defaults, num_steps=await model.get_step() + iterations, seed=seed,
            on_step=on_step or (lambda report: None), score=_scorer(judge), rewarded=self._take_rewarded(chosen.name),
        )  # fmt: skip

    async def evaluate(
        self, task: str | Task | None = None, *, count: int = 100, seed: int = 0, split: Split = "test"
    ) -> TaskEvaluation:
        """Measure the mean reward of `count` rollouts on scenarios that are never trained.

        Args:
            task: task to evaluate; by default that of the last `run_agent`. `train` uses the same task.

        Raises:
            ConfigError: no task is known yet.
            FaultRateError: more than half of the rollouts failed without the model's fault.
        """
        chosen = self._choose(task, "evaluate")
        played = (await evaluate(await self._ready(), chosen, count=count, seed=seed, split=split)).trajectories
        mean_reward, interval = mean_with_interval([trajectory.reward for trajectory in played])
        names = {name for trajectory in played for name in trajectory.metrics}
        return TaskEvaluation(
            task=chosen.name, mean_reward=mean_reward, interval=interval, n=len(played),
            num_failed=count - len(played), trajectories=played,
            metrics={
                name: statistics.fmean(float(t.metrics[name]) for t in played if name in t.metrics)
                for name in sorted(names)
            },
        )  # fmt: skip

    async def close(self) -> None:
        """Close the connections of this event loop."""
        await self._backend.close()

    def _choose(self, task: str | Task | None, what: str) -> Task:
        if task is not None:
            self._task = get_task(task) if isinstance(task, str) else task
        if self._task is None:
            raise ConfigError(f"`{what}` does not know the task yet: pass `task=`, or call `run_agent` first")
        return self._task

    def _take_rewarded(self, task: str) -> list[art.TrajectoryGroup] | None:
        """Groups of `run_agent` whose rewards were set since the last call; each is trained once."""
        by_scenario: dict[str, list[_Run]] = {}
        for run in self._runs:
            if run.task == task:
                by_scenario.setdefault(run.scenario_id, []).append(run)
        self._runs = deque((run for run in self._runs if run.task != task), MAX_RUNS)
        changed = [runs for runs in by_scenario.values() if any(run.trajectory.reward != run.reward for run in runs)]
        groups = [art.TrajectoryGroup([run.trajectory for run in runs]) for runs in changed]
        usable = [group for group in groups if len({trajectory.reward for trajectory in group}) > 1]
        if len(usable) < len(groups):
            logger.warning(
                "the rewards that were set for %d of %d prompts teach nothing: they need at least two rollouts of the "
                "same prompt whose rewards differ. Call `run_agent` several times with each, or pass `judge=` to "
                "`train`, which scores every rollout of the training",
                len(groups) - len(usable), len(groups),
            )  # fmt: skip
        return usable or None

    async def _ready(self) -> art.TrainableModel:
        if self._model is None:
            known = await self._backend.known_models()
            names = ", ".join(f"{status.project}/{status.name}" for status in known) or "none"
            path = None if self._model_path is None else tuple(self._model_path.split("/"))
            fitting = [status for status in known if path in (None, (status.project, status.name))]
            if len(fitting) > 1:
                raise ConfigError(f"the server has several models ({names}): choose one with `model=`")
            if fitting:
                project, name, base_model = fitting[0].project, fitting[0].name, fitting[0].base_model
            else:
                project, name = path or DEFAULT_MODEL
                base_model = self._base_model or await self._backend.only_base_model()
            model = art.TrainableModel(project=project, name=name, base_model=base_model)
            await model.register(self._backend)
            self._model = model
        return self._model


class ArtClient:
    """`AsyncArtClient` for code without an event loop, with the same arguments and results."""

    def __init__(self, server_url: str | None = None, api_key: str | None = None, **settings: Any) -> None:
        self._client = AsyncArtClient(server_url, api_key, **settings)

    def run_agent(self, task: str | Task, prompt: str | None = None, **settings: Any) -> art.Trajectory:
        """Run one rollout of a task; see `AsyncArtClient.run_agent`."""
        return run_blocking(self._client.run_agent(task, prompt, **settings))

    def train(self, iterations: int, **settings: Any) -> list[StepReport]:
        """Make `iterations` training steps; see `AsyncArtClient.train`."""
        return run_blocking(self._client.train(iterations, **settings))

    def evaluate(self, task: str | Task | None = None, **settings: Any) -> TaskEvaluation:
        """Measure the mean reward on held-out scenarios; see `AsyncArtClient.evaluate`."""
        return run_blocking(self._client.evaluate(task, **settings))


def _scorer(judge: str | art.Model[Any, Any] | Judge | RewardFunction | None) -> GroupScorer | None:
    if judge is None:
        return None
    return GroupScorer(Ruler(judge) if isinstance(judge, str | art.Model) else judge)


class _Attached(art.RemoteBackend):
    """A backend that registers a known model with the settings it already has."""

    async def register(self, model: BackendModel) -> ModelRegistration | None:
        client = await self._connection()
        for status in await self.known_models():
            if (status.project, status.name) == (model.project, model.name):
                return ModelRegistration(server_url=client.base_url, api_key=client.api_key, status=status)
        return await super().register(model)

    async def known_models(self) -> list[ModelStatus]:
        client = await self._connection()
        names = [card.id.split("/") for card in await client.list_models() if not card.id.endswith("@promoted")]
        return [await client.model_status(project, name) for project, name in names]

    async def only_base_model(self) -> str:
        client = await self._connection()
        loaded = [host["base_model"] for host in (await client.health()).get("base_models", [])]
        if len(loaded) != 1:
            raise ConfigError(
                f"the server does not know the model, and has loaded {len(loaded)} base models "
                f"({', '.join(loaded) or 'none'}): pass `base_model=`"
            )
        return str(loaded[0])


# -- RULER for a plain list of trajectories, with and without `await` --

_pending: set[Future[list[art.Trajectory]]] = set()
"""Judgements that still run."""


class Scored(Sequence[art.Trajectory]):
    """Trajectories that a judge scores in a thread. `await` gives them as a list; any other use waits for scores."""

    def __init__(self, future: Future[list[art.Trajectory]]) -> None:
        self._future = future

    def __await__(self) -> Generator[Any, None, list[art.Trajectory]]:
        return asyncio.wrap_future(self._future).__await__()

    @overload
    def __getitem__(self, index: int) -> art.Trajectory: ...
    @overload
    def __getitem__(self, index: slice) -> list[art.Trajectory]: ...
    def __getitem__(self, index: int | slice) -> art.Trajectory | list[art.Trajectory]:
        return self._future.result()[index]

    def __len__(self) -> int:
        return len(self._future.result())

    def __eq__(self, other: object) -> bool:
        return self._future.result() == (list(other) if isinstance(other, Scored) else other)

    __hash__ = object.__hash__  # for `asyncio.gather`

    def __repr__(self) -> str:
        return repr(self._future.result())


async def aruler_score_group(
    trajectories: Iterable[art.Trajectory], model: str | art.Model[Any, Any], **settings: Any
) -> list[art.Trajectory]:
    """Have a judge model compare trajectories, set its scores as their rewards, and return them in the same order.

    Args:
        trajectories: rollouts of one scenario.
        model: the judge, by its litellm name (`openai/o3`), or a model with an address of its own.
        settings: other arguments of `art.rewards.ruler_score_group`.

    Raises:
        JudgeError: there are no usable scores; all rewards stay as they were.
    """
    own = list(trajectories)
    scored = await score_group(art.TrajectoryGroup(own), model, **{**settings, "swallow_exceptions": False})
    assert scored is not None
    for trajectory, judged in zip(own, scored, strict=True):
        trajectory.reward, trajectory.metrics, trajectory.logs = judged.reward, judged.metrics, judged.logs
    return own


def ruler_score_group(
    trajectories: Iterable[art.Trajectory], model: str | art.Model[Any, Any], **settings: Any
) -> Scored:
    """Have a judge model set the rewards of trajectories; arguments and errors are those of `aruler_score_group`.

    This is for code without `await`. In a notebook it returns at once, and the result may be awaited.
    """

    def report(future: Future[list[art.Trajectory]]) -> None:
        _pending.discard(future)
        if not future.cancelled() and (error := future.exception()) is not None:
            logger.warning("trajectories keep their rewards, because scoring them failed: %s", error)

    future = start_blocking(aruler_score_group(trajectories, model, **settings))
    if future.done():
        future.result()
    else:
        _pending.add(future)
        future.add_done_callback(report)
    return Scored(future)


def start_blocking(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Start a coroutine: in a thread if an event loop runs here (a notebook), else run it to its end."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        future: Future[T] = Future()
        future.set_result(asyncio.run(work))
        return future
    thread = ThreadPoolExecutor(max_workers=1)
    try:
        return thread.submit(asyncio.run, work)
    finally:
        thread.shutdown(wait=False)


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine, with or without a running event loop, wait for its end and return its result."""
    return start_blocking(work).result()
