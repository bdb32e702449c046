"""Credit of the word game's two roles: both conversations of a rollout are trained, by one policy or by two."""

from __future__ import annotations

from typing import Any

import pytest

from art.client.training.submission import wire_groups
from art.config import TrainConfig
from art.credit.plan import plan_step
from art.credit.resolve import resolve
from art.errors import ConfigError
from art.task import draw_scenarios
from art.tasks.codenames.codenames_options import ROLES
from art.tasks.codenames.codenames_task import Codenames
from art.tasks.codenames.two_policies import PairConfig, role_part, split_by_role, train_two
from art.tasks.codenames.wording import read_board, role_of
from art.trajectory import Trajectory, TrajectoryGroup
from tests.support.codenames_models import TalkingModel
from tests.support.recorded_exchanges import Recorded, samples_of

TASK = Codenames(**Codenames.tiny_options)
(BOARD,) = draw_scenarios(TASK, "train", seed=0, count=1)
OWN = [word for word, kind in zip(BOARD.inputs["words"], BOARD.inputs["kinds"], strict=True) if kind == "ours"]
THEME = next(name for name, words in TASK.lexicon.themes.items() if set(OWN) <= set(words))


def talker(name: str, guesses: list[str], clue: str = f"{THEME} 2") -> TalkingModel:
    def say(role: str, messages: list[Any]) -> str:
        if role == "spymaster":
            return clue
        return guesses[read_board(messages[-1]["content"])[1]]

    return TalkingModel(say, name=name)


def other_word() -> str:
    return next(
        word for word, kind in zip(BOARD.inputs["words"], BOARD.inputs["kinds"], strict=True) if kind == "neutral"
    )


async def test_the_gradient_reaches_both_histories_of_a_rollout() -> None:
    models = [talker("m", OWN), talker("m", [OWN[0], other_word()])]
    games = [await TASK.rollout(model, BOARD, rollout_index=i) for i, model in enumerate(models)]  # type: ignore[arg-type]
    assert [game.reward for game in games] == [1.0, 0.25]
    exchanges = [exchange for model in models for exchange in model.exchanges.values()]
    groups = resolve(wire_groups([TrajectoryGroup(games)]), Recorded(*exchanges).find_answers, project="p", name="m")
    plan = plan_step(groups, TrainConfig(), step=4)
    trained = {answer.exchange_id: answer.advantages for sample in plan.samples for answer in sample.answers}
    assert trained.keys() == {exchange.id for exchange in exchanges}
    assert len(trained) == 6
    for index, model in enumerate(models):
        assert set(model.roles()) == {"spymaster", "guesser"}
        sign = 1 if index == 0 else -1
        assert all(sign * advantage > 0 for id in model.exchanges for advantage in trained[id])
    samples = samples_of(plan, *exchanges)
    assert sum(int(sum(sample.loss_mask)) for sample in samples) == sum(len(e.completion_token_ids) for e in exchanges)


async def games(*played: tuple[str, list[str]]) -> TrajectoryGroup:
    """Games of two policies: each with a clue and the guesses."""
    group = []
    for index, (clue, guesses) in enumerate(played):
        policies: Any = {"spymaster": talker("a", [], clue), "guesser": talker("b", guesses)}
        group.append(await TASK.team_rollout(policies, BOARD, index))
    return TrajectoryGroup(group)


async def test_each_role_has_a_group_without_games_that_the_other_spoilt() -> None:
    right, wrong = f"{THEME} 2", "banana 2"
    played = await games((right, OWN), (right, [other_word()]), (wrong, OWN), (right, ["banana"]))
    spymaster, guesser = await split_by_role(played)
    assert [group.metadata for group in (spymaster, guesser)] == [{"role": "spymaster"}, {"role": "guesser"}]
    assert [game.reward for game in spymaster] == [1.0, 0.0, -1.0]
    assert [game.reward for game in guesser] == [1.0, 0.0, -1.0]
    for role, group in zip(ROLES, (spymaster, guesser), strict=True):
        assert {role_of(str(game.messages()[0]["content"])) for game in group} == {role}
        assert all(game.additional_histories == [] for game in group)
        assert {game.metadata["scenario_id"] for game in group} == {BOARD.id}
    only_wrong = await split_by_role(await games((wrong, OWN)))
    assert [group.metadata["role"] for group in only_wrong] == ["spymaster"]
    assert role_part(Trajectory(messages_and_choices=[{"role": "user", "content": "x"}]), "guesser") is None


class Learner(TalkingModel):
    """A policy that keeps the groups that it was trained on."""

    step = 0

    def __init__(self, name: str, guesses: list[str]) -> None:
        super().__init__(talker(name, guesses).say, name=name)
        self.trained: list[list[TrajectoryGroup]] = []

    async def get_step(self) -> int:
        return self.step

    async def train(self, groups: list[TrajectoryGroup], **settings: Any) -> None:
        self.trained.append(groups)
        self.step += 1


async def test_two_policies_are_trained_on_the_same_games_each_on_its_own_role() -> None:
    policies: Any = {"spymaster": Learner("a", []), "guesser": Learner("b", ["nothing"])}
    config = PairConfig(num_steps=2, boards_per_step=3, rollouts_per_board=2)
    steps: list[int] = []
    await train_two(TASK, policies, config, lambda step, groups: steps.append(step))
    # The guesser breaks the rules in each game, unless the spymaster does it before.
    assert steps == [1, 2]
    assert {group.metadata["role"] for groups in policies["guesser"].trained for group in groups} == {"guesser"}
    assert len(policies["guesser"].trained[0]) == 3
    assert policies["spymaster"].trained == []
    boards = {
        game.metadata["scenario_id"] for groups in policies["guesser"].trained for group in groups for game in group
    }
    assert len(boards) == 6


async def test_two_policies_need_a_task_in_which_both_roles_are_trained() -> None:
    with pytest.raises(ConfigError, match="train=both"):
        await train_two(Codenames(train="guesser"), {}, PairConfig())  # type: ignore[arg-type]
