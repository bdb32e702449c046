"""Runs, curves, steps, ledgers, costs, checkpoints: what is made of a run's files and its rows in the database."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from art.costs import Ledger
from art.errors import NotFoundError
from art.metrics.scores import estimate
from art.protocol.promotions import PromotionRecord, Verdict
from art.runtime.registry import Registry
from art.storage.database import Database
from art.storage.history import append_row
from art.storage.layout import DataDir
from art.trajectory import TrajectoryGroup
from art_page.rollout_answers import RolloutKey, RolloutTable, RolloutTableQuery
from art_page.run_answers import MOST_PROMOTIONS, CompareQuery, Series, SeriesQuery
from art_page.viewer import Viewer
from benchmarks.viewer_data import NAME as SERVED
from benchmarks.viewer_data import PROJECT as MAILS
from benchmarks.viewer_data import Size, Writer
from tests.support.viewer_dirs import NAME, PROJECT, RUN, group_file, log, rollout

MAIL_RUN = (MAILS, SERVED)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that a server and a script have written: 12 steps of 16 rollouts; the record has the last two."""
    folder = tmp_path_factory.mktemp("served")
    asyncio.run(Writer(folder, Size(steps=12, rollouts=16, recorded_steps=2)).write_all())
    return folder


@pytest.fixture(scope="module")
def mails(served: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewer]:
    viewer = Viewer(DataDir(served), index_path=tmp_path_factory.mktemp("index") / "index.db")
    viewer.indexer.survey_s = 0.0
    complete(viewer, *MAIL_RUN)
    yield viewer
    viewer.close()


def complete(viewer: Viewer, project: str = PROJECT, name: str = NAME) -> RolloutTable:
    while not (page := viewer.rollouts(project, name, RolloutTableQuery(limit=1000))).is_total_exact:
        pass
    return page


def series(viewer: Viewer, metric: str, **query: object) -> Series:
    complete(viewer)
    (answer,) = viewer.series(*RUN, SeriesQuery.model_validate({"metric": [metric], **query})).series
    return answer


# -- runs --


def test_a_run_in_one_line(mails: Viewer) -> None:
    (run,) = mails.runs().runs
    assert (run.project, run.name, run.base_model, run.step) == (MAILS, SERVED, "Qwen/Qwen3-4B", 12)
    assert (run.state, run.num_rollouts, run.indexing) == ("finished", 12 * 16 + 128, None)
    assert run.main_metric == "train/reward", "`val/reward` has one value only"
    assert run.reward is not None
    assert (run.reward.split, run.reward.step, run.reward.num) == ("train", 12, 16)
    assert run.spark is not None
    assert run.spark.steps == list(range(1, 13))
    assert run.reward.mean == run.spark.mean[-1]
    assert [finding.step for finding in run.findings] == [7]
    assert run.costs_usd == pytest.approx(12 * 0.0024)


def test_a_directory_without_a_database_or_rollouts(viewer: Viewer, data_dir: DataDir) -> None:
    assert viewer.runs().runs == []
    log(data_dir, [], step=1, loss__train=0.5)
    run = viewer.run(*RUN)
    assert (run.base_model, run.step, run.reward and run.reward.mean) == (None, 1, 0.5)
    assert run.main_metric == "loss/train"
    assert viewer.runs("other").runs == []
    with pytest.raises(NotFoundError):
        viewer.run(PROJECT, "nobody")


def test_the_details_of_a_run(mails: Viewer) -> None:
    run = mails.run(*MAIL_RUN)
    assert [(split.split, split.steps) for split in run.splits] == [("train", [(1, 12)]), ("val", [(10, 10)])]
    metrics = {metric.name: metric for metric in run.metrics}
    assert metrics["train/right"].has_band
    assert not metrics["loss/entropy"].has_band
    assert metrics["loss/entropy"].meaning is not None
    assert metrics["time/step_trainer_s"].unit == "s"
    assert (run.jobs[0].step, run.jobs[0].state, run.jobs[0].kind) == (12, "succeeded", "train")


