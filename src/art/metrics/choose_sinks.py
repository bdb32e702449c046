"""Which sinks a model has: those of its `report_metrics`, or those that the environment chooses."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from art.errors import ConfigError
from art.plugins import find_plugins, load_plugin
from art.sinks import Sink
from art.storage.logs import HIDDEN, redact

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_SECRET = re.compile(
    r"(?i).*(api|access|secret|private|account)[_-]?key(_?id)?|(.*[_-])?(key|token|secret|password|passwd|credentials?)"
)
_warned: set[str] = set()
"""Trackers that the environment names and that are not installed, once they were reported."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One sink of a model, not started yet."""

    name: str
    make: Callable[[], Sink]
    why: str


def choose_sinks(
    report_metrics: Sequence[str | Callable[[], Sink]] | None, environment: Mapping[str, str] = os.environ
) -> list[Choice]:
    """Return the sinks of a model.

    Args:
        report_metrics: names of trackers, or classes of sinks (or functions that make one). `None` leaves the choice
            to the environment; an empty list chooses none.

    Raises:
        ConfigError: there is no such tracker, its package is not installed, or one is given twice.
    """
    if report_metrics is None:
        trackers = [load_tracker(name) for name in find_plugins("art.trackers")]
        return [choice for tracker in trackers if (choice := _chosen_by(environment, tracker)) is not None]
    choices = []
    for item in report_metrics:
        if isinstance(item, str):
            tracker = load_tracker(item)
            if not is_installed(tracker):
                raise ConfigError(
                    f"report_metrics has {item!r}, but the package {tracker.package!r} is not installed: "
                    f"{_how_to_install(tracker)}, or leave {item!r} out",
                    param="report_metrics",
                )
            choices.append(Choice(item, tracker, "`report_metrics` names it"))
            continue
        sink = item() if callable(item) else item
        if not callable(item) or not isinstance(sink, Sink) or not _NAME.fullmatch(getattr(sink, "name", "")):
            raise ConfigError(
                f"report_metrics has {item!r}; expected names of trackers, or subclasses of `art.sinks.Sink` whose "
                "`name` is made of letters, digits, '-' and '_'",
                param="report_metrics",
            )
        choices.append(Choice(sink.name, item, "`report_metrics` has it"))
    names = [choice.name for choice in choices]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"report_metrics has {', '.join(sorted(twice))} more than once", param="report_metrics")
    return choices


def load_tracker(name: str) -> type[Sink]:
    """Import the class of a tracker by its name. Its library is not imported.

    Raises:
        ConfigError: no installed package has such a tracker, or its entry point names something else.
    """
    trackers = find_plugins("art.trackers")
    if name not in trackers:
        raise ConfigError(
            f"report_metrics has {name!r}, which is no tracker; there are {', '.join(trackers)}. A tracker of your own "
            "is a subclass of `art.sinks.Sink`: pass the class instead of a name",
            param="report_metrics",
        )
    tracker = load_plugin("art.trackers", name)
    if not (isinstance(tracker, type) and issubclass(tracker, Sink) and tracker.name == name):
        raise ConfigError(
            f"the entry point {name!r} of the group 'art.trackers' ({trackers[name].value}) must be a subclass of "
            f"`art.sinks.Sink` with name = {name!r}"
        )
    return tracker


def is_installed(tracker: type[Sink]) -> bool:
    """Whether the library that a tracker needs is installed."""
    if tracker.package is None:
        return True
    try:
        spec = importlib.util.find_spec(tracker.package)
    except ModuleNotFoundError:  # not even the package around it
        return False
    # A folder of data, like the ./wandb that wandb makes, looks like a package but has no file of code.
    return spec is not None and (spec.origin is not None or "." in tracker.package)


def _chosen_by(environment: Mapping[str, str], tracker: type[Sink]) -> Choice | None:
    """The choice of a tracker whose variables are set; `None` if they are not, or its library is not installed."""
    is_set = [any(environment.get(name) for name in names.split("|")) for names in tracker.environment]
    is_off = any(environment.get(name, "").lower() == value for name, value in tracker.switched_off_by)
    if not is_set or not all(is_set) or is_off:
        return None
    variables = " and ".join(tracker.environment).replace("|", " or ")
    if is_installed(tracker):
        return Choice(tracker.name, tracker, f"{variables} is set; `report_metrics=[]` switches it off")
    if tracker.name not in _warned:
        _warned.add(tracker.name)
        logger.warning(
            "%s is set, but %s is not installed, so nothing is reported there: %s, or pass `report_metrics=[]`",
            variables, tracker.package, _how_to_install(tracker),
        )  # fmt: skip
    return None


def _how_to_install(tracker: type[Sink]) -> str:
    what = tracker.package if tracker.extra is None else f"'agent-reinforcement-trainer[{tracker.extra}]'"
    return f"pip install {what}"


def plain_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as plain JSON for a tracker, without those that look like secrets. Other objects become text."""
    plain: dict[str, Any] = json.loads(json.dumps(values, default=_as_plain))
    return {key: _without_secrets(key, value) for key, value in plain.items()}


def _as_plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    return vars(value) if hasattr(value, "__dict__") and not callable(value) else str(value)


def _without_secrets(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_secrets(key, item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_secrets(name, item) for item in value]
    if isinstance(value, str):
        return HIDDEN if value and is_secret(name) else redact(value)
    return value


def is_secret(name: str) -> bool:
    """Whether a setting of this name is likely to be a key or a password."""
    return _SECRET.fullmatch(name) is not None
