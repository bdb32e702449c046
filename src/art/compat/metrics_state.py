"""The state of a metrics builder as JSON data: sums, costs and scenarios over all rows of a model's history."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from art.errors import ConfigError
from art.storage.totals import hash_scenario

_KEYS = {"cum_state": dict, "unique_scenario_hashes": list, "unique_scenario_ids": list}
"""Keys of a state. ART 0.5 kept the ids of scenarios, where now there are hashes."""
_HASH = re.compile("[0-9a-f]{16}")
_COSTS = "costs/cum/"
_SECTIONS = (_COSTS, "data/cum/", "time/cum/", "throughput/cum/")


def make_state(sums: Mapping[str, float], costs: Mapping[str, float], scenarios: Iterable[int]) -> dict[str, Any]:
    """Make a state of sums by metric, costs in USD by source, and hashes of scenarios."""
    return {
        "cum_state": {**sums, **{f"{_COSTS}{source}": usd for source, usd in costs.items()}},
        "unique_scenario_hashes": [f"{number:016x}" for number in scenarios],
    }


def read_state(state: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, float], set[int]]:
    """Return sums by metric, costs in USD by source, and hashes of scenarios.

    Raises:
        ConfigError: this is not a state.
    """
    if not all(isinstance(value, _KEYS.get(name, ())) for name, value in state.items()):
        raise ConfigError(f"expected what `state_dict()` returns, with the keys {', '.join(_KEYS)}; got {state!r:.200}")
    sums, costs = {}, {}
    for name, value in state.get("cum_state", {}).items():
        if not (isinstance(value, (int, float)) and math.isfinite(value) and name.startswith(_SECTIONS)):
            raise ConfigError(f"cum_state[{name!r}] is {value!r}; expected a number named {'..., '.join(_SECTIONS)}...")
        if name.startswith(_COSTS):
            costs[name.removeprefix(_COSTS)] = float(value)
        else:
            sums[name] = float(value)
    hashes = state.get("unique_scenario_hashes", [])
    if wrong := [text for text in hashes if not (isinstance(text, str) and _HASH.fullmatch(text))]:
        raise ConfigError(f"unique_scenario_hashes has {wrong[0]!r}; expected texts of 16 hexadecimal digits")
    scenarios = {int(text, 16) for text in hashes}
    return sums, costs, scenarios | set(map(hash_scenario, state.get("unique_scenario_ids", ())))


def lacking_costs(costs: Mapping[str, float], spent: Mapping[str, float]) -> dict[str, float]:
    """Return by how much `costs` exceed what was `spent`, by source.

    Sums such as `train` of `train/judge`, and `all`, are left out.
    """
    lacking = {}
    for name, usd in costs.items():
        if name == "all" or any(other.startswith(f"{name}/") for other in costs):
            continue
        parts = [part for source, part in spent.items() if f"{source}/".startswith(f"{name}/")]
        if usd - sum(parts) > 1e-9:  # more than rounding
            lacking[name] = usd - sum(parts)
    return lacking
