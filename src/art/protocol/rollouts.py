"""Wire types of rollouts that other programs run under a base URL of their own."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from art.config import SamplingConfig
from art.protocol.training import Wire

Outcome = Literal["ok", "policy_fault", "infra_fault"]
"""How a rollout ended. `ok`: normally. `policy_fault`: the policy spoilt it, and the reward says so. `infra_fault`:
something else failed, such as a tool; such a rollout is never scored."""

IN_FLIGHT_HEADER = "x-art-in-flight"
"""Header of a request that says what becomes of an answer that is being sampled when a step is published: "switch" lets
it go on with the new weights, "finish" (the default) with those that it began with."""
MAX_PAGE = 1000
_Number = Annotated[float, Field(allow_inf_nan=False)]
_Label = Annotated[str, Field(min_length=1, max_length=256)]
_Key = Annotated[str, Field(max_length=128)]


class RolloutUpdate(Wire):
    """Body of `PUT /api/rollouts/{rollout_id}`. Fields that are left out stay as they are.

    Example: {"group_id": "step3/scenario17", "reward": 0.5} finishes a rollout as `ok`.
    """

    project: str | None = None
    """Project of the rollout. Required for a new rollout if `model` is left out and the key is for all projects."""
    model: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$", max_length=257)] | None = None
    """`project/name` of the model that the rollout trains; by default the model that answered first. Requests under the
    rollout's base URL that name an unregistered model go to this one."""
    sampling: SamplingConfig | None = None
    """How requests under the rollout's base URL are sampled from now on, whatever they ask for. By default as the
    model's settings say, and else as they ask."""
    group_id: _Label | None = None
    """Identifies the group: all rollouts of one scenario in one step share it, and no others."""
    scenario_id: Annotated[str, Field(max_length=512)] | None = None
    reward: _Number | None = None
    outcome: Outcome | None = None
    """Finishes the rollout; `ok` if only a reward is given."""
    error: Annotated[str, Field(max_length=8192)] | None = None
    """What went wrong, for outcome `infra_fault`."""
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
    """`project/name` of the rollout's model; `None` until a request or an update names one."""
    group_id: str | None
    scenario_id: str | None
    reward: float | None
    outcome: Outcome | None
    """How the rollout ended; `None` while it runs."""
    error: str | None
    metrics: dict[str, float]
    metadata: dict[str, float | int | bool | str | None]
    sampling: SamplingConfig | None = None
    """How the rollout is sampled, whatever its requests ask for; `None` if it was not set for the rollout."""
    num_exchanges: int
    first_policy_version: int | None
    last_policy_version: int | None
    """Newest step that answered; `first_policy_version` is the oldest."""
    untrainable: str | None = None
    """Why a training call refused the rollout's group. `collect_trajectory_groups` leaves such a group out."""
    trained_by: str | None
    """Id of the job that trained on the rollout."""
    created_at: float
    """Unix time of the rollout's first recorded request or update."""


class RolloutRecord(RolloutStatus):
    """A rollout's status, with the conversations that were recorded under its base URL."""

    histories: list[dict[str, Any]]
    """Each conversation has `tools` and `messages_and_choices`; answers are OpenAI choices with their `exchange_id`."""


class RolloutQuery(Wire):
    """Which rollouts to list. Fields that are left out do not filter."""

    project: str | None = None
    model: str | None = None
    group_id: str | None = None
    finished: bool | None = None
    trained: bool | None = None
    outcome: Outcome | None = None
    since: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """The `next_since` of an earlier page, to list only rollouts that changed after it."""
    limit: Annotated[int, Field(ge=1, le=MAX_PAGE)] = 100


class RolloutPage(Wire):
    rollouts: list[RolloutStatus]
    """The rollouts in the order of their last change, oldest first."""
    next_since: int
    """`since` of the next page. It stays the same while nothing changes."""