def test_answers_change_their_version_when_files_do(viewer: Viewer, data_dir: DataDir) -> None:
    log(data_dir, [TrajectoryGroup([rollout(1.0)])], step=1)
    complete(viewer)
    before = viewer.version(*RUN)
    assert viewer.version(*RUN) == before
    log(data_dir, [TrajectoryGroup([rollout(1.0)])], step=1)
    assert viewer.version(*RUN) != before


# -- curves --


def test_a_point_has_the_interval_of_its_groups(viewer: Viewer, data_dir: DataDir) -> None:
    rewards = [[0.0, 1.0], [1.0, 1.0], [0.5, 0.5]]
    groups = [TrajectoryGroup([rollout(r, scenario=f"s{i}") for r in rs]) for i, rs in enumerate(rewards)]
    log(data_dir, groups, step=1)
    curve = series(viewer, "train/reward")
    means = estimate([statistics.fmean(group) for group in rewards])  # groups of equal size: the textbook's interval
    assert curve.low is not None
    assert curve.high is not None
    assert (curve.mean[0], curve.low[0], curve.high[0]) == pytest.approx((means.mean, means.low, means.high))
    assert (curve.num, curve.num_steps, curve.split) == ([6], None, "train")


def test_a_step_of_one_scenario_has_the_interval_of_its_rollouts(viewer: Viewer, data_dir: DataDir) -> None:
    log(data_dir, [TrajectoryGroup([rollout(r) for r in (0.0, 1.0, 1.0)])], step=1)
    curve = series(viewer, "train/reward")
    whole = estimate([0.0, 1.0, 1.0])
    assert curve.low is not None
    assert curve.low[0] == pytest.approx(whole.low)


def test_a_number_that_the_script_gave_has_no_interval_of_the_rollouts(viewer: Viewer, data_dir: DataDir) -> None:
    log(data_dir, [TrajectoryGroup([rollout(0.0), rollout(1.0)])], step=1, train__reward=7.0)
    curve = series(viewer, "train/reward")
    assert (curve.mean, curve.low) == ([7.0], None)


def test_rows_of_a_step_are_averaged_and_bounds_hold(viewer: Viewer, data_dir: DataDir) -> None:
    for step, value in ((1, 1.0), (2, 2.0), (2, 4.0), (3, 9.0)):
        log(data_dir, [], step=step, loss__train=value)
    assert series(viewer, "loss/train").mean == [1.0, 3.0, 9.0]
    assert series(viewer, "loss/train", first="2", last=2).steps == [2]
    assert series(viewer, "no/such").steps == []


def test_thinned_bands_are_narrower_than_those_of_steps(viewer: Viewer, data_dir: DataDir) -> None:
    for step in range(1, 9):
        groups = [TrajectoryGroup([rollout(r, scenario=f"s{r}") for r in (0.0, 0.0)]) for _ in range(3)]
        groups += [TrajectoryGroup([rollout(1.0, scenario=f"t{i}")]) for i in range(6)]
        log(data_dir, groups, step=step)
    each, joined = series(viewer, "train/reward"), series(viewer, "train/reward", max_points=2)
    assert each.high is not None
    assert joined.high is not None
    assert each.high[0] is not None
    assert joined.high[0] is not None
    narrower = (joined.high[0] - joined.mean[0]) / (each.high[0] - each.mean[0])
    assert 0.3 < narrower < 0.5  # 1 / sqrt(4), and the normal quantile in place of Student's


def test_damaged_rows_are_left_out(viewer: Viewer, data_dir: DataDir) -> None:
    log(data_dir, [], step=1, loss__train=1.0)
    with data_dir.model(*RUN).history.open("ab") as file:
        file.write(b'{"loss/train": 3.0}\nnonsense\n[1]\n{"step": 2, "loss/train"')
    answer = viewer.series(*RUN, SeriesQuery(metric=["loss/train"]))
    assert answer.series[0].steps == [1]
    append_row(data_dir.model(*RUN).history, {"loss/train": 5.0}, step=2)
    assert viewer.series(*RUN, SeriesQuery(metric=["loss/train"])).series[0].mean == [1.0, 5.0]


