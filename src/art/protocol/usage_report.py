"""Wire types of usage and quotas: what each project has used in a month, and what it may use."""

from __future__ import annotations

from pydantic import Field

from art.protocol.training import TokenCounts, Wire


class Quota(Wire):
    """What a project may use in a calendar month (UTC). A limit that is null does not apply."""

    tokens: int | None = Field(default=None, ge=0)
    """Prompt and sampled tokens. At the limit, sampling is refused."""
    steps: int | None = Field(default=None, ge=0)
    """Training steps. At the limit, training is refused; queued steps count as used."""
    device_s: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Seconds of devices, of sampling and training together. At the limit, both are refused."""
    usd: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Costs by the server's `prices`. At the limit, sampling and training are refused."""


class QuotaRequest(Wire):
    """Set the quota of a project. A quota without any limit lifts that of the project; the default applies again."""

    project: str | None
    """Null sets the quota of every project that has none of its own."""
    quota: Quota


class Used(TokenCounts):
    """What was used."""

    steps: int = 0
    """Training steps that were published."""
    sampling_s: float = 0.0
    """Seconds of devices for answers, which older versions counted. Answers are counted by their tokens."""
    training_s: float = 0.0
    """Seconds of devices for training steps, failed and cancelled ones included."""
    usd: float = 0.0
    """Costs by the prices that the server had at the time."""


class ModelUsage(Used):
    name: str
    """Name of the model, or of a base model that was asked without training."""


class ProjectUsage(Used):
    project: str
    models: list[ModelUsage]
    quota: Quota | None
    """The limits that apply to the project now; null for none."""


class UsageReport(Wire):
    month: str
    """The month, as `2026-01`."""
    resets_at: str
    """When the quotas of this month end: the first moment of the next one, in UTC."""
    projects: list[ProjectUsage]
    default_quota: Quota | None = None
    """Limits of projects without a quota of their own. Keys for one project do not see it."""
