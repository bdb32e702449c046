"""Credit of the word game's two roles: both conversations of a rollout are trained."""

from __future__ import annotations

from typing import Any

from art.client.submission import wire_groups
from art.config import TrainConfig
from art.credit.plan import plan_step
from art.credit.resolve import resolve
from art.task import draw_scenarios
from art.trajectory import TrajectoryGroup
from art_tasks.codenames.codenames_task import Codenames
from art_tasks.codenames.match import read_board
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
