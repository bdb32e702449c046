"""Wire types of the page's answers about runs: the list, curves, steps, checkpoints, costs, comparisons."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from art.metrics.verdicts import VerdictKind
from art.protocol.promotions import PromotionRecord
from art.protocol.training import JobKind, JobState
from art.storage.labels import RunLabels
from art_page.rollout_answers import Indexing, Interval, PageAnswer, PageQuery, RolloutKey
from art_recipes.comparing.model_comparison import ModelComparison, ModelRow

MOST_PROMOTIONS = 200


class CheckpointRow(PageAnswer):
    step: int
    created_at: float | None
    size_bytes: int
    is_newest: bool
    """Whether requests without a step get it and the next step starts from it."""
    is_best: bool
    """Whether it has the highest mean of `val/reward`; it is never deleted automatically."""
    is_promoted: bool
    """Whether it answers requests to `project/name@promoted`; it is never deleted."""
    metrics: dict[str, float]
    """Means of what was logged for its step."""
    parents: list[str] = []
    """Where it was forked or pulled from."""


class StepChange(PageAnswer):
    """A metric of held-out rollouts at two steps."""

    metric: str
    """The headline metric of the run's task if the rollouts have it, else `reward`."""
    split: str
    a: int
    b: int
    """Equal to `a` if there is one evaluation only."""
    before: Interval | None
    """The mean over all rollouts at `a`."""
    after: Interval | None
    difference: Interval | None
    """Mean over scenarios of the paired difference `b - a`; null without common scenarios."""
    num_scenarios: int
    """Number of scenarios that both steps have."""


class RunCheckpoints(PageAnswer):
    """Complete checkpoints on the disk, newest first."""

    checkpoints: list[CheckpointRow]
    best_metric: str
    compared: StepChange | None
    """Comparison to begin with: first and last step that share held-out scenarios."""
    promotions: list[PromotionRecord] = []
    """The decisions about the promoted checkpoint, newest first, refusals included; at most `MOST_PROMOTIONS`."""
    num_promotions: int = 0
    """How many there are."""


class CompareQuery(PageQuery):
    """Which two steps to compare, on which split."""

    a: int
    b: int
    split: str = "val"
    offset: int = Field(default=0, ge=0)
    limit: int = Field(default=100, ge=1, le=1000)


class ScenarioChange(PageAnswer):
    """One scenario at both steps."""

    scenario: str
    a: Interval
    b: Interval
    difference: float
    """Mean at `b` minus that at `a`."""
    rollouts_a: list[RolloutKey]
    rollouts_b: list[RolloutKey]
    """At most eight of each."""


class StepComparison(StepChange):
    """A metric at two steps on the same scenarios, scenario by scenario."""

    scenarios: list[ScenarioChange]
    """The largest difference comes first, in either direction."""
    num_better: int
    num_worse: int
    splits: list[str]
    """Splits that both steps have rollouts of."""
    missing: str | None = None


RunState = Literal["training", "waiting", "serving", "idle", "finished", "stopped", "failed"]
"""
- `training`: a training job runs.
- `waiting`: a training job is queued.
- `serving`: no training job, and the model has answered requests in the last minute.
- `idle`: none of these, in a directory that a server uses.
- `finished`: none of these, and no server uses the directory.
- `stopped`: as `finished`, before the last step that the training loop has named.
- `failed`: the training or its newest job failed, and nothing has happened since.
"""


class RunFinding(PageAnswer):
    """Something that a person should know about a step."""

    step: int
    name: str | None
    """Name of the finding in the catalogue; null for a sentence that is not from it."""
    text: str


class RunOutcome(PageAnswer):
    """What a training achieved, as the command that trained it says at its end."""

    kind: VerdictKind
    text: str
    """A sentence without a full stop, by `art.metrics.verdicts.describe_end`."""
    why: list[str] = []
    """Reasons, if the training was a recipe's and has left them."""


class CurrentReward(Interval):
    """The newest reward of a run."""

    num: int
    """Number of rollouts."""
    split: str
    step: int


