"""Runs that differ in the seed alone, what each run says of itself, and its labels."""

from __future__ import annotations

import json
from typing import Any

import pytest

from art.metrics.scores import estimate_change
from art.metrics.verdicts import HeldOutChange, RunCourse, describe_end
from art.storage.labels import LabelChanges, read_labels
from art.storage.layout import DataDir
from art.trajectory import TrajectoryGroup
from art_page.rollout_answers import RolloutTableQuery
from art_page.run_answers import RunSummary
from art_page.seeds import seed_of
from art_page.viewer import Viewer
from tests.support.viewer_dirs import PROJECT, RUN, log, rollout

SETTINGS: dict[str, Any] = {
    "program": {"command": "art train game --seed 0", "art": "1.0", "git_commit": "1f0c"}, "machine": {"host": "a"},
    "base_model": "/models/seed0", "tiny_model": {"seed": 0, "warm_start_steps": 200}, "recipe": {"seed": 0, "steps": 4},
    "task": {"name": "game", "headline_metric": "win"},
}  # fmt: skip


def settings(seed: int, **changes: Any) -> dict[str, Any]:
    own = json.loads(json.dumps(SETTINGS).replace('"seed": 0', f'"seed": {seed}').replace("seed0", f"seed{seed}"))
    return own | {"machine": {"host": f"machine-{seed}"}} | changes


def test_seeds_paths_of_tiny_models_commands_and_machines_do_not_part_runs() -> None:
    seed, group = seed_of(settings(0))
    assert (seed, group is None) == (0, False)
    assert seed_of(settings(3)) == (3, group)
    for change in (
        {"recipe": {"seed": 1, "steps": 5}}, {"task": {"name": "game", "headline_metric": "draw"}},
        {"program": {"command": "art", "art": "1.1", "git_commit": "1f0c"}}, {"tiny_model": {"warm_start_steps": 300}},
    ):  # fmt: skip
        assert seed_of(settings(1, **change))[1] != group, change
    hub = {name: part for name, part in settings(1).items() if name != "tiny_model"}
    assert seed_of(hub)[1] != seed_of(hub | {"base_model": "other"})[1], "a base model that ART did not make counts"
    assert seed_of({"recipe": {"seed": 1}}) == (1, None), "not all was recorded"
    assert seed_of({}) == (None, None)


def write_run(data_dir: DataDir, name: str, seed: int, after: list[float]) -> None:
    """A run of four steps whose held-out metric was all 0 or 1 in turn before them."""
    paths = data_dir.model(PROJECT, name)
    paths.root.mkdir(parents=True, exist_ok=True)
    paths.settings.write_text(json.dumps(settings(seed)))
    paths.state.write_text('{"num_steps": 4}')
    before = [float(index % 2) for index in range(len(after))]
    for step, values in ((0, before), (4, after)):
        groups = [
            TrajectoryGroup([rollout(value, scenario=f"s{index}", metrics={"win": value})])
            for index, value in enumerate(values)
        ]
        log(data_dir, groups, step=step, split="test", name=name)
    log(data_dir, [TrajectoryGroup([rollout(0.0), rollout(1.0)])], step=4, name=name, time__step_wall_s=3.0)


def indexed(viewer: Viewer) -> list[RunSummary]:
    for run in viewer.runs().runs:
        while not viewer.rollouts(run.project, run.name, RolloutTableQuery(limit=1)).is_total_exact:
            pass
    return viewer.runs().runs


def test_a_group_has_the_means_and_the_range_of_its_runs(viewer: Viewer, data_dir: DataDir) -> None:
    for seed, wins in ((0, 12), (1, 16), (2, 20)):
        write_run(data_dir, f"game-seed{seed}", seed, [1.0] * wins + [0.0] * (20 - wins))
    indexed(viewer)
    (group,) = viewer.runs().groups
    assert (group.name, group.seeds) == ("game-seed*", [0, 1, 2])
    assert group.metric == "win"
    assert group.after is not None
    assert group.difference is not None
    assert (group.after.mean, group.after.low, group.after.high) == pytest.approx((0.8, 0.6, 1.0))
    assert (group.difference.mean, group.difference.low, group.difference.high) == pytest.approx((0.3, 0.1, 0.5))


def test_the_page_says_of_the_same_rollouts_what_the_terminal_says(viewer: Viewer, data_dir: DataDir) -> None:
    after = [1.0] * 18 + [0.0] * 2
    write_run(data_dir, RUN[1], 0, after)
    (run,) = indexed(viewer)
    before = [float(index % 2) for index in range(20)]
    difference = estimate_change(list(enumerate(before)), list(enumerate(after)))
    change = HeldOutChange(measure="win on held-out rollouts", before=0.5, after=0.9, difference=difference)
    kind, text = describe_end(RunCourse(step=4, num_steps=4, num_tried=4, num_trained=4, change=change))
    assert run.outcome is not None
    assert (run.outcome.kind, run.outcome.text, run.state) == (kind, text, "finished")
    assert text.startswith("It learnt: win on held-out rollouts 0.50 to 0.90, +0.40")
    assert (run.seconds, run.num_steps, run.seed) == (3.0, 4, 0)
    assert run.training_reward is not None
    assert run.training_reward.mean == 0.5


def test_labels_are_kept_beside_the_run(viewer: Viewer, data_dir: DataDir) -> None:
    write_run(data_dir, RUN[1], 0, [1.0])
    version = viewer.version()
    viewer.label(*RUN, LabelChanges(tags=["baseline"], star=True))
    assert viewer.version() != version
    assert viewer.runs().runs[0].labels == read_labels(data_dir.model(*RUN))
    assert viewer.run(*RUN).labels.tags == ["baseline"]
