"""Runs that differ in the seed alone, and what they have reached together.

A run belongs to a group if its settings were recorded with a seed. What must be equal is all that was recorded, but for
seeds, the command line and the machine. A tiny model counts by how it was made, since each seed makes its own.
"""

from __future__ import annotations

import hashlib
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from art_page.run_answers import RunSummary, SeedGroup, SeedSpread

SEED = "seed"


def seed_of(settings: Mapping[str, Any]) -> tuple[int | None, str | None]:
    """Return the seed of a run, and a name that runs share if their recorded settings differ in the seed alone."""
    program = settings.get("program")
    sections = [settings.get(name) for name in ("recipe", "pipeline", "data", "task")]
    found = (section.get(SEED) for section in sections if isinstance(section, dict))
    seed = next((one for one in found if isinstance(one, int) and not isinstance(one, bool)), None)
    if seed is None or not isinstance(program, dict):
        return seed, None
    ignored = {"machine", "program"} | ({"base_model"} if "tiny_model" in settings else set())
    same = {name: _without_seeds(part) for name, part in settings.items() if name not in ignored}
    same["program"] = {name: value for name, value in program.items() if name != "command"}
    return seed, hashlib.blake2b(json.dumps(same, sort_keys=True).encode(), digest_size=6).hexdigest()


def _without_seeds(part: Any) -> Any:
    if isinstance(part, dict):
        return {name: _without_seeds(value) for name, value in part.items() if name != SEED}
    return [_without_seeds(value) for value in part] if isinstance(part, list) else part


def find_groups(runs: Sequence[RunSummary]) -> list[SeedGroup]:
    """Return the groups of at least two seeds, in the order of their first run in the list."""
    members: defaultdict[tuple[str, str], list[RunSummary]] = defaultdict(list)
    for run in runs:
        if run.seed_group is not None:
            members[run.project, run.seed_group].append(run)
    return [_group(group) for group in members.values() if len({run.seed for run in group}) > 1]


def _group(runs: list[RunSummary]) -> SeedGroup:
    runs = sorted(runs, key=lambda run: (run.seed or 0, run.name))
    changes = [run.headline for run in runs if run.headline is not None and run.headline.a != run.headline.b]
    starred = {re.sub(rf"seed{run.seed}(?!\d)", "seed*", run.name) for run in runs}
    first = runs[0]
    return SeedGroup(
        id=first.seed_group or "", project=first.project, runs=[run.name for run in runs],
        name=starred.pop() if len(starred) == 1 else f"{first.name} and {len(runs) - 1} more",
        seeds=[run.seed for run in runs if run.seed is not None], metric=changes[0].metric if changes else None,
        before=_spread(change.before.mean for change in changes if change.before),
        after=_spread(change.after.mean for change in changes if change.after),
        difference=_spread(change.difference.mean for change in changes if change.difference),
        training_reward=_spread(run.training_reward.mean for run in runs if run.training_reward),
        seconds=_spread(run.seconds for run in runs if run.seconds is not None),
        costs_usd=_spread(run.costs_usd for run in runs if run.costs_usd is not None),
    )  # fmt: skip


def _spread(values: Iterable[float]) -> SeedSpread | None:
    values = list(values)
    if not values:
        return None
    return SeedSpread(mean=statistics.fmean(values), low=min(values), high=max(values), num=len(values))
