"""Wire types of the preflight: what was looked at before a training, and what it showed."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from art.protocol.training import Wire, WireGroup

CheckStatus = Literal["ok", "warning", "failure"]


class CheckResult(Wire):
    """One thing that was looked at."""

    name: str
    status: CheckStatus
    found: str
    """What was seen, in plain words."""
    remedy: str | None = None
    """What to do about it; none where all is well."""
    measured: dict[str, float] = {}


class PreflightRequest(Wire):
    quick: bool = True
    """Versions, devices, disk space and chat format: about a second."""
    trial: bool = True
    """A step in the trainer process on one sequence of random tokens."""
    trial_tokens: int | None = Field(default=None, ge=2)
    """Its length; `None`: the longest that the engine takes."""
    groups: list[WireGroup] = []
    """Rollouts that this server has sampled: whether their answers depend on what the model was shown, and a further
    step on them."""


class PreflightReport(Wire):
    checks: list[CheckResult]
