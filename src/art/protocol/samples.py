"""Input and output of the trainer. The server uses them without torch.

Between processes samples are a file (`art.protocol.compact`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from pydantic import SkipValidation

Component = Literal["rl", "sft", "observation"]
"""What a sample is to the loss. "rl" learns by advantages. The others learn by cross-entropy: "sft" given texts,
"observation" what the environment answered in a rollout. Each component has a divisor of its own."""
COMPONENTS: tuple[Component, ...] = get_args(Component)


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """The part of the vocabulary that the tokens of one answer were drawn from."""

    grammar: str | None = None
    """Grammar of the answer, as Lark text of llguidance."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens that could end the answer, where the grammar is complete."""
    kept: list[list[int]] | None = None
    """[N] Tokens that each token was drawn from, ascending, where `top_k`, `top_p` or `min_p` left some out. A token
    with an empty list was drawn from all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstrainedSpan:
    """An answer in a sample that was drawn under a constraint."""

    start: int
    """Index of the answer's first token."""
    num_tokens: int
    constraint: Constraint


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """One sequence of tokens to train on: a conversation of a rollout, from its first prompt to its last answer.

    Example: prompt P (3 tokens), answer A (2), tool reply E (1), answer B (2)
        token_ids          P P P A A E B B
        loss_mask          0 0 0 1 1 0 1 1
        sampling_logprobs  0 0 0 a a 0 b b
        advantages         0 0 0 v v 0 v v

    The four sequences are lists, or `SpanValues`, which looks like a list and holds only what is not 0.
    """

    sample_id: str
    """Name of the sample in errors and reports, unique within a training step."""
    rollout_id: str
    """The rollout that the sample comes from. Branches of a rollout are samples with the same id."""
    token_ids: Sequence[int]  # [T]
    loss_mask: Sequence[bool]  # [T] True where the policy sampled the token; for other components where it is learnt
    sampling_logprobs: Sequence[float]  # [T] 0.0 where loss_mask is False
    advantages: Sequence[float]  # [T] 0.0 where loss_mask is False; read for component "rl"
    weight: float = 1.0
    """Factor of every target's loss."""
    share: float | None = None
    """What the sample adds to the divisor of the summed loss. `None` adds `weight` per target, which gives a mean."""
    temperature: float = 1.0
    """Sampling temperature. The trainer divides its logits by it too."""
    policy_version: int = 0
    """Step of the oldest weights that sampled a token of this sample."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Index of a first token, and the step whose weights sampled the tokens from there on, in the order of the tokens.
    Empty if all tokens have `policy_version`.

    Example: [(3, 7), (6, 8)] where step 7 sampled tokens 3 to 5, and step 8 those from 6 on.
    """
    group_id: str | None = None
    """The group of the rollout. A mini-batch holds whole groups. With `None` the rollout is a group of its own."""
    component: Component = "rl"
    teacher_logprobs: Sequence[float] | None = None  # [T] for distillation; read where loss_mask is True
    constraints: list[ConstrainedSpan] = field(default_factory=list)
    """Answers whose tokens were drawn from a part of the vocabulary. The trainer normalises over the same part."""


def plain_sample(token_ids: list[int], name: str) -> TrainingSample:
    """Make a sample named `name` in which every token but the first is a target, and all advantages are 0."""
    zeros = [0.0] * len(token_ids)
    return TrainingSample(
        sample_id=name, rollout_id=name, token_ids=token_ids, loss_mask=[i > 0 for i in range(len(token_ids))],
        sampling_logprobs=zeros, advantages=zeros,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    step: int
    metrics: SkipValidation[dict[str, float]] = field(default_factory=dict)
    """Metrics of the step, with names in sections: `loss/...`, `offpolicy/...`, `data/...`, `time/...`."""
    findings: list[str] = field(default_factory=list)
    """What a person should know that did not stop the step, in plain words."""
