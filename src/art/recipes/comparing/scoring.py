"""Turns the kept rollouts of models into the rows of a `ModelComparison`."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from art.costs import Prices, TokenPrice
from art.recipes.comparing.metered_http import CallSums, count_calls
from art.report.model_comparison import ModelRow, Quantiles
from art.report.scores import Score, score_difference, score_scenarios
from art.storage.jsonl import append_lines, read_lines
from art.task import Scenario, Task

Values = Mapping[str, Sequence[float]]
"""Values of the scored rollouts by scenario."""


def by_scenario(rows: Sequence[KeptRollout], field: str) -> dict[str, list[float]]:
    """Return a value of the scored rollouts (`headline` or `reward`) by scenario, in the order of their indices."""
    values: dict[str, list[float]] = {}
    for _, row in sorted(scored(rows).items()):
        values.setdefault(row.scenario, []).append(float(getattr(row, field)))
    return values


def measure(row: ModelRow, rows: Sequence[KeptRollout], num_planned: int) -> ModelRow:
    """Return a model's row with what its rollouts say, without differences and costs.

    Args:
        num_planned: number of rollouts that every model should have.
    """
    good = list(scored(rows).values())
    tried = {one.place for one in rows}
    errors = [one for one in rows if one.error is not None and one.place not in scored(rows)]
    update: dict[str, Any] = {
        "num_rollouts": len(good), "num_failed_rollouts": len(tried) - len(good),
        "num_rollouts_left": num_planned - len(tried), "problem": errors[-1].error if errors else row.problem,
    }  # fmt: skip
    calls = [one.calls for one in rows if one.calls is not None]
    update["calls"] = count_calls(calls) if calls else None
    if good:
        headlines = [value for values in by_scenario(rows, "headline").values() for value in values]
        update |= {
            "headline": score_scenarios(list(by_scenario(rows, "headline").values())),
            "reward": score_scenarios(list(by_scenario(rows, "reward").values())),
            "headline_bounds": _bounds(headlines, num_planned),
            "policy_fault_rate": statistics.fmean(one.is_policy_fault for one in good),
            "turns": statistics.fmean(one.num_turns for one in good),
            "rollout_latency_s": quantiles([one.seconds for one in good]),
            **_tokens([one.calls for one in good if one.calls is not None], len(good)),
        }
    return row.model_copy(update=update)


def _bounds(headlines: Sequence[float], num_planned: int) -> tuple[float, float] | None:
    """The least and the greatest mean that missing rollouts could lead to, for a metric of 0 and 1."""
    missing = num_planned - len(headlines)
    if not missing or any(value not in (0.0, 1.0) for value in headlines):
        return None
    return sum(headlines) / num_planned, (sum(headlines) + missing) / num_planned


def _tokens(calls: Sequence[CallSums], num_rollouts: int) -> dict[str, Any]:
    seconds = [second for one in calls for second in one.answer_seconds]
    is_reported = bool(seconds) and not any(one.num_without_usage for one in calls)
    return {
        "turn_latency_s": quantiles(seconds) if seconds else None,
        "prompt_tokens": sum(one.prompt_tokens for one in calls) / num_rollouts if is_reported else None,
        "completion_tokens": sum(one.completion_tokens for one in calls) / num_rollouts if is_reported else None,
    }


def quantiles(values: Sequence[float]) -> Quantiles:
    """Return median and 95th percentile: the smallest value that 95 % of the values do not exceed."""
    ordered = sorted(values)
    rank = -(-95 * len(ordered) // 100)  # rounded up
    return Quantiles(median=statistics.median(ordered), p95=ordered[rank - 1])


def price_rollouts(
    rows: Sequence[KeptRollout], price: TokenPrice | None, listed: TokenPrice | None, machine: Prices | None
) -> tuple[float | None, str]:
    """Return USD for 1,000 scored rollouts, and where the price comes from or why there is none.

    What failed rollouts cost is part of it: it has to be paid to get the others.

    Args:
        price: the price that the user gave.
        listed: the price in a table, which a provider's own statement comes before.
        machine: price of this machine, for a model that runs on it.
    """
    num_scored = len(scored(rows))
    calls = [one.calls for one in rows if one.calls is not None]
    if not num_scored:
        return None, "no rollout has a score"
    num_answers = sum(one.num_answers for one in calls)
    if price is None and num_answers and sum(one.num_charged for one in calls) == num_answers:
        return 1000 * sum(one.charged_usd for one in calls) / num_scored, "the provider's own statement"
    if price is None and machine is not None and (usd := machine.device_usd(_busy_s(rows))) is not None:
        return 1000 * usd / num_scored, "the price of this machine for the time of the rollouts"
    chosen = price or listed
    if chosen is None:
        return None, "no price"
    if (missing := sum(one.num_without_usage for one in calls)) or not num_answers:
        return None, f"no tokens reported for {missing} of {num_answers} answers"
    usd = chosen.usd(
        prompt_tokens=sum(one.prompt_tokens for one in calls), cached_tokens=sum(one.cached_tokens for one in calls),
        completion_tokens=sum(one.completion_tokens for one in calls),
    )  # fmt: skip
    return 1000 * usd / num_scored, "the price that was given" if price is not None else "litellm's table"


def _busy_s(rows: Sequence[KeptRollout]) -> float:
    """Seconds in which at least one of the rollouts ran."""
    # Counted from the first start: added to a Unix time, seconds would be rounded to 0.24 microseconds.
    first = min((one.started_at for one in rows), default=0.0)
    total, end = 0.0, 0.0
    for start, stop in sorted((one.started_at - first, one.started_at - first + one.seconds) for one in rows):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def compare_with(row: ModelRow, rows: Sequence[KeptRollout], reference: Sequence[KeptRollout]) -> ModelRow:
    """Return a model's row with its differences to the reference, on the scenarios and rollouts that both have."""
    common = scored(rows).keys() & scored(reference).keys()
    if not common:
        return row
    mine = [one for one in rows if one.place in common]
    theirs = [one for one in reference if one.place in common]
    differences: dict[str, Score] = {}
    for field in ("headline", "reward"):
        values, against = by_scenario(mine, field), by_scenario(theirs, field)
        names = sorted(values)
        differences[field] = score_difference([against[name] for name in names], [values[name] for name in names])
    return row.model_copy(update={"difference": differences["headline"], "reward_difference": differences["reward"]})


