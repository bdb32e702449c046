"""Wire types of rollouts that other programs run: what was recorded under a base URL, and what its reward is."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from art.protocol.training import Wire

Outcome = Literal["ok", "policy_fault", "infra_fault"]
"""How a rollout ended: as it should; spoilt by the policy, which its reward says; or by something else (a tool was
down), which is never scored."""

MAX_PAGE = 1000
_Number = Annotated[float, Field(allow_inf_nan=False)]
_Label = Annotated[str, Field(min_length=1, max_length=256)]
_Key = Annotated[str, Field(max_length=128)]


class RolloutUpdate(Wire):
    """Body of `PUT /api/rollouts/{rollout_id}`. What is left out stays as it is; the same again changes nothing.

    Example: {"group_id": "step3/scenario17", "reward": 0.5} finishes a rollout as `ok`.
    """

    project: str | None = None
    """Of the rollout; needed if it is new, `model` is not given and the key is valid for several projects."""
    model: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$", max_length=257)] | None = None
    """`project/name` of the model that is trained with it; by default the one that answered first. Requests under the
    rollout's base URL that name a model nobody has registered go to this one."""
    group_id: _Label | None = None
    """The same for all rollouts of one group, i.e. of one scenario in one step, and for no other."""
    scenario_id: Annotated[str, Field(max_length=512)] | None = None
    reward: _Number | None = None
    outcome: Outcome | None = None
    """Finishes the rollout. `ok` if only a reward is given."""
    error: Annotated[str, Field(max_length=8192)] | None = None
    """Of an `infra_fault`: what went wrong."""
    metrics: Annotated[dict[_Key, _Number], Field(max_length=128)] | None = None
    metadata: Annotated[dict[_Key, float | int | bool | Annotated[str, Field(max_length=4096)] | None],
                        Field(max_length=128)] | None = None  # fmt: skip

    @model_validator(mode="after")
    def _check_outcome(self) -> Self:
        if self.reward is not None and self.outcome is None:
            self.outcome = "ok"
        if self.outcome in ("ok", "policy_fault") and self.reward is None:
            raise ValueError(f"outcome {self.outcome!r} needs a `reward`; only an infra_fault has none")
        if self.outcome == "infra_fault" and self.reward is not None:
            raise ValueError("an infra_fault has no reward: it is left out of training; leave `reward` out")
        if self.error is not None and self.outcome != "infra_fault":
            raise ValueError("`error` is for outcome 'infra_fault'; say so, or leave it out")
        return self


class RolloutStatus(Wire):
    rollout_id: str
    project: str
    model: str | None
    """`None` while nothing was asked and none was announced."""
    group_id: str | None
    scenario_id: str | None
    reward: float | None
    outcome: Outcome | None
    """`None` while it runs."""
    error: str | None
    metrics: dict[str, float]
    metadata: dict[str, float | int | bool | str | None]
    num_exchanges: int
    first_policy_version: int | None
    last_policy_version: int | None
    """Oldest and newest step that answered."""
    trained_by: str | None
    """The training job that took it in."""
    created_at: float
    """Seconds since the epoch."""


class RolloutRecord(RolloutStatus):
    """A rollout with what was said."""

    histories: list[dict[str, Any]]
    """Each with `messages_and_choices`, where an answer is an OpenAI choice with its `exchange_id`, and `tools`."""


class RolloutQuery(Wire):
    """Which rollouts to list. What is left out does not count."""

    project: str | None = None
    model: str | None = None
    group_id: str | None = None
    finished: bool | None = None
    trained: bool | None = None
    outcome: Outcome | None = None
    since: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """The `next_since` of an earlier page: only what changed after it."""
    limit: Annotated[int, Field(ge=1, le=MAX_PAGE)] = 100


class RolloutPage(Wire):
    rollouts: list[RolloutStatus]
    """By their last change, oldest first."""
    next_since: int
    """Where to go on; the same number again when nothing is new."""
