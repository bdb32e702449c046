"""Wire types of usage and quotas: what each project has used in a month, and what it may use."""

from __future__ import annotations

from typing import Any

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from art.protocol.training import Wire


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


class Used(Wire):
    """What was used."""

    prompt: int = 0
    cached: int = 0
    """The part of `prompt` that the engine had in its cache."""
    completion: int = 0
    steps: int = 0
    """Training steps that were published."""
    sampling_s: float = 0.0
    """Seconds of devices for answers. What several requests use at once is split equally among them."""
    training_s: float = 0.0
    """Seconds of devices for training steps, failed and cancelled ones included."""
    usd: float = 0.0
    """Costs by the prices that the server had at the time."""


class ModelUsage(Used):
    name: str
    """Name of the model, or of a base model that was asked without training."""


OTHER_KEYS = "other keys"
"""Name of the sum of the keys that a caller may not tell apart."""


class KeyUsage(Used):
    key_id: str | None
    """Id of the API key that asked; `server` is the operator's own. Null for usage whose key is not known, because an
    older version counted it, and for the sum of the keys that the caller may not tell apart."""
    name: str | None = None
    """What the key was made for; null if the key is not known or not in the server's file."""


class ProjectUsage(Used):
    project: str
    models: list[ModelUsage]
    quota: Quota | None
    """The limits that apply to the project now; null for none."""
    keys: list[KeyUsage] | None = None
    """What each API key has used, if the request asks for it. A key without scope `admin` sees its
    own, and the others as one."""

    @model_serializer(mode="wrap")
    def _only_if_asked(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """An older client refuses fields that it does not know."""
        body: dict[str, Any] = serialize(self)
        if self.keys is None:
            del body["keys"]
        return body


class UsageReport(Wire):
    month: str
    """The month, as `2026-01`."""
    resets_at: str
    """When the quotas of this month end: the first moment of the next one, in UTC."""
    projects: list[ProjectUsage]
    default_quota: Quota | None = None
    """Limits of projects without a quota of their own. Keys for one project do not see it."""
