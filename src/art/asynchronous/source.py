"""The stream of scenarios by position: a list, gone through again and again, or a function that never ends.

    Passes(["a", "b", "c"], seed=0, shuffle=False).at(4)     # Placed(scenario="b", scenario_id="1", pass_number=1)
    Endless(make_scenario).at(4)                             # Placed(scenario=make_scenario(4), scenario_id="4", ...)

What a position holds never changes, so a training that was interrupted goes on in the middle of a pass.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from art.client.arguments import describe
from art.client.rollout_context import derive_seed
from art.config.pipeline import PipelineConfig
from art.errors import ConfigError
from art.gather import AfterEach
from art.rollout_workers import Call, Workers, run_in
from art.trajectory import PydanticException, Trajectory

RolloutOutcome = Trajectory | PydanticException
"""How a rollout ended: with a trajectory, or with the record of its error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGroup:
    """One group that is to be run, and where it comes from."""

    number: int
    """Number in the order of starting, from 0."""
    position: int
    """Position in the stream of scenarios, from 0."""
    scenario_id: str
    """Name of the scenario, the same in every run."""
    pass_number: int
    """How often the list of scenarios was gone through before; 0 for an endless stream."""
    policy_version: int
    """Step of the newest checkpoint when the group started. With in_flight="finish" all its tokens are from there."""
    seed: int
    """Seed from which those of its rollouts follow; the same in every run, so an interrupted one can start again."""
    num_rollouts: int
    """Rollouts that the group has when it is complete."""


