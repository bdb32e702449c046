"""Which sinks a model has: those of its `report_metrics`, or those that the environment chooses.

`KINDS` is the table of trackers that have a name, for `report_metrics=["..."]` and `--report ...`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from art.errors import ConfigError
from art.sinks.sink import Sink
from art.storage.log_lines import HIDDEN, redact

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_SECRET = re.compile(
    r"(?i).*(api|access|secret|private|account)[_-]?key(_?id)?|(.*[_-])?(key|token|secret|password|passwd|credentials?)"
)
_warned: set[str] = set()
"""Trackers that the environment names and that are not installed, once they were reported."""


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
    """Variables that, when all are set, choose the tracker for models whose `report_metrics` is `None`. `A|B` is set
    when either is."""
    switched_off_by: tuple[tuple[str, str], ...] = ()
    """Variables and values, any of which prevents that, such as `("WANDB_MODE", "disabled")`."""

    @property
    def is_installed(self) -> bool:
        try:
            spec = importlib.util.find_spec(self.package)
        except ModuleNotFoundError:  # not even the package around it
            return False
        # A folder of data, like the ./wandb that wandb makes, looks like a package but has no file of code.
        return spec is not None and (spec.origin is not None or "." in self.package)

    def make(self) -> Sink:
        """Make a sink of this kind."""
        sink: Sink = getattr(importlib.import_module(self.module), self.factory)()
        return sink

    def is_on(self, environment: Mapping[str, str]) -> bool:
        """Whether the environment alone chooses the tracker."""
        is_set = [any(environment.get(name) for name in names.split("|")) for names in self.environment]
        if not is_set or not all(is_set):
            return False
        return not any(environment.get(name, "").lower() == value for name, value in self.switched_off_by)


_OTLP_PACKAGE = "opentelemetry.exporter.otlp.proto.http"

KINDS: dict[str, SinkKind] = {
    "mlflow": SinkKind(
        module="art.sinks.mlflow", factory="MlflowSink", package="mlflow", extra="mlflow",
        environment=("MLFLOW_TRACKING_URI",),
    ),
    "tensorboard": SinkKind(
        module="art.sinks.tensorboard", factory="TensorboardSink", package="tensorboard", extra="tensorboard",
    ),
    "trackio": SinkKind(module="art.sinks.trackio", factory="TrackioSink", package="trackio", extra="trackio"),
    "wandb": SinkKind(
        module="art.sinks.wandb", factory="WandbSink", package="wandb", extra="wandb", environment=("WANDB_API_KEY",),
        switched_off_by=(("WANDB_MODE", "disabled"), ("WANDB_DISABLED", "true")),
    ),
    "otlp": SinkKind(
        module="art.sinks.otlp", factory="OtlpSink", package=_OTLP_PACKAGE, extra="otlp",
        environment=("OTEL_EXPORTER_OTLP_ENDPOINT|OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",),
        switched_off_by=(("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")),
    ),
    "langfuse": SinkKind(
        module="art.sinks.otlp", factory="LangfuseSink", package=_OTLP_PACKAGE, extra="otlp",
        environment=("LANGFUSE_PUBLIC_KEY", "LANGFUSE_SECRET_KEY"),
        switched_off_by=(("LANGFUSE_TRACING_ENABLED", "false"),),
    ),
    "weave": SinkKind(
        module="art.sinks.otlp", factory="WeaveSink", package=_OTLP_PACKAGE, extra="otlp",
    ),
    "phoenix": SinkKind(
        module="art.sinks.otlp", factory="PhoenixSink", package=_OTLP_PACKAGE, extra="otlp",
        environment=("PHOENIX_COLLECTOR_ENDPOINT",),
    ),
}  # fmt: skip
"""The trackers by name. Each has a row here, an extra in pyproject.toml and a page in docs/trackers/."""


def find_kind(name: str) -> SinkKind:
    """Return the kind of a tracker.

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
    return kind


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
