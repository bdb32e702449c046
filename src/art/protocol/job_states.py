"""Kinds and states of jobs, and the one table of allowed changes of state.

    queued --> running --> succeeded
      |  ^      |  |  \\
      |  +------+  |   +--> failed           a running job is queued again when the server died
      |            v
      |        cancelling --> cancelled      or succeeded, or failed, when the stop came too late
      +--> failed, cancelled
"""

from __future__ import annotations

from typing import Literal, get_args

JobKind = Literal["train", "train_sft", "fork", "export", "push", "pull"]
JobState = Literal["queued", "running", "cancelling", "succeeded", "failed", "cancelled"]

NEXT_STATES: dict[JobState, frozenset[JobState]] = {
    "queued": frozenset({"running", "failed", "cancelled"}),
    "running": frozenset({"queued", "cancelling", "succeeded", "failed"}),
    "cancelling": frozenset({"cancelled", "succeeded", "failed"}),
    "succeeded": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
}
ENDED: frozenset[JobState] = frozenset(state for state, following in NEXT_STATES.items() if not following)
UNFINISHED: tuple[JobState, ...] = tuple(state for state in get_args(JobState) if state not in ENDED)