def group_seed(pipeline_seed: int, position: int) -> int:
    """Return the seed of the group at a position of the stream of scenarios, in [0, 2^63)."""
    return derive_seed("group", pipeline_seed, position)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The scenario at a position of the stream."""

    scenario: Any
    scenario_id: str
    pass_number: int = 0
    """How often the list was gone through before; 0 for an endless stream."""


class Passes:
    """Goes through a list in a seeded order, another in each pass."""

    def __init__(self, scenarios: Sequence[Any], *, seed: int, shuffle: bool) -> None:
        """
        Raises:
            ConfigError: the list is empty, or two of its scenarios have the same id.
        """
        self.scenarios = list(scenarios)
        if not self.scenarios:
            raise ConfigError("`scenarios` is empty; expected at least one scenario, or a function of the position")
        self.ids = [id_of(scenario, index) for index, scenario in enumerate(self.scenarios)]
        if len(set(self.ids)) < len(self.ids):
            twice = next(name for index, name in enumerate(self.ids) if name in self.ids[:index])
            raise ConfigError(f"two scenarios have the id {twice!r}; each needs an id of its own, or none has one")
        self._seed, self._shuffle = seed, shuffle
        self._order_of_pass: tuple[int, list[int]] = -1, []
        """The pass that was asked for last, and its order."""

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"scenarios": f"{len(self.ids)} with digest {derive_seed(*self.ids):016x}", "shuffle": self._shuffle}

    def at(self, position: int) -> Placed:
        """Return the scenario at `position`, from 0."""
        pass_number, place = divmod(position, len(self.scenarios))
        if self._order_of_pass[0] != pass_number:
            order = list(range(len(self.scenarios)))
            if self._shuffle:
                random.Random(derive_seed("pass", self._seed, pass_number)).shuffle(order)
            self._order_of_pass = pass_number, order
        index = self._order_of_pass[1][place]
        return Placed(scenario=self.scenarios[index], scenario_id=self.ids[index], pass_number=pass_number)


class Endless:
    """Asks a function for the scenario at each position."""

    def __init__(self, scenario_at: Callable[[int], Any]) -> None:
        self._scenario_at = scenario_at

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"scenarios": "a function of the position"}

    def at(self, position: int) -> Placed:
        """Return the scenario at `position`, from 0."""
        scenario = self._scenario_at(position)
        if inspect.isawaitable(scenario):
            if inspect.iscoroutine(scenario):
                scenario.close()
            raise ConfigError("`scenarios` returned a coroutine; expected a plain function that returns the scenario")
        return Placed(scenario=scenario, scenario_id=id_of(scenario, position))


Source = Passes | Endless
"""A stream of scenarios: `at(position)`, and the `identity` that must not change while groups are under way."""


def make_source(scenarios: Sequence[Any] | Callable[[int], Any], config: PipelineConfig) -> Source:
    """Make the stream of what the user gave as `scenarios`.

    Raises:
        ConfigError: it is neither a list nor a function, or settings do not apply to it.
    """
    if callable(scenarios):
        if "shuffle" in config.model_fields_set and config.shuffle:
            raise ConfigError("`shuffle` needs a list of scenarios; `scenarios` is a function", param="shuffle")
        return Endless(scenarios)
    if not isinstance(scenarios, Sequence) or isinstance(scenarios, (str, bytes)):
        raise ConfigError(
            f"`scenarios` takes a list, or a function that returns the scenario at a position; got a "
            f"{type(scenarios).__name__}"
        )
    return Passes(scenarios, seed=config.seed, shuffle=config.shuffle)


def id_of(scenario: Any, index: int) -> str:
    """Return the `id` of a scenario, an attribute or a key of a dictionary; by default its index."""
    known = scenario.get("id") if isinstance(scenario, Mapping) else getattr(scenario, "id", None)
    return str(index if known is None else known)


_EXTRA = ("rollout_index", "seed")
"""Parameters that a rollout function may have besides the model and the scenario."""


class RolloutFunction:
    """The user's function `rollout(model, scenario)`, which may also have parameters `rollout_index` and `seed`."""

    def __init__(self, function: Callable[..., Awaitable[Trajectory]], workers: Workers | None = None) -> None:
        """
        Args:
            workers: runs the rollouts in other processes.

        Raises:
            ConfigError: it is not a function of a model and a scenario, or workers cannot import it.
        """
        expected = "expected `async def rollout(model, scenario)`, which may also take `rollout_index` and `seed`"
        try:
            parameters = inspect.signature(function).parameters
            extra = [name for name in _EXTRA if name in parameters]
            inspect.signature(function).bind(None, None, **dict.fromkeys(extra))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"`rollout` cannot be called with a model and a scenario ({error}); {expected}") from None
        if workers is not None:
            workers.check(function)
        self._function, self._extra, self.workers = function, extra, workers

    def __call__(self, model: Any, scenario: Any, *, rollout_index: int, seed: int) -> Awaitable[Any]:
        """Begin a rollout.

        Raises:
            ConfigError: the function returned something else than a coroutine.
        """
        values = {"rollout_index": rollout_index, "seed": seed}
        extra = {name: values[name] for name in self._extra}
        if self.workers is not None:
            return run_in(self.workers, Call(self._function, (model, scenario), extra))
        running = self._function(model, scenario, **extra)
        if not inspect.isawaitable(running):
            raise ConfigError(f"`rollout` returned {describe(running)}; make it an `async def`")
        return running


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Held-out scenarios, and the function that runs a rollout of each."""

    scenarios: Sequence[Any]
    ids: Sequence[str]
    """Id of each scenario."""
    rollout: RolloutFunction


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a pipeline was given to run."""

    source: Source
    rollout: RolloutFunction
    after_each: AfterEach | None
    held_out: HeldOut | None
    evaluate_every: int
    """Steps between two evaluations."""
    workers: Workers | None = None
    """Runs the rollouts, if they do not run in this event loop."""


def read_held_out(evaluate: Any, function: RolloutFunction) -> HeldOut | None:
    if evaluate is None:
        return None
    if isinstance(evaluate, tuple) and len(evaluate) == 2 and callable(evaluate[1]):
        evaluate, function = evaluate[0], RolloutFunction(evaluate[1], function.workers)
    if not isinstance(evaluate, Sequence) or isinstance(evaluate, (str, bytes)):
        raise ConfigError("`evaluate` takes a list of held-out scenarios, or a pair of it and a rollout function")
    scenarios = Passes(evaluate, seed=0, shuffle=False)
    return HeldOut(scenarios=scenarios.scenarios, ids=scenarios.ids, rollout=function)