class Series(PageAnswer):
    """One metric over steps. All lists have one entry per point.

    A point of one step has the mean of its rows in `history.jsonl`. Where the curve has more steps than points, a point
    is the mean of consecutive steps, `steps` has the middle one, and `num_steps` says how many it joins.
    """

    metric: str
    split: str | None
    """First part of the metric's name, where it is the split of rollouts: `train`, `val` ..."""
    steps: list[int]
    mean: list[float]
    low: list[float | None] | None
    high: list[float | None] | None
    """95 % interval of the mean over groups, or rollouts without a group; null where rollouts have no such value."""
    num: list[int | None] | None
    """Number of rollouts with a value."""
    num_steps: list[int] | None
    """Number of steps that each point joins; null if each point is one step."""


class RunSummary(PageAnswer):
    """One line of the list of runs."""

    headline: StepChange | None
    """The task's own metric on held-out rollouts, from the first step to the last; null without held-out rollouts."""
    outcome: RunOutcome | None = None
    """What happened; null while the run goes on, and for one that was not trained."""
    labels: RunLabels = RunLabels()

    project: str
    name: str
    base_model: str | None
    """Null where only files are left, and no database that says it."""
    state: RunState
    step: int
    """The newest step: of the published checkpoint, or of what was logged."""
    num_steps: int | None = None
    """Number of steps of the whole run, if its training loop has said so."""
    num_rollouts: int
    """Number of logged rollouts; a lower bound while `indexing` is not null."""
    reward: CurrentReward | None
    training_reward: CurrentReward | None = None
    """The newest reward of rollouts that were trained on."""
    spark: Series | None
    """The main metric in at most 60 points."""
    main_metric: str | None
    """Name of the metric of `reward` and `spark`; `val/reward` is chosen before `train/reward`."""
    seconds_per_step: float | None
    """Median time between the newest steps (at most 20)."""
    seconds: float | None = None
    """Wall time of all steps, without evaluations and pauses; where steps have none, from the first to the last row."""
    costs_usd: float | None
    seed: int | None = None
    """The seed that the run was started with; null if none was recorded."""
    seed_group: str | None = None
    """Equal for runs of a project whose recorded settings differ in the seed alone."""
    eta_s: float | None = None
    """Seconds until the run ends, where the number of its steps is known."""
    now: str | None = None
    """One sentence: what runs."""
    findings: list[RunFinding]
    """The newest five."""
    updated_at: float | None
    started_at: float | None
    indexing: Indexing | None = None


class SeedSpread(PageAnswer):
    """A value of several runs: the mean over the runs, the lowest and the highest."""

    mean: float
    low: float
    high: float
    num: int
    """Number of runs that have it."""


class SeedGroup(PageAnswer):
    """Runs that differ in the seed alone."""

    id: str
    """`seed_group` of its runs."""
    project: str
    name: str
    """Their names with an asterisk for the seed, else the first name and how many more there are."""
    runs: list[str]
    """Names of the runs, by seed."""
    seeds: list[int]
    """Their seeds, in the same order."""
    metric: str | None
    """Name of what `before`, `after` and `difference` are of; null if no run has held-out rollouts of two steps."""
    before: SeedSpread | None
    after: SeedSpread | None
    difference: SeedSpread | None
    training_reward: SeedSpread | None
    seconds: SeedSpread | None
    costs_usd: SeedSpread | None


class RunList(PageAnswer):
    """All runs, those with the newest changes first."""

    runs: list[RunSummary]
    groups: list[SeedGroup] = []
    """Groups of at least two seeds, in the order of their newest run."""
    now: float
    """Time of the answer."""


class SplitSteps(PageAnswer):
    """The steps of a split that have logged rollouts."""

    split: str
    steps: list[tuple[int, int]]
    """Ranges `[first, last]` of steps without a gap, in order."""


class RunMetric(PageAnswer):
    """A metric that the run has values of."""

    name: str
    unit: str | None = None
    meaning: str | None = None
    """What it says, from the catalogue; null for a metric of the user."""
    num_points: int
    """Number of steps that have a value."""
    has_band: bool
    """Whether rollouts have values of it, which give an interval per step."""


