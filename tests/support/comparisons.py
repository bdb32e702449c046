"""A comparison of models as `art compare` writes it: a weak model, a strong one, and one that answers nothing."""

from __future__ import annotations

from art.metrics.scores import Score
from art_recipes.comparing.model_comparison import CallCounts, ModelComparison, ModelRow, Quantiles


def make_comparison(name: str, updated_at: float, *, label: str = "strong", **changes: object) -> ModelComparison:
    def score(mean: float) -> Score:
        return Score(mean=mean, low=mean - 0.1, high=mean + 0.1, num=50, method="wilson")

    rows = [
        ModelRow(label="weak", kind="local", where="/home/me/tiny", state="done", headline=score(0.4), num_rollouts=50),
        ModelRow(
            label=label, kind="checkpoint", where="p/n@7", state="done", headline=score(0.8), num_rollouts=50,
            usd_per_1000=2.0, rollout_latency_s=Quantiles(median=1.5, p95=4.0),
        ),
        ModelRow(
            label="down", kind="endpoint", where="x at http://host/v1", state="gave_up", problem="wrong key",
            num_failed_rollouts=8, num_rollouts_left=42, calls=CallCounts(faults={"401": 8}),
        ),
    ]  # fmt: skip
    made = ModelComparison(
        id=name, task="tic_tac_toe", description="a game", headline_metric="win", split="test", seed=0,
        num_scenarios=50, rollouts_per_scenario=1, reference="weak", concurrency=16, started_at=1.0,
        updated_at=updated_at, is_complete=True, models=rows,
    )  # fmt: skip
    return made.model_copy(update=changes)
