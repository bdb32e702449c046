"""Wire types of promotions: which checkpoint answers `project/name@promoted`, by which figures, and who decided it."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, FiniteFloat, model_validator

from art.protocol.training import SparseWire, Wire

Decision = Literal["ungated", "passed", "refused", "forced"]
"""How a promotion was decided: without a gate, by a gate that it passed or not, or against the gate."""
Values = Annotated[list[Annotated[list[FiniteFloat], Field(min_length=1, max_length=1000)]], Field(max_length=20_000)]
"""Values of the rollouts of each scenario."""


class MeasuredScores(Wire):
    """Scores of both checkpoints that the caller has measured on the same held-out scenarios.

    Example: two scenarios with one rollout each, of which the candidate solved both
        {"source": "tic_tac_toe, split test, seed 0", "reference_step": 10, "reference": [[0], [1]],
         "candidate": [[1], [1]]}
    """

    source: str = Field(min_length=1, max_length=500)
    """What was measured, for people."""
    reference_step: int = Field(ge=0)
    """Step that the candidate was compared with. It must be the promoted one, or 0 while nothing is promoted."""
    reference: Values
    candidate: Values
    """Values of the candidate, in the same order of scenarios."""

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if len(self.reference) != len(self.candidate):
            counts = f"`reference` has {len(self.reference)} scenarios and `candidate` {len(self.candidate)}"
            raise ValueError(f"{counts}; both must have the same scenarios in the same order")
        return self


class Gate(Wire):
    """A condition of a promotion: the interval of the held-out improvement lies above `require`."""

    require: FiniteFloat
    """The candidate must be better than the promoted checkpoint by more than this; 0 asks for any improvement."""
    split: str = Field(default="val", max_length=128)
    """Split of the model's log whose rollouts are compared, unless `measured` is given."""
    metric: str = Field(default="reward", max_length=200)
    """`reward`, or the name of a metric of the logged rollouts."""
    measured: MeasuredScores | None = None
    """Scores in place of those in the log."""


class PromoteRequest(Wire):
    step: int = Field(ge=0)
    gate: Gate | None = None
    """Condition of the promotion; without one, the checkpoint is promoted as it is."""
    force: bool = False
    """Promote the checkpoint even if it does not pass the gate. The history says so."""
    note: str = Field(default="", max_length=500)
    """Why, for people who read the history."""


class Verdict(Wire):
    """What a gate has found."""

    passed: bool
    reason: str
    """The figures and, for a refusal, what to do, in one or two sentences."""
    require: float
    source: str
    """What was compared: a split of the log, or what the caller has measured."""
    reference_step: int
    """Step that the candidate was compared with: the promoted one, or 0 while nothing was promoted."""
    num_scenarios: int
    """Scenarios that both checkpoints were measured on."""
    reference: float | None = None
    candidate: float | None = None
    """Means over these scenarios; null without any."""
    difference: float | None = None
    low: float | None = None
    """Lower end of the interval of the difference, which has no upper end; null where it is not known."""
    method: Literal["tango", "t"] | None = None
    """How the interval is computed; see docs/organisation.md."""
    look: int = 1
    """Number of comparisons with the same reference that this one counts as. Each further one must be clearer."""
    confidence: float = 0.0
    """Probability with which the interval contains the true difference: 0.975 at the first look, then more."""


class Promotion(SparseWire):
    """The promoted checkpoint of a model."""

    may_lack = ("verdict",)

    step: int
    inference_name: str
    """Value of `model` in chat requests that this checkpoint answers, whatever is trained: `project/name@promoted`."""
    previous_step: int | None
    """Step that was promoted before this call; null if none was. If it equals `step`, nothing has changed and nothing
    was compared."""
    verdict: Verdict | None = None
    """What the gate has found; absent without a gate."""


class PromotionRecord(Wire):
    """One decision in the history of a model's promotions."""

    number: int
    at: float
    """Unix time."""
    step: int
    previous_step: int | None
    """Step that was promoted until then; null if none was."""
    decision: Decision
    key_id: str
    """Id of the API key that asked; `server` is the operator's own."""
    note: str = ""
    verdict: Verdict | None = None


class PromotionHistory(Wire):
    """The decisions about a model's promoted checkpoint, oldest first. Refusals are among them."""

    promotions: list[PromotionRecord]