# -- steps and ledgers --


def test_a_ledger_closes_per_step_and_in_sum(mails: Viewer) -> None:
    steps = [mails.step(*MAIL_RUN, step).ledger for step in range(1, 13)]
    summed = mails.ledger(*MAIL_RUN)
    assert summed.ledger is not None
    assert (summed.first, summed.last, summed.num_steps) == (1, 12, 12)
    for ledger in [*steps, summed.ledger]:
        assert ledger is not None
        assert ledger.sampled == ledger.trained + ledger.context + sum(ledger.dropped.values())
    assert summed.ledger.sampled == sum(ledger.sampled for ledger in steps if ledger)
    part = mails.ledger(*MAIL_RUN, first=3, last=4)
    assert part.ledger is not None
    assert part.ledger.sampled == sum(ledger.sampled for ledger in steps[2:4] if ledger)
    assert mails.ledger(*MAIL_RUN, first=99).ledger is None


def test_a_step_in_detail(mails: Viewer) -> None:
    step = mails.step(*MAIL_RUN, 7)
    assert (step.num_groups, step.num_rollouts, step.previous, step.next) == (2, 16, 6, 8)
    assert step.findings[0].text.startswith("loss/entropy is 0.1")
    assert step.seconds["publish"] == 0.1
    with pytest.raises(NotFoundError):
        mails.step(*MAIL_RUN, 99)


# -- what training did --


def test_rows_have_what_training_did(mails: Viewer) -> None:
    rows = mails.rollouts(*MAIL_RUN, RolloutTableQuery(step=12, split="train", limit=1000)).rows
    assert len(rows) == 16
    for row in rows:
        assert row.num_tokens == 110 * row.num_turns
        assert (row.advantage is None) == (row.dropped_because is not None)
    dropped = mails.rollouts(*MAIL_RUN, RolloutTableQuery(dropped="any"))
    trained = mails.rollouts(*MAIL_RUN, RolloutTableQuery(dropped="none", split="train"))
    assert dropped.total + trained.total == 12 * 16
    assert {row.dropped_because for row in dropped.rows} <= {"no_reward_spread"}


def test_a_plan_that_comes_after_the_rollouts_is_joined(served: Path, tmp_path: Path) -> None:
    folder = DataDir(served).model(*MAIL_RUN).step(5)
    away = tmp_path / "plans"
    folder.rename(away)
    viewer = Viewer(DataDir(served), index_path=tmp_path / "late.db")
    viewer.indexer.survey_s = 0.0
    asked = RolloutTableQuery(step=5, split="train")
    try:
        assert {row.advantage for row in viewer.rollouts(*MAIL_RUN, asked).rows} == {None}
    finally:
        away.rename(folder)
    rows = viewer.rollouts(*MAIL_RUN, asked).rows
    assert all(row.advantage is not None or row.dropped_because for row in rows)
    assert len(rows) == 16
    viewer.close()


# -- costs and checkpoints --


def test_costs_by_source_and_step(viewer: Viewer, data_dir: DataDir) -> None:
    ledger = Ledger(path=data_dir.model(*RUN).costs)
    for step in (1, 2):
        ledger.book("judge/ruler", usd=0.5 * step, prompt_tokens=10)
        ledger.book("gpu/trainer", seconds=3.0, priced=False)
        ledger.close("train", step)
    ledger.book("judge/ruler", usd=0.25)
    answer = viewer.costs(*RUN)
    assert answer.total_usd == pytest.approx(1.75) == pytest.approx(ledger.spent_usd)
    assert answer.by_step.steps == [1, 2]
    assert answer.by_step.by_source == {"train/judge/ruler": [0.5, 1.0]}
    assert [(source.source, source.usd) for source in answer.by_source][:2] == [
        ("train/judge/ruler", 1.5), ("judge/ruler", 0.25),
    ]  # fmt: skip
    assert {source.source: source.seconds for source in answer.by_source}["gpu/trainer"] == 6.0
    with data_dir.model(*RUN).costs.open("ab") as file:
        file.write(b'{"source": "x", "usd": "much"}\n{"what": 1}\n')
    assert viewer.costs(*RUN).total_usd == answer.total_usd, "damaged lines cost nothing"