_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")


class KeptRollout(BaseModel):
    """One rollout as it is kept: its score or its error, its requests and its conversation."""

    model_config = ConfigDict(extra="forbid")

    scenario: str
    """Id of the scenario, and a hash of its content and of the task's code."""
    index: int
    """Number of the rollout among those of its scenario."""
    started_at: float
    """Seconds since the epoch."""
    seconds: float
    error: str | None = None
    """Why there is no score; `None` if there is one."""
    reward: float | None = None
    headline: float | None = None
    is_policy_fault: bool = False
    num_turns: int = 0
    """Answers of the model in the rollout."""
    calls: CallSums | None = None
    """`None` for a model whose requests do not go over HTTP."""
    trajectory: dict[str, Any] = Field(default_factory=dict)
    """The rollout, as the log of a training has it."""

    @property
    def place(self) -> tuple[str, int]:
        return self.scenario, self.index


class KeptRollouts:
    """The rollouts of one model in a comparison's folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows = [row for _, content in read_lines(path) if (row := _parsed(content)) is not None]

    def add(self, row: KeptRollout) -> None:
        """Append a rollout to the file, and return when it is on disk."""
        append_lines(self._path, [row.model_dump(mode="json")])
        self._rows.append(row)

    def of(self, scenarios: Iterable[str], rollouts: int) -> list[KeptRollout]:
        """Return what was tried for these scenarios, failures included, in the order in which it ended."""
        names = set(scenarios)
        return [row for row in self._rows if row.scenario in names and row.index < rollouts]


def scored(rows: Iterable[KeptRollout]) -> dict[tuple[str, int], KeptRollout]:
    """Return the rollouts that have a score, by scenario and index."""
    return {row.place: row for row in rows if row.error is None}


def file_of(folder: Path, label: str, identity: str) -> Path:
    """Return the file of a model's rollouts. A model that is asked in another way has another file."""
    digest = hashlib.blake2b(identity.encode(), digest_size=4).hexdigest()
    return folder / "rollouts" / f"{_NOT_IN_NAMES.sub('-', label)[:60].strip('-.')}-{digest}.jsonl"


def scenario_names(task: Task, scenarios: Iterable[Scenario]) -> list[str]:
    """Name scenarios by their id and a hash of their content, and of the file that has the task's code.

    A rollout that was made with other rules or another reward is therefore not taken for one of these.
    """
    code = _source(task)
    names = []
    for scenario in scenarios:
        digest = hashlib.blake2b(f"{code}{scenario.model_dump_json()}".encode(), digest_size=6).hexdigest()
        names.append(f"{scenario.id}#{digest}")
    return names


def _source(task: Task) -> str:
    try:
        path = Path(inspect.getfile(type(task)))
    except (TypeError, OSError):  # a class of a notebook or of an interactive session
        return type(task).__qualname__
    is_folder = (path.parent / "__init__.py").is_file() and path.stem.endswith("task")
    files = sorted(path.parent.glob("*.py")) if is_folder else [path]
    return "".join(file.read_text(encoding="utf-8") for file in files)


def _parsed(content: dict[str, Any] | None) -> KeptRollout | None:
    try:
        return None if content is None else KeptRollout.model_validate_json(json.dumps(content))
    except ValidationError:  # of another version of ART
        return None
