"""The divisor of each token's loss, with branches, rollouts that teach nothing, and truncated rollouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from art.config import DpoConfig, DppoConfig, KlConfig, TrainConfig
from art.credit.plan import StepPlan, plan_step
from art.protocol.training import WireGroup, WireHistory, WireTrajectory
from tests.support.recorded_exchanges import (
    BRANCH,
    BRANCHING,
    FIRST,
    LONG,
    LONG_TURN,
    ONE_TURN,
    SECOND,
    UNTRACKED,
    choice,
    exchange,
    group,
    resolved,
    samples_of,
    token_scales,
    trajectory,
)


def plan(*groups: WireGroup | list[WireTrajectory], step: int = 3, **config: Any) -> StepPlan:
    return plan_step(resolved(*groups), TrainConfig(**config), step=step)


# -- weights: rollouts of 2 + 1 tokens in two branches, of 6 tokens, and a group of 2 + 2 tokens --

UNEVEN = (
    [trajectory(1.0, BRANCHING), trajectory(0.0, LONG_TURN)],
    [trajectory(1.0, ONE_TURN), trajectory(0.0, ONE_TURN)],
)


def test_every_token_counts_the_same() -> None:
    scales = [scale for rollout in token_scales(plan(*UNEVEN)).values() for scale in rollout.values()]
    assert scales == pytest.approx([1 / 13] * 5)


def test_every_rollout_counts_the_same_with_all_its_branches() -> None:
    assert token_scales(plan(*UNEVEN, normalize="rollout")) == {
        "[0].trajectories[0]": pytest.approx({"paths[0]": 1 / 4 / 3, "paths[1]": 1 / 4 / 3}),
        "[0].trajectories[1]": pytest.approx({"paths[0]": 1 / 4 / 6}),
        "[1].trajectories[0]": pytest.approx({"paths[0]": 1 / 4 / 2}),
        "[1].trajectories[1]": pytest.approx({"paths[0]": 1 / 4 / 2}),
    }


@pytest.mark.parametrize("normalize", ["rollout", 10])
def test_branches_do_not_make_a_rollout_louder(normalize: Any) -> None:
    """One rollout asks eight sub-agents, another none; the influence of a third stays as it is."""
    answers = [exchange(f"s{i}", [9, i], [4, 5], messages=[], text="") for i in range(8)]
    subs = [WireHistory(items=[choice(e.id, "")]) for e in answers]
    config = TrainConfig(normalize=normalize)

    def third(further: list[Any]) -> float:
        members = [trajectory(1.0, ONE_TURN, *further), trajectory(0.0, ONE_TURN), trajectory(0.0, LONG_TURN)]
        groups = resolved(members, exchanges=(*answers, FIRST, LONG))
        scales = token_scales(plan_step(groups, config, step=3))
        assert len(scales["[0].trajectories[0]"]) == 1 + len(further)
        return scales["[0].trajectories[2]"]["paths[0]"]

    assert third(subs) == pytest.approx(third([]))


def test_every_group_counts_the_same() -> None:
    scales = token_scales(plan(*UNEVEN, normalize="group"))
    first, second = [
        [scale for key, rollout in scales.items() if key[1] == g for scale in rollout.values()] for g in "01"
    ]
    assert first == pytest.approx([1 / 2 / 9] * 3)
    assert second == pytest.approx([1 / 2 / 4] * 2)


def test_length_has_no_influence_with_a_constant() -> None:
    """Sums over tokens by 100 per rollout, of which there are four."""
    scales = token_scales(plan(*UNEVEN, normalize=100))
    found = [scale for rollout in scales.values() for scale in rollout.values()]
    assert found == pytest.approx([1 / 4 / 100] * 5)


# -- the divisor: one group of 2 + 6 tokens with spread, one of 4 + 4 without, one rollout of 4 alone, one in silence --

ONE_ALIVE = (
    [trajectory(1.0, ONE_TURN), trajectory(0.0, LONG_TURN)],
    group(0.5, 0.5),
    [trajectory(1.0)],
    [trajectory(1.0, UNTRACKED)],
)


@pytest.mark.parametrize(
    ("normalize", "expected"),
    [
        ("token", [1 / 20, 1 / 20]),
        ("rollout", [1 / 5 / 2, 1 / 5 / 6]),
        ("group", [1 / 3 / 8, 1 / 3 / 8]),
        (100, [1 / 5 / 100, 1 / 5 / 100]),
    ],
)
def test_rollouts_that_teach_nothing_count_in_the_divisor(normalize: Any, expected: list[float]) -> None:
    """What the model did not sample counts nowhere."""
    config: dict[str, Any] = {"normalize": normalize}
    scales = token_scales(plan(*ONE_ALIVE, **config))
    assert [scale for rollout in scales.values() for scale in rollout.values()] == pytest.approx(expected)


def test_without_idle_groups_the_trainer_counts_tokens_itself() -> None:
    assert [sample.share for sample in plan(group(1.0, 0.0), group(0.0, 1.0)).samples] == [None] * 4


def test_a_sample_names_its_group() -> None:
    assert [sample.group_id for sample in samples_of(plan(group(1.0, 1.0), group(1.0, 0.0)))] == ["groups[1]"] * 2


def test_a_kl_term_learns_from_groups_without_spread() -> None:
    loss = (DppoConfig(), KlConfig())
    found = plan(group(1.0, 0.0), group(0.5, 0.5), loss=loss)
    assert [max(sample.advantages) for sample in samples_of(found)] == [0.5, 0, 0, 0]
    assert found.findings[:-1] == ["groups[1]: all rewards are equal, only the KL term learns from it"]
    assert found.metrics["data/step_num_groups_trainable"] == 1
    assert found.ledger["ledger/trained_tokens"] == found.ledger["ledger/sampled_tokens"]
    in_reward = (DppoConfig(), KlConfig(where="reward"))
    assert len(plan(group(1.0, 0.0), group(0.5, 0.5), loss=in_reward).samples) == 2
    close = plan(group(1.0, 0.0), group(0.5, 0.5 + 1e-7), loss=loss, scale_rewards="group")
    assert [max(sample.advantages) for sample in samples_of(close)][2:] == [0, 0], "no advantage within the tolerance"
    assert plan(group(0.5, 0.5), loss=loss).samples == [], "a step in which no group has spread trains nothing"


# -- truncated rollouts --

CUT = replace(LONG, finish_reason="length")


def cut_plan(*groups: Any, **config: Any) -> StepPlan:
    exchanges = FIRST, SECOND, BRANCH, CUT
    return plan_step(resolved(*groups, exchanges=exchanges), TrainConfig(mask_truncated=True, **config), step=3)


PARTLY_CUT = ([trajectory(3.0, LONG_TURN), trajectory(0.0, ONE_TURN), trajectory(0.0, ONE_TURN)], group(1.0, 0.0))


def test_truncated_rollouts_stay_in_the_baseline_and_leave_the_loss() -> None:
    found = cut_plan(*PARTLY_CUT)
    assert [sample.rollout_id for sample in found.samples][:2] == [
        "groups[0].trajectories[1]",
        "groups[0].trajectories[2]",
    ]
    assert [max(sample.advantages, key=abs) for sample in samples_of(found)][:2] == [-1.0, -1.0]
    assert found.ledger["ledger/dropped_tokens/truncated"] == 6
    assert found.ledger["ledger/sampled_tokens"] == found.ledger["ledger/trained_tokens"] + 6
    assert found.metrics["data/step_truncated_share"] == 1 / 5
    assert found.findings[:-1] == [
        "groups[0].trajectories[0]: the token limit cut off an answer, and `mask_truncated` leaves such rollouts out"
    ]
    assert len(plan(*PARTLY_CUT).samples) == 5, "without the setting they are trained"


@pytest.mark.parametrize(
    ("normalize", "expected"),
    [
        ("token", [1 / 12] * 4),
        ("rollout", [1 / 5 / 2] * 2 + [1 / 5 / 4] * 2),
        ("group", [1 / 2 / 4] * 2 + [1 / 2 / 8] * 2),
    ],
)
def test_truncated_rollouts_count_as_rollouts_without_tokens(normalize: Any, expected: list[float]) -> None:
    """TRL counts them too: they are rows of its batch whose mask is empty."""
    scales = token_scales(cut_plan(*PARTLY_CUT, normalize=normalize))
    assert [scale for rollout in scales.values() for scale in rollout.values()] == pytest.approx(expected)


def test_a_step_of_truncated_rollouts_says_so() -> None:
    found = cut_plan([trajectory(1.0, LONG_TURN), trajectory(0.0, LONG_TURN)])
    assert found.samples == []
    assert found.findings[0].startswith("the token limit cut off an answer in each of the 2 trajectories")
    assert found.ledger["ledger/dropped_tokens/truncated"] == 12


def test_a_truncated_rollout_is_in_no_pair() -> None:
    found = cut_plan([trajectory(1.0, LONG_TURN), trajectory(0.5, ONE_TURN), trajectory(0.0)], loss=DpoConfig())
    assert found.pairs == [("groups[0].trajectories[1]", "groups[0].trajectories[2]")]
    assert found.ledger["ledger/dropped_tokens/truncated"] == 6
