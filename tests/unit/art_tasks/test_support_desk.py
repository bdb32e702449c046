"""The task `support_desk`: its reward, its messages by split, and the play of the warm start."""

from __future__ import annotations

import random

import pytest

from art.errors import ConfigError
from art.testing.scripted_model import ScriptedModel
from art.trajectory import Trajectory
from art_tasks.support_desk import DESKS, SupportDesk, matters_of


async def answered(answer: str) -> Trajectory:
    """A rollout that gives this answer to a message for billing."""
    task = SupportDesk()
    scenario = next(s for s in task.scenarios("val", seed=0, count=50) if s.inputs["desk"] == 0)
    task.player = lambda scenario, *, rollout_index=0: lambda messages, tools: {"content": answer}  # type: ignore[method-assign]
    return await ScriptedModel(task).play(scenario)


@pytest.mark.parametrize(
    ("answer", "reward", "right"),
    [
        ("billing", 1.0, 1),
        (" Billing\n", 1.0, 1),
        ("It is for billing.", 0.6, 1),
        ("shipping", 0.0, 0),
        ("billing or shipping", -0.5, 0),
        ("rebilling", -0.5, 0),
        ("sorry", -0.5, 0),
        ("", -0.5, 0),
        ("account", -0.5, 0),
    ],
)
async def test_reward(answer: str, reward: float, right: int) -> None:
    got = await answered(answer)
    assert (got.reward, got.metrics["right"]) == (reward, right)
    assert sum(v for name, v in got.metrics.items() if name.startswith("reward/")) == pytest.approx(reward)
    assert got.metadata["outcome"] == ("policy_fault" if reward < 0 else "ok")
    assert "billing is right" in str(got.metadata["why"]) or right


async def test_scores_by_the_messages_alone_have_the_order_of_the_rewards() -> None:
    answers = ("billing", "shipping", "billing or shipping")
    scores = [SupportDesk().score_messages((await answered(answer)).messages()) for answer in answers]  # type: ignore[arg-type]
    assert scores == [0.9, 0.3, 0.1]


async def test_the_player_is_right() -> None:
    task = SupportDesk()
    for scenario in task.scenarios("test", seed=1, count=8):
        assert (await ScriptedModel(task).play(scenario)).reward == 1.0


def test_no_matter_is_in_two_splits() -> None:
    task = SupportDesk()
    drawn = {
        split: {s.inputs["message"] for s in task.scenarios(split, seed=0, count=count)}
        for split, count in (("train", 2000), ("val", 400), ("test", 400))
    }
    assert not drawn["train"] & drawn["test"]
    assert not drawn["train"] & drawn["val"]
    trained = [matter.lower() for desk in DESKS for matter in matters_of(desk, "train")]
    held_out = {message for message in drawn["test"] | drawn["val"]}
    assert not [m for m in held_out if any(matter in m.lower() for matter in trained)], "no trained matter is held out"
    assert all(matters_of(desk, split) for desk in DESKS for split in ("train", "val", "test"))
    assert task.scenarios("test", seed=3, count=5) == task.scenarios("test", seed=3, count=5)


def desk_of(message: str) -> int:
    """The only desk whose matter a message of the training split contains."""
    text = message.lower()
    (desk,) = {i for i, name in enumerate(DESKS) if any(m.lower() in text for m in matters_of(name, "train"))}
    return desk


def test_an_aside_does_not_decide_the_desk() -> None:
    scenarios = SupportDesk().scenarios("train", seed=0, count=600)
    with_aside = [s for s in scenarios if "was fine, but" in s.inputs["message"]]
    assert 200 < len(with_aside) < 400
    assert all(desk_of(s.inputs["message"]) == s.inputs["desk"] for s in scenarios)


def test_play_names_a_desk_and_depends_on_skill() -> None:
    task, rng = SupportDesk(), random.Random(0)
    for skill, low, high in ((0.0, 0.2, 0.5), (1.0, 1.0, 1.0)):
        played = [task.play(rng, skill).messages for _ in range(150)]
        right = [m[-1]["content"] == DESKS[desk_of(str(m[1]["content"]))] for m in played]
        assert all(messages[-1]["content"] in DESKS for messages in played)
        assert low <= sum(right) / 150 <= high


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="takes no options, got 'desks'"):
        SupportDesk(desks=9)
