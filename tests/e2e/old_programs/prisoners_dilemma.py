"""Prisoner's dilemma: self-play, and games against the base model, which the same server answers for by its own name."""

import asyncio
import re

import art
from art.local import LocalBackend

BASE_MODEL = "Qwen/Qwen2.5-7B-Instruct"
ROUNDS = 10
GAMES = 8
STEPS = 1000
RULES = "You play the prisoner's dilemma. Say cooperate or defect."
PAYOFFS = {
    ("cooperate", "cooperate"): (3, 3),
    ("cooperate", "defect"): (0, 5),
    ("defect", "cooperate"): (5, 0),
    ("defect", "defect"): (1, 1),
}


async def play(client, names: list[str]) -> list[art.Trajectory]:
    players = [art.Trajectory(messages_and_choices=[{"role": "user", "content": RULES}], reward=0) for _ in names]
    for _ in range(ROUNDS):
        completions = await asyncio.gather(
            *[
                client.chat.completions.create(model=name, messages=player.messages(), max_tokens=32)
                for name, player in zip(names, players, strict=True)
            ]
        )
        texts = [completion.choices[0].message.content or "" for completion in completions]
        actions = [(re.findall("cooperate|defect", text) or [None])[-1] for text in texts]
        points = PAYOFFS.get(tuple(actions), tuple(0 if action is None else 3 for action in actions))
        for i, player in enumerate(players):
            player.messages_and_choices.append(completions[i].choices[0])
            player.messages_and_choices.append({"role": "user", "content": f"The other says: {texts[1 - i]}"})
            player.reward += points[i]
            player.metrics["cooperated"] = player.metrics.get("cooperated", 0) + (actions[i] == "cooperate")
    return players


async def main():
    model = art.TrainableModel(name="001", project="prisoners-dilemma", base_model=BASE_MODEL)
    backend = LocalBackend()
    await model.register(backend)
    client = model.openai_client()
    for step in range(await model.get_step(), STEPS):
        me = model.name
        self_play, versus = await asyncio.gather(
            art.gather_trajectories((play(client, [me, me]) for _ in range(GAMES)), pbar_desc="self-play"),
            art.gather_trajectories((play(client, [me, BASE_MODEL]) for _ in range(GAMES)), pbar_desc="versus base"),
        )
        group = art.TrajectoryGroup([player for game in self_play for player in game])
        against = art.TrajectoryGroup([game[0] for game in versus])
        await model.log([group], split="versus-self")
        await model.log([against], split="versus-base")
        await model.log([art.TrajectoryGroup([game[1] for game in versus])], split="base-model")
        await model.train([group, against], config=art.TrainConfig(learning_rate=5e-5))


if __name__ == "__main__":
    asyncio.run(main())
