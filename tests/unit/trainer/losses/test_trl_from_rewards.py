"""Whole steps of ART and of TRL from the same tokens and rewards on, with some groups without spread."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("trl")

from tests.support.objective_bench import Bench, relative_error
from tests.support.trl_trainers import STEPS, Trl, finished_rollouts, trl_step

pytestmark = pytest.mark.slow

NUM_GROUPS = 16
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def trl(bench: Bench, model_path: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Trl:
    return Trl(bench, model_path("Qwen3"), tmp_path_factory.mktemp("trl"))


@pytest.mark.parametrize("num_alive", [16, 4, 1])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_that_of_trl(
    name: str, num_alive: int, bench: Bench, trl: Trl, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts = finished_rollouts(bench, num_groups=NUM_GROUPS, num_alive=num_alive)
    step, (seen,) = bench.train(rollouts, STEPS[name][1], monkeypatch)
    loss, expected = trl_step(trl, name, rollouts, seen.adapter)
    assert relative_error(seen.gradient, expected.double()) < TOLERANCE
    if name != "rloo":  # -ratio * advantage in TRL, -advantage * log-prob here: different values, the same gradient
        assert step.metrics["loss/train"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
    assert step.metrics["data/step_num_rollouts_trained"] == 4 * num_alive


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo"])
def test_masked_truncated_rollouts_are_those_of_trl(
    name: str, bench: Bench, trl: Trl, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts = finished_rollouts(bench, num_groups=NUM_GROUPS, num_alive=4, cut=True)
    config = STEPS[name][1].model_copy(update={"mask_truncated": True})
    step, (seen,) = bench.train(rollouts, config, monkeypatch)
    _, expected = trl_step(trl, name, rollouts, seen.adapter, mask_truncated_completions=True)
    assert relative_error(seen.gradient, expected.double()) < TOLERANCE
    assert step.metrics["data/step_num_rollouts_trained"] < 16
