"""The state of a run, one sentence about what happens now, and the time until it ends.

a running server --LiveState.activity--> Activity --+
files: steps, jobs, number of steps ----> RunFacts -+--> describe_run --> RunNow
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from art.errors import StorageError
from art.protocol.live.activity import Activity, JobActivity
from art.storage.layout import ModelPaths
from art.storage.state import read_state
from art.viewer.run_answers import Job, RunState

SERVING_S = 60.0
"""A model counts as serving for this long after its last answer."""
NUM_STEPS = "num_steps"
"""Key of a model's state under which a training loop says at how many steps it will end."""
TRAINING_KINDS = ("train", "train_sft")
_PHASES = {"train": "trains", "publish": "is being loaded into the engine"}


class LiveState(Protocol):
    """What a running server knows about its models. Its methods may be called from any thread, and do not block."""

    def activity(self, project: str, name: str) -> Activity | None:
        """What happens for a model; `None` if the server does not have it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What files and database say about a run."""

    project: str
    name: str
    step: int
    seconds_per_step: float | None
    num_steps: int | None
    """Number of steps of the whole run, from `read_num_steps`."""
    training_job: Job | None
    """The newest job of a kind in `TRAINING_KINDS`."""
    is_used: bool
    """Whether a server uses the data directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNow:
    """The fields `state`, `now` and `eta_s` of a `RunSummary`."""

    state: RunState
    now: str | None
    eta_s: float | None


def read_num_steps(paths: ModelPaths) -> int | None:
    """Return the number of steps at which a run will end, if its training loop has said so.

    ART's recipes say it. A loop of one's own does by `model.merge_state({"num_steps": 200})`.
    """
    try:
        value = (read_state(paths.state) or {}).get(NUM_STEPS)
    except StorageError:  # the file is the user's own, and may hold anything
        return None
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def describe_run(facts: RunFacts, live: LiveState | None) -> RunNow:
    """Describe what happens with a run.

    Args:
        live: the server that runs here; `None` if this program only reads the files.
    """
    activity = None if live is None else live.activity(facts.project, facts.name)
    state = _stored_state(facts) if activity is None else _live_state(facts, activity)
    now = _stored_sentence(facts, state) if activity is None else _live_sentence(facts, activity)
    return RunNow(state=state, now=now, eta_s=_eta(facts, state))


def _eta(facts: RunFacts, state: RunState) -> float | None:
    if facts.num_steps is None or facts.seconds_per_step is None or state not in ("training", "waiting", "serving"):
        return None
    return max(0, facts.num_steps - facts.step) * facts.seconds_per_step


def _live_state(facts: RunFacts, activity: Activity) -> RunState:
    training = _training(activity)
    if training is not None:
        return "training" if training.runs else "waiting"
    if activity.num_requests or (activity.answered_s is not None and activity.answered_s < SERVING_S):
        return "serving"
    return "failed" if _has_failed(facts) else "idle"


def _stored_state(facts: RunFacts) -> RunState:
    job = facts.training_job
    if job is not None and job.state in ("running", "cancelling") and facts.is_used:
        return "training"
    if job is not None and job.state in ("queued", "running", "cancelling"):
        return "waiting"
    if _has_failed(facts):
        return "failed"
    return "idle" if facts.is_used else "finished"


def _has_failed(facts: RunFacts) -> bool:
    return facts.training_job is not None and facts.training_job.state == "failed"


def _stored_sentence(facts: RunFacts, state: RunState) -> str | None:
    if state == "failed" and facts.training_job is not None:
        return _failure(facts.training_job)
    if state == "waiting" and not facts.is_used:
        return f"Step {facts.step + 1} was not finished; it goes on when a server starts on this directory."
    if facts.num_steps is not None and facts.step >= facts.num_steps:
        return f"All {facts.num_steps} steps are done."
    if state == "finished" and facts.num_steps is not None:
        return f"No server runs here; {facts.step} of {facts.num_steps} steps are done."
    return None


def _failure(job: Job) -> str:
    reason = (job.error or "").strip().partition("\n")[0]
    return f"The last training step failed: {reason}" if reason else "The last training step failed."


def _live_sentence(facts: RunFacts, activity: Activity) -> str | None:
    training = _training(activity)
    parts = [_about_job(training, facts.step + 1)] if training is not None else []
    parts += _about_processes(activity)
    if activity.num_requests:
        parts.append(_about_requests(activity, trains=training is not None and training.runs))
    elif training is None and _has_failed(facts) and facts.training_job is not None:
        parts.append(_failure(facts.training_job))
    elif training is None and activity.answered_s is not None:
        parts.append(f"Nothing runs; the last answer was given {_ago(activity.answered_s)} ago.")
    other = next((job for job in activity.jobs if job.runs and job.kind not in TRAINING_KINDS), None)
    if other is not None:
        parts.append(f"A job ({other.kind}) runs for {_ago(other.age_s)}.")
    return " ".join(parts) or None


def _training(activity: Activity) -> JobActivity | None:
    jobs = [job for job in activity.jobs if job.kind in TRAINING_KINDS]
    return next((job for job in jobs if job.runs), jobs[0] if jobs else None)


def _about_job(job: JobActivity, step: int) -> str:
    if not job.runs:
        place = "" if job.queue_place is None else f" in place {job.queue_place}"
        before = "" if job.runs_before is None else f"; {job.runs_before} trains now"
        return f"Step {step} waits{place} for the trainer, for {_ago(job.age_s)}{before}."
    progress = job.progress
    if progress is None:
        return f"Step {step} is being prepared, for {_ago(job.age_s)}."
    done = f": micro-batch {progress.done} of {progress.total}" if progress.phase == "train" and progress.total else ""
    return f"Step {step} {_PHASES.get(progress.phase, progress.phase)}{done}, after {_ago(job.age_s)}."


def _about_processes(activity: Activity) -> list[str]:
    """Name the processes that somebody waits for and that do not work yet."""
    parts = []
    for name, state, needed in (
        ("engine", activity.engine, activity.num_requests > 0 or bool(activity.jobs)),
        ("trainer", activity.trainer, _training(activity) is not None),
    ):
        if needed and state != "up":
            parts.append(f"The {name} {'is starting' if state == 'starting' else 'has failed and is tried again'}.")
    return parts


def _about_requests(activity: Activity, *, trains: bool) -> str:
    count = activity.num_requests
    requests = f"{count} request" + ("s" if count != 1 else "")
    if activity.engine_sleeps:
        return f"{requests} {_verb(count, 'wait')} for the trainer, which uses the engine's device."
    if activity.engine != "up":
        return f"{requests} {_verb(count, 'wait')} for the engine."
    sampled = "are being sampled" if count != 1 else "is being sampled"
    if activity.num_sampling is not None and activity.num_sampling < count:
        sampled = f"{_verb(count, 'run')}; {activity.num_sampling} of them {_verb(activity.num_sampling, 'sample')}"
    return f"{requests} {sampled}" + ("." if trains else "; the trainer waits for rollouts.")


def _verb(count: int, verb: str) -> str:
    return verb if count != 1 else f"{verb}s"


def _ago(seconds: float) -> str:
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