class RunJob(PageAnswer):
    """One job of the run."""

    id: str
    kind: JobKind
    state: JobState
    step: int | None
    error: str | None
    created_at: float | None
    started_at: float | None
    ended_at: float | None


class RunDetail(RunSummary):
    """What is known about one run."""

    splits: list[SplitSteps]
    metrics: list[RunMetric]
    settings: dict[str, Any]
    """Settings of the model without defaults, and what was recorded of the run: sections `program`, `machine`, `task`,
    `recipe`, `training`, `pipeline` and those of `record_settings`."""
    all_findings: list[RunFinding]
    """The newest 1,000, newest first."""
    jobs: list[RunJob]
    """The newest 20, newest first."""


class SeriesQuery(PageQuery):
    """Which curves to draw."""

    metric: Annotated[list[str], Field(max_length=64)] = []
    """Names of metrics, e.g. `train/reward`."""
    max_points: int = Field(default=600, ge=2, le=5000)
    """Largest number of points per curve. With more steps, neighbouring steps are averaged."""
    first: int | None = None
    last: int | None = None
    """First and last step; null for no bound."""


class SeriesAnswer(PageAnswer):
    series: list[Series]
    """In the order of the query; a metric without values has empty lists."""


class StepLedger(PageAnswer):
    """Numbers of tokens: `sampled = trained + context + dropped`."""

    sampled: int
    trained: int
    context: int
    """Sampled tokens that the trainer reads and does not learn."""
    dropped: dict[str, int]
    """Number of dropped tokens by reason, the largest first."""


class LedgerAnswer(PageAnswer):
    """The ledgers of steps, summed."""

    ledger: StepLedger | None
    """Null if none of the steps has one."""
    first: int | None
    last: int | None
    """First and last step that have a ledger."""
    num_steps: int
    """Number of steps with a ledger."""
    meanings: dict[str, str]
    """What each reason means, where the catalogue has it."""


class StepDetail(PageAnswer):
    """One step of a run."""

    step: int
    metrics: dict[str, float]
    """Means of the rows that were logged for the step."""
    findings: list[RunFinding]
    ledger: StepLedger | None
    seconds: dict[str, float]
    """Time by phase: `trainer`, `updates`, `publish`, `gpu/rollouts` ... Phases may contain each other."""
    num_groups: int
    num_rollouts: int
    """Rollouts of the split `train` that were logged."""
    previous: int | None
    next: int | None
    """Neighbouring steps that have metrics."""


class SourceCosts(PageAnswer):
    source: str
    usd: float | None
    """Sum of its prices; null if nothing of it had one."""
    num_unpriced: int
    """Number of requests whose price is not known."""
    prompt_tokens: int
    completion_tokens: int
    seconds: float


class CostsByStep(PageAnswer):
    """Costs of each step. A step that cost nothing is left out."""

    steps: list[int]
    by_source: dict[str, list[float]]
    """USD of each source, one entry per step."""


class CostsAnswer(PageAnswer):
    total_usd: float | None
    """Null if nothing that was booked had a price."""
    by_source: list[SourceCosts]
    """The most expensive first."""
    by_step: CostsByStep


class ComparisonLine(PageAnswer):
    """One comparison in the list, with a row for each model."""

    id: str
    task: str
    description: str
    models: list[ModelRow]
    """In the order in which they were named."""
    reference: str
    """Label of the model that the others are compared with."""
    best: str | None
    """The model with the highest headline metric; null if none has a score."""
    headline_metric: str
    num_scenarios: int
    updated_at: float
    is_complete: bool


class ComparisonList(PageAnswer):
    comparisons: list[ComparisonLine]
    """The newest first."""
    unreadable: list[str]
    """Folders whose file is damaged, or of another version."""


class ComparisonAnswer(PageAnswer):
    """One comparison with all its numbers."""

    comparison: ModelComparison
    remarks: list[str]
    """What the numbers alone would hide, one sentence each."""
