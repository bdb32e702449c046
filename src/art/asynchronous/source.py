"""The stream of scenarios by position: a list, gone through again and again, or a function that never ends.

    Passes(["a", "b", "c"], seed=0, shuffle=False).at(4)     # Placed(scenario="b", scenario_id="1", pass_number=1)
    Endless(make_scenario).at(4)                             # Placed(scenario=make_scenario(4), scenario_id="4", ...)

What a position holds never changes, so a training that was interrupted goes on in the middle of a pass.
"""

from __future__ import annotations

import inspect
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from art.asynchronous.curriculum import Curriculum
from art.asynchronous.plan import GroupPlan
from art.client.rollout_context import derive_seed
from art.config.pipeline import PipelineConfig
from art.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The scenario at a position of the stream."""

    scenario: Any
    scenario_id: str
    pass_number: int = 0
    """How often the list was gone through before; 0 for an endless stream."""
    index: int | None = None
    """Index of the scenario in the list; `None` for an endless stream."""
    reason: Mapping[str, float | str] = field(default_factory=dict)
    """Why it was chosen."""


class Source(ABC):
    """A stream of scenarios."""

    @abstractmethod
    def at(self, position: int) -> Placed:
        """Return the scenario at `position`, from 0. Positions are asked for once each, in their order."""

    @property
    @abstractmethod
    def identity(self) -> Mapping[str, Any]:
        """What must not change while groups are under way, as JSON data."""

    def resume(self, plan: GroupPlan) -> Placed:
        """Return the scenario of a group that an earlier run has started."""
        return self.at(plan.position)

    def report(self, index: int | None, rewards: Sequence[float]) -> None:
        """Note the rewards of a group that was trained, or none for a group that was lost. Nothing by default."""
        return

    def state(self) -> dict[str, Any]:
        """Return what was learnt from the rewards so far, as small JSON data."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with what an earlier run had learnt."""
        return

    def metrics(self) -> dict[str, float]:
        """Return numbers about what was chosen since the last call."""
        return {}


class Passes(Source):
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
        self._order = lru_cache(maxsize=2)(self._make_order)

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"scenarios": f"{len(self.ids)} with digest {derive_seed(*self.ids):016x}", "shuffle": self._shuffle}

    def at(self, position: int) -> Placed:
        pass_number, place = divmod(position, len(self.scenarios))
        return self.placed(self._order(pass_number)[place], pass_number)

    def placed(self, index: int, pass_number: int, reason: Mapping[str, float | str] | None = None) -> Placed:
        """Return a scenario of the list by its index."""
        return Placed(
            scenario=self.scenarios[index], scenario_id=self.ids[index], pass_number=pass_number, index=index,
            reason=reason or {},
        )  # fmt: skip

    def _make_order(self, pass_number: int) -> list[int]:
        order = list(range(len(self.scenarios)))
        if self._shuffle:
            random.Random(derive_seed("pass", self._seed, pass_number)).shuffle(order)
        return order


class Curricular(Passes):
    """Chooses the scenarios of a list whose next group probably has spread in its rewards."""

    def __init__(self, scenarios: Sequence[Any], config: PipelineConfig) -> None:
        super().__init__(scenarios, seed=config.seed, shuffle=False)
        self._curriculum = Curriculum(len(self.ids), seed=config.seed, num_rollouts=config.rollouts_per_group)

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"curriculum": True}  # the list may become longer: each group's scenario is compared

    def at(self, position: int) -> Placed:
        choice = self._curriculum.next(position)
        return self.placed(choice.index, 0, choice.reason)

    def resume(self, plan: GroupPlan) -> Placed:
        index = self.ids.index(plan.scenario_id) if plan.scenario_id in self.ids else len(self.ids)
        self._curriculum.resume(plan.position, index)
        return self.placed(index, 0, plan.reason)

    def report(self, index: int | None, rewards: Sequence[float]) -> None:
        assert index is not None
        self._curriculum.report(index, rewards)

    def state(self) -> dict[str, Any]:
        return self._curriculum.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._curriculum.restore(dict(state))

    def metrics(self) -> dict[str, float]:
        return self._curriculum.metrics()


class Endless(Source):
    """Asks a function for the scenario at each position."""

    def __init__(self, scenario_at: Callable[[int], Any]) -> None:
        self._scenario_at = scenario_at

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"scenarios": "a function of the position"}

    def at(self, position: int) -> Placed:
        scenario = self._scenario_at(position)
        if inspect.isawaitable(scenario):
            if inspect.iscoroutine(scenario):
                scenario.close()
            raise ConfigError("`scenarios` returned a coroutine; expected a plain function that returns the scenario")
        return Placed(scenario=scenario, scenario_id=id_of(scenario, position))


def make_source(scenarios: Sequence[Any] | Callable[[int], Any], config: PipelineConfig) -> Source:
    """Make the stream of what the user gave as `scenarios`.

    Raises:
        ConfigError: it is neither a list nor a function, or settings do not apply to it.
    """
    if callable(scenarios):
        for name in {"shuffle", "curriculum"} & config.model_fields_set:
            if getattr(config, name):
                raise ConfigError(f"`{name}` needs a list of scenarios; `scenarios` is a function", param=name)
        return Endless(scenarios)
    if not isinstance(scenarios, Sequence) or isinstance(scenarios, (str, bytes)):
        raise ConfigError(
            f"`scenarios` takes a list, or a function that returns the scenario at a position; got a "
            f"{type(scenarios).__name__}"
        )
    if config.curriculum:
        return Curricular(scenarios, config)
    return Passes(scenarios, seed=config.seed, shuffle=config.shuffle)


def id_of(scenario: Any, index: int) -> str:
    """Return the `id` of a scenario, an attribute or a key of a dictionary; by default its index."""
    known = scenario.get("id") if isinstance(scenario, Mapping) else getattr(scenario, "id", None)
    return str(index if known is None else known)
