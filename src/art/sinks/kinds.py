"""The table of trackers that have a name, for `report_metrics=["..."]` and `--report ...`."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass

from art.errors import ConfigError
from art.sinks.sink import Sink


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkKind:
    """How to make the sinks of one tracker."""

    module: str
    """Module with the class, imported when the tracker is chosen. It must not import the tracker's library itself."""
    factory: str
    """Class in the module, or function without arguments, that makes a sink."""
    package: str
    """Import name of the library that the sink needs."""
    extra: str
    """Extra of ART that installs it."""
    environment: tuple[str, ...] = ()
    """Variables that, when all are set, choose the tracker for models whose `report_metrics` is `None`."""
    switched_off_by: tuple[tuple[str, str], ...] = ()
    """Variables and values, any of which prevents that, such as `("WANDB_MODE", "disabled")`."""

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None

    def is_on(self, environment: Mapping[str, str]) -> bool:
        """Whether the environment alone chooses the tracker."""
        if not self.environment or not all(environment.get(name) for name in self.environment):
            return False
        return not any(environment.get(name, "").lower() == value for name, value in self.switched_off_by)


KINDS: dict[str, SinkKind] = {}
"""The trackers by name. Each has a row here, an extra in pyproject.toml and a page in docs/trackers/."""


def make_sink(name: str) -> Sink:
    """Make the sink of a tracker by its name.

    Raises:
        ConfigError: there is no such tracker, or its package is not installed.
    """
    if name not in KINDS:
        raise ConfigError(
            f"report_metrics has {name!r}, which is no tracker; there are {', '.join(sorted(KINDS))}. A tracker of "
            "your own is a subclass of `art.sinks.Sink`: pass the class instead of a name",
            param="report_metrics",
        )
    kind = KINDS[name]
    if not kind.is_installed:
        raise ConfigError(
            f"report_metrics has {name!r}, but the package {kind.package!r} is not installed: "
            f"pip install 'agent-reinforcement-trainer[{kind.extra}]', or leave {name!r} out",
            param="report_metrics",
        )
    sink: Sink = getattr(importlib.import_module(kind.module), kind.factory)()
    return sink
