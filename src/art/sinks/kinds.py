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
        module="art.sinks.otlp.sink", factory="OtlpSink", package="opentelemetry.proto", extra="otlp",
        environment=("OTEL_EXPORTER_OTLP_ENDPOINT|OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",),
        switched_off_by=(("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")),
    ),
    "langfuse": SinkKind(
        module="art.sinks.otlp.langfuse", factory="LangfuseSink", package="opentelemetry.proto", extra="otlp",
        environment=("LANGFUSE_PUBLIC_KEY", "LANGFUSE_SECRET_KEY"),
        switched_off_by=(("LANGFUSE_TRACING_ENABLED", "false"),),
    ),
    "weave": SinkKind(
        module="art.sinks.otlp.weave", factory="WeaveSink", package="opentelemetry.proto", extra="otlp",
    ),
    "phoenix": SinkKind(
        module="art.sinks.otlp.phoenix", factory="PhoenixSink", package="opentelemetry.proto", extra="otlp",
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