def test_costs_without_a_price_are_unknown_and_not_0(viewer: Viewer, data_dir: DataDir) -> None:
    ledger = Ledger(path=data_dir.model(*RUN).costs)
    ledger.book("judge/ruler", prompt_tokens=10, priced=False)
    ledger.close("train", 1)
    answer = viewer.costs(*RUN)
    assert answer.total_usd is None
    assert [source.usd for source in answer.by_source] == [None]


def test_checkpoints(mails: Viewer, served: Path) -> None:
    answer = mails.checkpoints(*MAIL_RUN)
    (row,) = answer.checkpoints
    assert (row.step, row.is_newest, row.is_promoted, row.is_best) == (12, True, False, False)
    with sqlite3.connect(DataDir(served).database) as db:
        db.execute("INSERT INTO promoted VALUES (?, ?, 12, 0.0)", MAIL_RUN)
    assert [one.is_promoted for one in mails.checkpoints(*MAIL_RUN).checkpoints] == [True]
    with db:
        db.execute("DELETE FROM promoted")
    db.close()
    assert row.size_bytes > 2000
    assert row.metrics["train/reward"] == pytest.approx(mails.runs().runs[0].reward.mean)  # type: ignore[union-attr]


def test_the_history_of_promotions_newest_first(viewer: Viewer, data_dir: DataDir) -> None:
    """The database of an older server has no table for it."""
    log(data_dir, [TrajectoryGroup([rollout(1.0, scenario="a")])], step=1, split="val")
    assert (viewer.checkpoints(*RUN).promotions, viewer.checkpoints(*RUN).num_promotions) == ([], 0)
    database = Database(data_dir.database)
    verdict = Verdict(
        passed=True, reason="step 1 has more", require=0.02, source="games", reference_step=0, num_scenarios=40,
        reference=0.25, candidate=0.75, difference=0.5, low=0.3,
    )  # fmt: skip
    decision = PromotionRecord(
        number=1, at=1.5, step=1, previous_step=None, decision="passed", key_id="3f9c01d2ab47", verdict=verdict
    )

    async def decide() -> None:
        registry = Registry(database)
        await registry.start()
        await registry.add_decision(*RUN, decision, "e")
        for number in range(MOST_PROMOTIONS):
            without_gate = {"step": 2, "decision": "ungated", "note": f"number {number}", "verdict": None}
            await registry.add_decision(*RUN, decision.model_copy(update=without_gate))
        await registry.add_decision("other", "run", decision, "e")

    asyncio.run(decide())
    answer = viewer.checkpoints(*RUN)
    assert (answer.num_promotions, len(answer.promotions)) == (MOST_PROMOTIONS + 1, MOST_PROMOTIONS)
    assert answer.promotions[0].note == f"number {MOST_PROMOTIONS - 1}"
    assert answer.promotions[-1].note == "number 0", "the oldest is left out"
    database.run_blocking(lambda db: db.execute("DELETE FROM promotions WHERE decision = 'ungated'"))
    (record,) = viewer.checkpoints(*RUN).promotions
    assert (record.step, record.decision, record.key_id, record.verdict) == (1, "passed", "3f9c01d2ab47", verdict)
    database.close()


