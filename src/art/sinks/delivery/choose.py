"""Which sinks a model has: those of its `report_metrics`, or those that the environment chooses."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from art.errors import ConfigError
from art.sinks.kinds import KINDS, find_kind
from art.sinks.sink import Sink
from art.storage.log_lines import HIDDEN, redact

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
        return _chosen_by(environment)
    choices = [_choice(item) for item in report_metrics]
    names = [choice.name for choice in choices]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"report_metrics has {', '.join(sorted(twice))} more than once", param="report_metrics")
    return choices


def _choice(item: str | Callable[[], Sink]) -> Choice:
    if isinstance(item, str):
        return Choice(item, find_kind(item).make, "`report_metrics` names it")
    sink = item() if callable(item) else item
    if not callable(item) or not isinstance(sink, Sink) or not _NAME.fullmatch(getattr(sink, "name", "")):
        raise ConfigError(
            f"report_metrics has {item!r}; expected names of trackers, or subclasses of `art.sinks.Sink` whose `name` "
            "is made of letters, digits, '-' and '_'",
            param="report_metrics",
        )
    return Choice(sink.name, item, "`report_metrics` has it")


def _chosen_by(environment: Mapping[str, str]) -> list[Choice]:
    choices = []
    for name, kind in KINDS.items():
        if not kind.is_on(environment):
            continue
        variables = " and ".join(kind.environment).replace("|", " or ")
        if kind.is_installed:
            why = f"{variables} is set; `report_metrics=[]` switches it off"
            choices.append(Choice(name, kind.make, why))
        elif name not in _warned:
            _warned.add(name)
            logger.warning(
                "%s is set, but %s is not installed, so nothing is reported there: pip install "
                "'agent-reinforcement-trainer[%s]', or pass `report_metrics=[]`", variables, kind.package, kind.extra,
            )  # fmt: skip
    return choices


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
