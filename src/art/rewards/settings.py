"""Every setting of judges that are language models, with its default."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from art.costs import Ledger
from art.errors import ConfigError

CACHE_PATH = Path(".art/cache/judge.sqlite")


def params_at(base_url: str | None) -> dict[str, str]:
    """The parameters that send a judge's requests to one address, with the key of `OPENAI_API_KEY` if there is one."""
    return {} if base_url is None else {"base_url": base_url, "api_key": os.environ.get("OPENAI_API_KEY", "none")}


Budget = Ledger
"""`Budget(max_usd=5)` is shared by all whose settings hold it, and kept in memory; `model.costs` is kept on disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeSettings:
    """How a judge is asked, checked and paid."""

    timeout_s: float = 120.0
    """For one request."""
    deadline_s: float = 600.0
    """For one group: requests, waits and all."""
    max_attempts: int = 5
    """Requests per answer while the judge is overloaded, down or slow; waits double from `first_wait_s`."""
    first_wait_s: float = 0.5
    max_answers: int = 3
    """Answers to ask for while they cannot be used: what was wrong is said each time."""
    max_concurrent: int = 16
    """Requests at once to one judge model at one address, over all groups of an event loop."""
    budget: Ledger | None = None
    """Where each answer is booked, and what ends the requests when it is spent."""
    prompt_usd_per_million: float | None = None
    completion_usd_per_million: float | None = None
    """Prices that win over those that litellm knows. Give both or none."""
    cache_path: Path | None = CACHE_PATH
    """Answers are kept here and not asked for twice; `None` for no cache."""
    seed: int | None = None
    """Of the order in which trajectories are shown and of the ids that they get. By default they differ each time."""
    passes: Literal[1, 2] = 1
    """With 2 each group is judged again in the reversed order, which tells what the order does to the scores."""
    on_disagreement: Literal["report", "shrink", "set_aside"] = "shrink"
    """What two passes do to the scores. `shrink` pulls them to the mean of the group by as much as they are noise;
    `set_aside` gives no scores when the disagreement is above `max_disagreement`; both report it."""
    max_disagreement: float = 0.25
    """Root mean square difference of a trajectory's two scores, each relative to its group."""
    context_tokens: int | None = None
    """What the judge can read at once. A group that does not fit is judged in rounds. By default what litellm knows of
    the model, or else found out when the judge complains."""

    def __post_init__(self) -> None:
        for name in ("timeout_s", "deadline_s", "max_attempts", "first_wait_s", "max_answers", "max_concurrent"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"JudgeSettings.{name} must be above 0, got {getattr(self, name)!r}")
        for name, allowed in (("passes", (1, 2)), ("on_disagreement", ("report", "shrink", "set_aside"))):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"JudgeSettings.{name} must be one of {allowed}, got {getattr(self, name)!r}")
        if (self.prompt_usd_per_million is None) != (self.completion_usd_per_million is None):
            raise ConfigError("give both `prompt_usd_per_million` and `completion_usd_per_million`, or neither")
