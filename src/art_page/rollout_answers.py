"""Wire types of the page's answers about rollouts: the table, one rollout, a group, exact tokens, the prefix tree.

Times are seconds since the epoch. Numbers that are NaN or infinite are null.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class PageAnswer(BaseModel):
    """Base class of all answers."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="null")


class PageQuery(BaseModel):
    """Base class of queries. Values may be texts, as a URL has them; an unknown name is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Indexing(PageAnswer):
    """How far the index of rollouts has got. Until it is complete, lists and totals have only what is indexed."""

    done_bytes: int
    """Size of what was read from the files."""
    total_bytes: int
    """Size of the files."""


class Interval(PageAnswer):
    """A mean and its 95 % interval; the ends are null where there are too few values to tell."""

    mean: float
    low: float | None = None
    high: float | None = None
    num: int
    """Number of independent values: groups, where rollouts of one scenario are grouped, else rollouts or rows."""


Outcome = Literal["ok", "policy_fault", "infra_fault"]
SortKey = Literal["reward", "advantage", "tokens", "turns", "step", "started_at", "duration", "judge_score", "metric"]


class RolloutKey(PageQuery):
    """The place of a rollout in a run."""

    split: str
    step: int
    group: int = Field(ge=0)
    """Number of the group in the split and step, in the order of logging, from 0."""
    index: int = Field(ge=0)
    """Place in the group, from 0. Rollouts that failed follow those with a trajectory."""


class Snippet(PageAnswer):
    """The words around the first match of a search."""

    text: str
    start: int
    end: int
    """The match is `text[start:end]`, in characters."""


class RolloutTableRow(PageAnswer):
    """One rollout in the table."""

    split: str
    step: int
    group: int
    index: int
    scenario: str | None
    """Id of the scenario, from the metadata of the trajectory or group, or the beginning of its first message."""
    reward: float | None
    """Null for a rollout that failed, or whose reward is not a number."""
    advantage: float | None
    """Advantage in training; null where it is not known."""
    num_turns: int
    """Number of sampled answers, in all conversations of the rollout."""
    num_tokens: int | None
    """Number of sampled tokens; null where neither the file nor the record of exchanges has them."""
    stop: str | None
    """Finish reason of the last answer: `stop`, `length`, `tool_calls` ..."""
    outcome: Outcome
    dropped_because: str | None
    """Why the rollout was not trained; null if it was, or if it is not known (`advantage` is then null too)."""
    started_at: float | None
    duration_s: float | None
    policy_version: int | None
    """Step whose weights sampled the first answer."""
    judge_score: float | None
    metrics: dict[str, float | None] = {}
    """The numbers that the task gave the rollout, e.g. `win`."""
    snippet: Snippet | None = None
    group_rewards: list[float | None] | None = None
    """In a list of rollouts, the rewards of all rollouts of its group by index, at most 32."""


class RolloutTableQuery(PageQuery):
    """Which rollouts to list, and in which order. A bound that is null does not filter."""

    split: str | None = None
    step: int | None = None
    group: int | None = None
    outcome: Outcome | None = None
    stop: str | None = None
    dropped: str | None = None
    """A reason in `dropped_because`; `any` for every rollout that was not trained, `none` for those that were."""
    scenario: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    metric: str | None = Field(default=None, max_length=200)
    """A number that the task gave rollouts, for the two bounds below."""
    min_metric: float | None = None
    max_metric: float | None = None
    sort_metric: str | None = Field(default=None, max_length=200)
    """The number that `sort="metric"` sorts by."""
    text: str | None = Field(default=None, max_length=1000)
    """Words that the conversation, logs or judge's explanation must have, all of them. Words in double quotes are a
    phrase; a word that ends in `*` is a prefix. Everything else is text."""
    sort: SortKey = "step"
    descending: bool = True
    offset: int = Field(default=0, ge=0)
    limit: int = Field(default=100, ge=1, le=1000)


class RolloutTable(PageAnswer):
    rows: list[RolloutTableRow]
    total: int
    """Number of rollouts that match."""
    is_total_exact: bool
    """False while the index is built: there may be more."""
    indexing: Indexing | None = None
    stops: list[str] = []
    """Finish reasons that the run's rollouts have, for the filter."""
    dropped: list[str] = []
    """Reasons for which rollouts were not trained, for the filter."""
    metrics: list[str] = []
    """Names of the numbers that the task gave the run's rollouts."""


class RolloutToolCall(PageAnswer):
    id: str | None
    name: str
    arguments: str
    """JSON text as the model wrote it."""


class Item(PageAnswer):
    """A message of a conversation, or an answer that the policy sampled."""

    role: str
    text: str
    """The content as text. Parts that are no text, such as images, are named in brackets."""
    reasoning: str | None = None
    tool_calls: list[RolloutToolCall] = []
    tool_call_id: str | None = None
    is_sampled: bool = False
    """Whether the model sampled it in this rollout."""
    exchange_id: str | None = None
    policy_version: int | None = None
    finish_reason: str | None = None
    num_tokens: int | None = None
    """Number of sampled tokens."""
    started_at: float | None = None
    duration_s: float | None = None
    """Seconds in the engine, from the beginning of the request to the end of the answer."""


class Tool(PageAnswer):
    name: str
    description: str | None
    parameters: dict[str, Any] | None


