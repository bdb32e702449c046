"""Where traces go, from OpenTelemetry's own environment variables.

OTEL_EXPORTER_OTLP_ENDPOINT              http://collector:4318   (`/v1/traces` is added)
OTEL_EXPORTER_OTLP_TRACES_ENDPOINT       the whole address of traces, in place of that
OTEL_EXPORTER_OTLP_METRICS_ENDPOINT      the whole address of metrics; only with it numbers go out as OTLP metrics
OTEL_EXPORTER_OTLP_HEADERS               key=value,key=value     (values are URL-encoded; `..._TRACES_HEADERS` wins)
OTEL_EXPORTER_OTLP_TIMEOUT, _COMPRESSION, _CERTIFICATE, _PROTOCOL
OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES
OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT   true, span_only or span_and_event sends texts
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from art.errors import ConfigError

logger = logging.getLogger(__name__)

CONTENT_VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
_PREFIX = "OTEL_EXPORTER_OTLP_"
_MAX_TIMEOUT_S = 120.0
_CONTENT = {
    "": False, "false": False, "no_content": False, "event_only": False,
    "true": True, "span_only": True, "span_and_event": True,
}  # fmt: skip
"""Values of the variable in OpenTelemetry's GenAI instrumentations. `event_only` keeps texts out of spans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtlpSettings:
    """How to reach a collector."""

    traces_url: str
    metrics_url: str | None = None
    """Address of OTLP metrics; `None` sends none."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    metrics_headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout_s: float = 10.0
    is_compressed: bool = True
    certificate: str | None = None
    """File with the certificates to trust; by default those of the system."""
    resource: Mapping[str, str] = field(default_factory=dict)
    """Attributes of everything that is sent."""


def read_settings(
    environment: Mapping[str, str],
    *,
    traces_url: str | None = None,
    headers: Mapping[str, str] | None = None,
    resource: Mapping[str, str] | None = None,
) -> OtlpSettings:
    """Read the settings of the environment.

    Args:
        traces_url: address of a service, in place of those of the environment.
        headers: headers of that service. Those of the environment belong to another one and are not sent to it.
        resource: further attributes of the resource.

    Raises:
        ConfigError: there is no address, or a variable cannot be honoured.
    """
    url = traces_url or _signal(environment, "TRACES_ENDPOINT") or _below(_signal(environment, "ENDPOINT"), "v1/traces")
    if not url:
        raise ConfigError(
            "the sink `otlp` has no address: set OTEL_EXPORTER_OTLP_ENDPOINT, for example to http://localhost:4318",
            param="report_metrics",
        )
    metrics_url = "" if traces_url else _signal(environment, "METRICS_ENDPOINT")
    if not traces_url:
        _check_protocol(environment)
    headers = _headers(environment, "TRACES_HEADERS") if headers is None else headers
    metrics_headers = _headers(environment, "METRICS_HEADERS")
    _check_headers({**metrics_headers, **headers})
    return OtlpSettings(
        traces_url=check_url(url, f"{_PREFIX}TRACES_ENDPOINT or {_PREFIX}ENDPOINT"),
        metrics_url=check_url(metrics_url, f"{_PREFIX}METRICS_ENDPOINT") if metrics_url else None,
        headers=headers,
        metrics_headers=metrics_headers,
        timeout_s=_timeout(environment),
        is_compressed=_is_compressed(environment),
        certificate=_either(environment, "TRACES_CERTIFICATE", "CERTIFICATE") or None,
        resource=read_resource(environment) | dict(resource or {}),
    )


def read_content(environment: Mapping[str, str]) -> bool:
    """Return whether OpenTelemetry's variable asks for the texts of messages and tools."""
    value = environment.get(CONTENT_VARIABLE, "").strip().lower()
    if value not in _CONTENT:
        logger.warning(
            "%s is %r; expected one of %s. No texts are sent",
            CONTENT_VARIABLE,
            value,
            ", ".join(filter(None, _CONTENT)),
        )
    return _CONTENT.get(value, False)


def read_resource(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the resource's attributes; `service.name` is `art` unless a variable names it."""
    attributes = {"service.name": "art"} | read_pairs(environment, "OTEL_RESOURCE_ATTRIBUTES")
    if name := environment.get("OTEL_SERVICE_NAME"):
        attributes["service.name"] = name
    return attributes


def check_url(url: str, what: str) -> str:
    """
    Raises:
        ConfigError: `url` is no http address.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{what} is {url!r}; expected an address like http://localhost:4318", param="report_metrics")
    return url


def _check_headers(headers: Mapping[str, str]) -> None:
    """Refuse what HTTP cannot send, such as a key with a line break. The error does not show the value."""
    for name, value in headers.items():
        if not (name + value).isascii() or not (name + value).isprintable():
            raise ConfigError(
                f"the header {name!r} has characters other than printable ASCII; was its key copied with a line break?",
                param="report_metrics",
            )


def _check_protocol(environment: Mapping[str, str]) -> None:
    protocol = _either(environment, "TRACES_PROTOCOL", "PROTOCOL") or "http/protobuf"
    if protocol != "http/protobuf":
        raise ConfigError(
            f"{_PREFIX}PROTOCOL is {protocol!r}, but the sink `otlp` sends http/protobuf only: set "
            f"{_PREFIX}TRACES_PROTOCOL=http/protobuf and the collector's HTTP address (port 4318 by default)",
            param="report_metrics",
        )


def _is_compressed(environment: Mapping[str, str]) -> bool:
    compression = _either(environment, "TRACES_COMPRESSION", "COMPRESSION") or "gzip"
    if compression not in ("gzip", "none"):
        raise ConfigError(
            f"{_PREFIX}COMPRESSION is {compression!r}; expected gzip or none", param="report_metrics"
        )  # fmt: skip
    return compression == "gzip"


def _timeout(environment: Mapping[str, str]) -> float:
    """Seconds, as in OpenTelemetry's exporter for Python. (Those of other languages read milliseconds.)"""
    text = _either(environment, "TRACES_TIMEOUT", "TIMEOUT") or "10"
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = 0.0
    if not timeout_s > 0:
        raise ConfigError(f"{_PREFIX}TIMEOUT is {text!r}; expected seconds above 0", param="report_metrics")
    return min(timeout_s, _MAX_TIMEOUT_S)


def _headers(environment: Mapping[str, str], signal: str) -> dict[str, str]:
    name = f"{_PREFIX}{signal}" if environment.get(f"{_PREFIX}{signal}") else f"{_PREFIX}HEADERS"
    return {key.lower(): value for key, value in read_pairs(environment, name).items()}


def read_pairs(environment: Mapping[str, str], variable: str) -> dict[str, str]:
    """Read a variable that holds `key=value,key=value`.

    Raises:
        ConfigError: it holds something else. The message does not show the text, which may be a secret.
    """
    pairs = {}
    for number, item in enumerate(filter(str.strip, environment.get(variable, "").split(",")), start=1):
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise ConfigError(
                f"{variable} has something else than key=value at place {number}; expected key=value,key=value, with "
                "URL-encoded values",
                param="report_metrics",
            )
        pairs[unquote(key.strip())] = unquote(value.strip())
    return pairs


def _signal(environment: Mapping[str, str], name: str) -> str:
    return environment.get(f"{_PREFIX}{name}", "").strip()


def _either(environment: Mapping[str, str], first: str, second: str) -> str:
    return _signal(environment, first) or _signal(environment, second)


def _below(base: str, path: str) -> str:
    return f"{base.rstrip('/')}/{path}" if base else ""
