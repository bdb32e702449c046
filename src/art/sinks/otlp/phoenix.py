"""Arize Phoenix.

PHOENIX_COLLECTOR_ENDPOINT=http://localhost:6006  [PHOENIX_API_KEY=...]  [PHOENIX_PROJECT_NAME=...]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from art.sinks.otlp.settings import OtlpSettings, check_url, read_pairs, read_settings
from art.sinks.otlp.sink import OtlpSink
from art.sinks.sink import Run

_LOCAL = "http://localhost:6006"


class PhoenixSink(OtlpSink):
    """Sends rollouts to Phoenix, each training project to a project of the same name."""

    name: ClassVar[str] = "phoenix"

    def settings(self, environment: Mapping[str, str], run: Run) -> OtlpSettings:
        base = environment.get("PHOENIX_COLLECTOR_ENDPOINT") or _LOCAL
        base = check_url(base, "PHOENIX_COLLECTOR_ENDPOINT").rstrip("/").removesuffix("/v1/traces")
        headers = {key.lower(): value for key, value in read_pairs(environment, "PHOENIX_CLIENT_HEADERS").items()}
        if key := environment.get("PHOENIX_API_KEY"):
            headers["authorization"] = f"Bearer {key}"
        return read_settings(
            environment,
            traces_url=f"{base}/v1/traces",
            headers=headers,
            resource={"openinference.project.name": environment.get("PHOENIX_PROJECT_NAME") or run.project},
        )