class RolloutConversation(PageAnswer):
    """One history of a rollout. The first is the main one; others are of sub-agents or of a compacted context."""

    name: str
    items: list[Item]
    tools: list[Tool]


class RolloutJudgement(PageAnswer):
    """What a judge said about a rollout."""

    name: str
    score: float | None
    passes: list[float] | None = None
    """Score of each time that the judge was asked, where that was kept."""
    disagreement: float | None = None
    """Standard deviation of the scores of its passes."""
    parts: dict[str, float] = {}
    """Scores that make up its score, by name: judges of a weighted sum, or passes."""
    explanation: str | None = None


class RolloutDetail(RolloutTableRow):
    histories: list[RolloutConversation]
    metadata: dict[str, str | float | bool | None]
    logs: list[str]
    judge: RolloutJudgement | None
    error: str | None = None
    """The exception of a rollout that failed, with its traceback."""
    previous: RolloutKey | None = None
    next: RolloutKey | None = None
    """Neighbours in the same split and step, by group and index."""
    missing: str | None = None
    """What of the rollout is not known, and why."""


class GroupAnswer(PageAnswer):
    split: str
    step: int
    group: int
    scenario: str | None
    rollouts: list[RolloutDetail]
    """The highest advantage comes first; by reward where no advantage is known. At most 64."""
    num_rollouts: int
    metrics: dict[str, float | None]
    logs: list[str]
    dropped_because: str | None
    """Why the group was not trained; null if it was, or if that is not known."""
    missing: str | None = None


class RequestQuery(PageQuery):
    """Which answer of a rollout to ask for again."""

    exchange: str = Field(max_length=200)
    """Id of the exchange."""


class RepeatedRequest(PageAnswer):
    """A request that gives a recorded answer again, while its checkpoint exists and the engine computes alike."""

    body: dict[str, Any]
    """Body of `POST /v1/chat/completions`, with the step and the seed of the answer."""
    notes: list[str]
    """What may differ, because it is not recorded."""


MAX_TOKENS = 20_000
"""Most tokens in one answer."""

SpanRole = Literal["prompt", "policy", "tool", "user", "context"]


class TokensQuery(PageQuery):
    """Which tokens of a rollout to return."""

    path: int = Field(default=0, ge=0)
    """Number of the token path: the main conversation, a branch of it, or a sub-agent's."""
    first: int = Field(default=0, ge=0)
    """First token of the path to return."""
    last: int | None = Field(default=None, ge=0)
    """End of the range, not included. At most 20,000 tokens are returned."""


class PathInfo(PageAnswer):
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


class TokenSpan(PageAnswer):
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


class RolloutTokens(PageAnswer):
    paths: list[PathInfo]
    path: int
    first: int
    """Place of the first returned token on the path."""
    token_ids: list[int]  # [T]
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
    alternatives: dict[int, list[tuple[int, str | None, float]]] = {}
    """The most likely tokens at places of the path where they were recorded (`record_alternatives`), best first: id,
    text, log-prob at sampling."""
    step: int | None = None
    """Step that was given this rollout to train; null if none was."""
    update: int | None = None
    """Number of the optimiser update in that step, from 0. `policy_logprob` is from the pass of this update, so the
    updates before it had changed the policy already."""
    missing: str | None = None
    """What is not known here, and why."""


MAX_NODES = 5000


class TreeQuery(PageQuery):
    """Which part of the tree to return."""

    node: int | None = Field(default=None, ge=0)
    """The node whose subtree to return; null for the whole tree."""
    limit: int = Field(default=1500, ge=1, le=MAX_NODES)
    """Most nodes to return. The widest are kept; the others are counted in `num_hidden` of the node above them."""


class TreeNode(PageAnswer):
    """A run of tokens that the same paths go through."""

    id: int
    """Number of the node in the depth-first order of the whole tree. It stays the same for every query."""
    parent: int | None
    start: int
    """Place of its first token in the sequences that go through it."""
    num_tokens: int
    num_paths: int
    num_learnt: int
    """Tokens of the node that at least one path learnt."""
    num_masked: int
    """Tokens of the node that were to be trained, and that no path learnt."""
    num_passes: int
    """How often it was computed: forward passes of the step that held a path through it."""
    kind: Literal["learnt", "masked", "context"]
    runs: list[tuple[int, int, bool]] = []
    """Where the targets are: begin and end, as places in the sequences, and whether a path learnt these tokens. If not,
    they were masked, or the loss left them out. What lies between the runs is context."""
    first_path: int
    """Number of the first path through it, in the tree's order; the others follow."""
    text: str | None = None
    """The beginning of its text, at most 200 characters."""
    num_hidden: int = 0
    """Nodes below it that are not in this answer."""
    rollouts: list[RolloutKey] = []
    """At most five of the rollouts that go through it, where they were logged."""


class TreeAnswer(PageAnswer):
    step: int
    num_tokens: int
    """Tokens of the tree, shared ones once."""
    num_computed: int
    """Tokens that the forward passes computed: a part that several passes need is computed in each."""
    num_path_tokens: int
    """Tokens of all paths, one after the other."""
    num_trained: int
    """Tokens that were learnt, counted on each path."""
    num_paths: int
    num_nodes: int
    above: list[int] = []
    """The nodes above the one that was asked for, from the root on."""
    nodes: list[TreeNode]
    """In depth-first order, parents first."""
    missing: str | None = None
