"""The state of a run and the sentence about it, for a running server and for files alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from art.metrics.verdicts import RunEnd
from art.protocol.live import Activity, JobActivity
from art.protocol.training import JobProgress
from art.storage.layout import DataDir
from art_page.run_answers import RunJob
from art_page.run_files import RunFacts, describe_outcome, describe_run, read_course

FACTS = RunFacts(step=12, seconds_per_step=2.5, num_steps=20, training_job=None, is_used=True)
CALM = Activity(
    jobs=(), num_requests=0, num_sampling=None, answered_s=None, engine="up", engine_sleeps=False, trainer="up"
)
TRAINS = JobActivity(kind="train", runs=True, age_s=8.0, progress=JobProgress(phase="train", done=12, total=40))


def job(state: str, error: str | None = None) -> RunJob:
    return RunJob.model_validate(
        {"id": "j", "kind": "train", "state": state, "step": 12, "error": error}
        | dict.fromkeys(("created_at", "started_at", "ended_at"))
    )


def test_a_step_that_trains_says_how_far_it_is_and_who_waits() -> None:
    activity = replace(CALM, jobs=(TRAINS,), num_requests=3, engine_sleeps=True)
    now = describe_run(FACTS, activity)
    assert now.state == "training"
    assert now.now == (
        "Step 13 trains: micro-batch 12 of 40, after 8 s. "
        "3 requests wait for the trainer, which uses the engine's device."
    )
    assert now.eta_s == 8 * 2.5


def test_a_queued_step_names_the_model_that_it_waits_for() -> None:
    queued = JobActivity(kind="train", runs=False, age_s=125.0, queue_place=2, runs_before="games/b")
    now = describe_run(FACTS, replace(CALM, jobs=(queued,)))
    assert now.state == "waiting"
    assert now.now == "Step 13 waits in place 2 for the trainer, for 2 min; games/b trains now."


def test_sampling_says_that_the_trainer_waits_for_rollouts() -> None:
    now = describe_run(FACTS, replace(CALM, num_requests=8, num_sampling=5))
    assert (now.state, now.now) == ("serving", "8 requests are being sampled; the trainer waits for rollouts.")
    one = describe_run(FACTS, replace(CALM, num_requests=1))
    assert one.now == "1 request is being sampled; the trainer waits for rollouts."


def test_an_engine_that_is_not_up_is_named() -> None:
    now = describe_run(FACTS, replace(CALM, num_requests=2, engine="starting", trainer="failed"))
    assert now.now == "The engine is starting. 2 requests wait for the engine."
    failed = describe_run(FACTS, replace(CALM, jobs=(TRAINS,), trainer="failed"))
    assert failed.now is not None
    assert "The trainer has failed and is tried again." in failed.now


@pytest.mark.parametrize(("answered_s", "state"), [(30.0, "serving"), (300.0, "idle"), (None, "idle")])
def test_a_run_serves_for_a_minute_after_its_last_answer(answered_s: float | None, state: str) -> None:
    now = describe_run(FACTS, replace(CALM, answered_s=answered_s))
    assert now.state == state
    assert (now.eta_s is None) == (state == "idle")


def test_a_failed_step_is_said_until_something_happens() -> None:
    facts = replace(FACTS, training_job=job("failed", "no memory\nstack"))
    assert describe_run(facts, CALM).state == "failed"
    assert describe_run(facts, CALM).now == "The last training step failed: no memory"
    assert describe_run(facts, replace(CALM, num_requests=1)).state == "serving"
    assert describe_run(facts, None).state == "failed"


@pytest.mark.parametrize(
    ("state", "is_used", "expected"),
    [
        ("running", True, "training"), ("running", False, "waiting"), ("queued", True, "waiting"),
        ("succeeded", True, "idle"), ("succeeded", False, "stopped"),
    ],
)  # fmt: skip
def test_files_alone_tell_the_state(state: str, is_used: bool, expected: str) -> None:
    now = describe_run(replace(FACTS, training_job=job(state), is_used=is_used), None)
    assert now.state == expected
    if (state, is_used) == ("running", False):
        assert now.now == "Step 13 was not finished; it goes on when a server starts on this directory."


def test_what_a_recipe_has_left_is_said_while_nothing_happens() -> None:
    why = ["The run ended early, at step 12 of 20: the game server is down"]
    end = RunEnd(ending="failed", step=12, kind="bad", what="It failed at step 12 of 20", why=why)
    for facts, activity in ((replace(FACTS, end=end, is_used=False), None), (replace(FACTS, end=end), CALM)):
        now = describe_run(facts, activity)
        assert (now.state, now.now) == ("failed", why[0])
        outcome = describe_outcome(facts, now.state, None)
        assert outcome is not None
        assert (outcome.kind, outcome.text, outcome.why) == ("bad", end.what, why)
    stopped = replace(FACTS, end=end.model_copy(update={"ending": "stopped"}), is_used=False)
    assert describe_run(replace(stopped, training_job=job("running")), None).state == "stopped"


def test_without_a_record_the_files_say_what_was_achieved() -> None:
    killed = replace(FACTS, is_used=False)
    outcome = describe_outcome(killed, describe_run(killed, None).state, None)
    assert outcome is not None
    assert outcome.text == "It was stopped at step 12 of 20"
    assert describe_outcome(FACTS, "training", None) is None
    assert describe_outcome(FACTS, "idle", None) is None, "between two steps"


def test_a_finished_run_says_how_many_steps_are_done() -> None:
    facts = replace(FACTS, is_used=False)
    assert describe_run(facts, None).now == "No server runs here; 12 of 20 steps are done."
    assert describe_run(replace(facts, step=20), None).now == "All 20 steps are done."
    assert describe_run(facts, None).eta_s is None


def test_the_number_of_steps_is_what_the_loop_has_said(tmp_path: Path) -> None:
    paths = DataDir(tmp_path).model("games", "a")
    paths.root.mkdir(parents=True)
    assert read_course(paths) == (None, None)
    for value, expected in ((200, 200), (0, None), ("200", None), (True, None)):
        paths.state.write_text(json.dumps({"num_steps": value, "mine": 1}))
        assert read_course(paths) == (expected, None)
    paths.state.write_text("not JSON")
    assert read_course(paths) == (None, None)
    assert describe_run(replace(FACTS, num_steps=None), replace(CALM, jobs=(TRAINS,))).eta_s is None
