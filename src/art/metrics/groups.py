"""Summarise trajectory groups as named numbers, and name metrics.

Full names look like `train/reward`, `val/win`, `loss/train`, `time/step_trainer_s`. A name that begins with a known
section or split is kept. Every other name gets the split as a prefix.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from art.errors import InvalidRequestError, TrajectoryError
from art.storage.layout import validate_name
from art.trajectory import Trajectory, TrajectoryGroup

SECTIONS = frozenset(
    ("reward", "loss", "offpolicy", "pipeline", "throughput", "costs", "time", "data", "ledger", "publish", "findings",
     "trend", "sinks")
)  # fmt: skip
"""The first eight are those of ART 0.5. Programs of that time log metrics of their own as `pipeline/...`; the last two
are in older logs."""
SPLITS = frozenset({"train", "val", "test"})


def check_split(split: str) -> str:
    """Return `split` if it can name a file and a group of metrics. Raises `InvalidRequestError` if `split` is empty, a
    path, or one of `SECTIONS`."""
    if split in SECTIONS:
        raise InvalidRequestError(
            f"split={split!r} is a section of the metrics; choose another name, e.g. 'val' or 'versus-self'",
            param="split",
        )
    return validate_name(split, param="split")


def check_metrics(metrics: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `metrics` if all values are numbers. Raises `InvalidRequestError` if a value is not a number; the message
    names the metric."""
    for name, value in metrics.items():
        if _as_number(value) is None:
            raise InvalidRequestError(f"metrics[{name!r}] is {value!r}; a metric is a number", param="metrics")
    return metrics


def name_metrics(metrics: Mapping[str, float], split: str) -> dict[str, float]:
    """Return `metrics` under their full names (see `metric_name`)."""
    return {metric_name(key, split): value for key, value in metrics.items()}


def metric_name(key: str, split: str) -> str:
    """Return the full name of metric `key` in a split: `train/reward` for "reward" in "train".

    A name that begins with a section or split is kept, e.g. `loss/train`, if `split` is one of `SPLITS`.
    """
    known = split in SPLITS and key.partition("/")[0] in SECTIONS | SPLITS and "/" in key
    return key if known else f"{split}/{key}"


def as_groups(trajectories: Iterable[Trajectory | BaseException | TrajectoryGroup]) -> list[TrajectoryGroup]:
    """Return groups as they are. Single trajectories and exceptions become one more group."""
    if isinstance(trajectories, TrajectoryGroup):
        return [trajectories]
    items = list(trajectories)
    groups = [item for item in items if isinstance(item, TrajectoryGroup)]
    loose = [item for item in items if not isinstance(item, TrajectoryGroup)]
    return [*groups, TrajectoryGroup(loose)] if loose else groups


def summarize_groups(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Summarise groups for one log row. Names do not include the split.

    The reward and every metric are averaged over the trajectories that have them; `costs/...` are summed.
    `reward_std_dev` is the mean of the groups' population standard deviations, over groups of more than one trajectory.
    `group_<name>` is the mean of a metric of groups.

    Raises:
        TrajectoryError: a reward or a metric is not a number.
    """
    trajectories = [trajectory for group in groups for trajectory in group]
    num_failed = sum(len(group.exceptions) for group in groups)
    summary: dict[str, float] = {}
    if trajectories:
        summary["reward"] = _mean([_reward(trajectory) for trajectory in trajectories])
    if spreads := [_spread(group) for group in groups if len(group) > 1]:
        summary["reward_std_dev"] = _mean(spreads)
    if trajectories or num_failed:
        summary["exception_rate"] = num_failed / (num_failed + len(trajectories))
    summary |= _reduce([trajectory.metrics for trajectory in trajectories])
    summary |= {
        key if key.startswith("costs/") else f"group_{key}": value
        for key, value in _reduce([group.metrics for group in groups]).items()
    }
    return summary


def take_costs(metrics: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Split metrics into those without `costs/...`, and the costs by source."""
    costs = {key.removeprefix("costs/"): value for key, value in metrics.items() if key.startswith("costs/")}
    return {key: value for key, value in metrics.items() if not key.startswith("costs/")}, costs


def count_groups(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Count scenarios, groups and trajectories of a training step. A group without an id is a scenario of its own."""
    unnamed = sum(not scenarios_of(group) for group in groups)
    return {
        "data/step_num_scenarios": len(set().union(*map(scenarios_of, groups))) + unnamed,
        "data/step_num_groups_submitted": len(groups),
        "data/step_num_groups_trainable": sum(len(group) > 1 and _spread(group) > 0 for group in groups),
        "data/step_num_trajectories": sum(len(group) for group in groups),
    }


def scenarios_of(group: TrajectoryGroup) -> set[str]:
    """Return the ids of a group's scenarios: `metadata["scenario_id"]` of the group, else of its trajectories."""
    for records in ([group], group):
        ids = {str(name) for record in records if (name := record.metadata.get("scenario_id")) is not None}
        if ids:
            return ids
    return set()


def _spread(group: TrajectoryGroup) -> float:
    rewards = [_reward(trajectory) for trajectory in group]
    mean = _mean(rewards)
    return math.sqrt(_mean([(reward - mean) ** 2 for reward in rewards]))


def _reward(trajectory: Trajectory) -> float:
    if (number := _as_number(trajectory.reward)) is None:
        raise TrajectoryError(f"a trajectory has reward {trajectory.reward!r}; it must be a number")
    return number


def _as_number(value: Any) -> float | None:
    """`value` as a float, which may be NaN. `None` if it is not a number."""
    try:
        return None if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError):
        return None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _reduce(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for key, value in row.items():
            if (number := _as_number(value)) is None:
                raise TrajectoryError(f"metric {key!r} is {value!r}, not a number; text belongs in `metadata`")
            values[key].append(number)
    return {key: sum(items) if key.startswith("costs/") else _mean(items) for key, items in values.items()}
