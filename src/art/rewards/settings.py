"""The settings of judges that are language models."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from art.costs import Ledger
from art.errors import ConfigError

CACHE_PATH = Path(".art/cache/judge.sqlite")


def params_at(base_url: str | None) -> dict[str, str]:
    """Parameters that send a judge's requests to an address, with the key in `OPENAI_API_KEY` if it is set."""
    return {} if base_url is None else {"base_url": base_url, "api_key": os.environ.get("OPENAI_API_KEY", "none")}


Budget = Ledger
"""A limit of costs, kept in memory. Judges with the same one in their settings share it. (`model.costs` is on disk.)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeSettings:
    """How a judge model is called, how its answers are checked, and what it may cost."""

    timeout_s: float = 120.0
    """Time limit of one request, in seconds."""
    deadline_s: float = 600.0
    """Time limit for judging one group, in seconds, with all requests and waits."""
    max_attempts: int = 5
    """Largest number of attempts per answer while the judge is overloaded, down or slow."""
    first_wait_s: float = 0.5
    """Seconds to wait before the second attempt. The wait doubles with each further attempt."""
    max_answers: int = 3
    """Largest number of answers to ask for when they cannot be used. The judge is told each time what was wrong."""
    max_concurrent: int = 16
    """Largest number of concurrent requests to one judge model at one address, over all groups of an event loop."""
    budget: Ledger | None = None
    """Ledger in which the cost of each answer is booked. Once its limit is spent, requests raise a `BudgetError`."""
    prompt_usd_per_million: float | None = None
    """Price of a million prompt tokens in US dollars. Replaces litellm's price; set both prices or none."""
    completion_usd_per_million: float | None = None
    """Price of a million completion tokens in US dollars."""
    cache_path: Path | None = CACHE_PATH
    """File in which judgements are cached; `None` for no cache."""
    seed: int | None = None
    """Seed of the order and the ids of trajectories in a question. By default they are random each time."""
    passes: Literal[1, 2] = 1
    """With 2, each group is judged a second time in reversed order, which shows how the order changes the scores."""
    on_disagreement: Literal["report", "shrink", "set_aside"] = "report"
    """What happens when two passes disagree. `report` logs the disagreement, and the scores are the mean of both.
    `shrink` moves that mean towards the group's by the share of its spread that the passes do not share, which was
    measured to teach less. `set_aside` gives no scores if the disagreement is above `max_disagreement`."""
    max_disagreement: float = 0.25
    """Largest disagreement for `set_aside`: root mean square difference of a trajectory's two scores, each relative to
    the mean of its pass."""
    context_tokens: int | None = None
    """The judge's context in tokens. A larger group is judged in rounds. By default litellm's value for the model, or
    found out when the judge refuses a question as too long."""

    def __post_init__(self) -> None:
        for name in ("timeout_s", "deadline_s", "max_attempts", "first_wait_s", "max_answers", "max_concurrent"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"JudgeSettings.{name} must be above 0, got {getattr(self, name)!r}")
        for name, allowed in (("passes", (1, 2)), ("on_disagreement", ("report", "shrink", "set_aside"))):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"JudgeSettings.{name} must be one of {allowed}, got {getattr(self, name)!r}")
        if (self.prompt_usd_per_million is None) != (self.completion_usd_per_million is None):
            raise ConfigError("give both `prompt_usd_per_million` and `completion_usd_per_million`, or neither")