def test_the_first_comparison_is_of_held_out_scenarios_by_the_metric_of_the_task(
    viewer: Viewer, data_dir: DataDir
) -> None:
    """Checkpoints 1 and 4 have training rollouts too, of other scenarios; step 2 was measured on others than step 4."""
    for step in (1, 2, 3, 4):
        log(data_dir, [TrajectoryGroup([rollout(float(step), scenario=f"train-{step}")])], step=step)
    solved = {0: [0.25, 0.5, 0.0], 4: [0.75, 0.75, 0.0]}
    for step, values in solved.items():
        rollouts = [rollout(9.0, scenario=f"s{i}", metrics={"solved": value}) for i, value in enumerate(values)]
        log(data_dir, [TrajectoryGroup(rollouts)], step=step, split="test")
    log(data_dir, [TrajectoryGroup([rollout(9.0, scenario="other", metrics={"solved": 1.0})])], step=2, split="test")
    settings = data_dir.model(*RUN).settings
    settings.write_text(json.dumps({"task": {"name": "x", "headline_metric": "solved"}, "program": {"art": "1"}}))
    complete(viewer)
    (run,) = viewer.runs().runs
    expected = estimate([0.5, 0.25, 0.0])
    for change in (run.headline, viewer.checkpoints(*RUN).compared):
        assert change is not None
        assert (change.split, change.metric, change.a, change.b) == ("test", "solved", 0, 4)
        assert change.before is not None
        assert change.after is not None
        assert (change.before.mean, change.after.mean) == (0.25, 0.5)
        assert change.difference is not None
        ends = (change.difference.mean, change.difference.low, change.difference.high)
        assert ends == pytest.approx((expected.mean, expected.low, expected.high))
    assert viewer.run(*RUN).settings == json.loads(settings.read_text())


def test_one_evaluation_has_no_difference_and_training_rollouts_are_none(viewer: Viewer, data_dir: DataDir) -> None:
    log(data_dir, [TrajectoryGroup([rollout(1.0)])], step=1)
    complete(viewer)
    assert viewer.runs().runs[0].headline is None
    assert viewer.checkpoints(*RUN).compared is None
    log(data_dir, [TrajectoryGroup([rollout(0.5)])], step=1, split="val")
    complete(viewer)
    headline = viewer.runs().runs[0].headline
    assert headline is not None
    assert (headline.metric, headline.a, headline.b) == ("reward", 1, 1)


def test_two_steps_are_compared_on_the_same_scenarios(viewer: Viewer, data_dir: DataDir) -> None:
    rewards = {1: {"a": [0.0, 0.2], "b": [0.5], "c": [1.0]}, 2: {"a": [1.0, 1.0], "b": [0.6], "c": [0.7], "d": [1.0]}}
    for step, scenarios in rewards.items():
        groups = [TrajectoryGroup([rollout(r, scenario=name) for r in rs]) for name, rs in scenarios.items()]
        log(data_dir, groups, step=step, split="val")
    answer = viewer.compare(*RUN, CompareQuery(a=1, b=2))
    assert [change.scenario for change in answer.scenarios] == ["a", "c", "b"]
    assert [change.difference for change in answer.scenarios] == pytest.approx([0.9, -0.3, 0.1])
    expected = estimate([0.9, 0.1, -0.3])
    assert answer.difference is not None
    assert answer.difference.model_dump() == pytest.approx(
        {"mean": expected.mean, "low": expected.low, "high": expected.high, "num": 3}
    )
    assert (answer.num_scenarios, answer.num_better, answer.num_worse, answer.splits) == (3, 2, 1, ["val"])
    assert answer.scenarios[0].rollouts_b == [RolloutKey(split="val", step=2, group=0, index=i) for i in (0, 1)]
    assert "left out: 1." in (answer.missing or "")
    assert group_file(data_dir, 1, "val").exists()
    empty = viewer.compare(*RUN, CompareQuery(a=1, b=9))
    assert (empty.num_scenarios, empty.difference) == (0, None)
    assert "step 9" in (empty.missing or "")


def test_an_equal_gain_in_all_of_a_few_scenarios_is_not_certain(viewer: Viewer, data_dir: DataDir) -> None:
    for step, reward in ((1, 0.0), (2, 1.0)):
        log(data_dir, [TrajectoryGroup([rollout(reward, scenario=name)]) for name in "abcdef"], step=step, split="val")
    difference = viewer.compare(*RUN, CompareQuery(a=1, b=2)).difference
    assert difference is not None
    assert difference.low is not None
    assert 0 < difference.low < 0.7, "Tango's interval of 6 wins over 6 losses has a width"
