"""W&B Weave, its Agents view, and CoreWeave Agent Lens, which shows the same traces.

WANDB_API_KEY=...  WANDB_ENTITY=my-team  [WANDB_PROJECT=...]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from art.errors import ConfigError
from art.sinks.otlp.settings import OtlpSettings, read_settings
from art.sinks.otlp.sink import OtlpSink
from art.sinks.sink import Run

_CLOUD = "https://trace.wandb.ai"


class WeaveSink(OtlpSink):
    """Sends rollouts to Weave's endpoint for agents, which groups them by conversation and by agent."""

    name: ClassVar[str] = "weave"

    def settings(self, environment: Mapping[str, str], run: Run) -> OtlpSettings:
        key, entity = environment.get("WANDB_API_KEY", ""), environment.get("WANDB_ENTITY", "")
        if not key or not entity:
            missing = "WANDB_API_KEY" if not key else "WANDB_ENTITY (your user or team)"
            raise ConfigError(f"the sink `weave` needs {missing}: set the variable", param="report_metrics")
        project = environment.get("WANDB_PROJECT") or run.project
        base = (environment.get("WF_TRACE_SERVER_URL") or _CLOUD).rstrip("/")
        return read_settings(
            environment,
            traces_url=f"{base}/agents/otel/v1/traces",
            headers={"wandb-api-key": key},
            resource={"wandb.entity": entity, "wandb.project": project},
        )
