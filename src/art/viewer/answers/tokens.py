"""The exact tokens of a rollout, with what sampler and trainer knew of each."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from art.viewer.answers.base import Answer, Query

MAX_TOKENS = 20_000
"""Most tokens in one answer."""

SpanRole = Literal["prompt", "policy", "tool", "user", "context"]


class TokensQuery(Query):
    """Which tokens of a rollout to return."""

    path: int = Field(default=0, ge=0)
    """Number of the token path: the main conversation, a branch of it, or a sub-agent's."""
    first: int = Field(default=0, ge=0)
    """First token of the path to return."""
    last: int | None = Field(default=None, ge=0)
    """End of the range, not included. At most 20,000 tokens are returned."""


class PathInfo(Answer):
    """One token path of a rollout: exchanges (recorded requests and answers) that continue one another."""

    path: int
    label: str
    num_tokens: int
    num_sampled: int
    num_trained: int
    """Tokens that added to the gradient of a step."""
    parent: int | None = None
    """Number of the path of the same conversation that this one leaves; null for the first path of a conversation."""
    branches_at: int = 0
    """Number of tokens that it shares with the parent."""
    branch_reason: str | None = None
    """Why it could not continue the parent, as the recorder found (`BranchReason`); null where that is not recorded."""


class TokenSpan(Answer):
    """A run of tokens with one origin and one fate. Places count from the first token of the path."""

    start: int
    end: int
    role: SpanRole
    """Who wrote it: the prompt before the first answer, the policy, a tool, a user, or the assistant's side but not
    this model (`context`)."""
    exchange_id: str | None = None
    policy_version: int | None = None
    """Step whose weights sampled the tokens."""
    sampled: bool
    trained: bool
    """Whether the tokens added to the gradient of a step."""
    reason: str
    """Why they were or were not trained, e.g. `prompt` or `masked: off-policy rollout`."""


class RolloutTokens(Answer):
    paths: list[PathInfo]
    path: int
    first: int
    """Place of the first returned token on the path."""
    token_ids: list[int | None]  # [T]
    """Null where the exchange has been deleted."""
    texts: list[str | None]  # [T]
    """What each token adds to the text. The bytes of one character may be spread over several tokens: the token that
    completes it has the character, those before it have an empty text. Null where it is not known."""
    is_special: list[bool]  # [T]
    """Whether the tokenizer marks the token as special, e.g. the end of a turn."""
    spans: list[TokenSpan]
    """The spans that overlap the returned tokens."""
    values: dict[str, list[float | None]]
    """Numbers of each returned token, by name, null where one is not known: `sampling_logprob`, `policy_logprob`,
    `entropy`, `importance_ratio` (policy over sampler), `advantage`, `weight` (factor in the loss of the update). A
    name is absent when no token has a value."""
    step: int | None = None
    """Step that was given this rollout to train; null if none was."""
    update: int | None = None
    """Number of the optimiser update in that step, from 0. `policy_logprob` is from the pass of this update, so the
    updates before it had changed the policy already."""
    missing: str | None = None
    """What is not known here, and why."""
