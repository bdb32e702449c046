"""Rock, paper, scissors with a tool: the model against its base model; one group of many rollouts."""

import asyncio
import json

import art
from art.local import LocalBackend

BASE_MODEL = "Qwen/Qwen2.5-7B-Instruct"
ROLLOUTS = 64
ROUNDS = 3
STEPS = 100
BEATS = {"rock": "scissors", "paper": "rock", "scissors": "paper"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "play_move",
            "description": "play",
            "parameters": {
                "type": "object",
                "properties": {"move": {"type": "string", "enum": list(BEATS)}},
                "required": ["move"],
            },
        },
    }
]


async def ask(client, name, messages):
    completion = await client.chat.completions.create(model=name, messages=messages, tools=TOOLS, max_tokens=64)
    choice = completion.choices[0]
    try:
        call = choice.message.tool_calls[0]
        return choice, call, json.loads(call.function.arguments)["move"]
    except (TypeError, KeyError, ValueError):
        return choice, None, "nothing"


async def rollout(model: art.TrainableModel) -> art.Trajectory:
    client = model.openai_client()
    start = {"role": "user", "content": "Play rock, paper, scissors."}
    trajectory = art.Trajectory(messages_and_choices=[start], tools=TOOLS, reward=0)
    theirs = [start]
    for _ in range(ROUNDS):
        (choice, call, mine), (other, other_call, move) = await asyncio.gather(
            ask(client, model.name, trajectory.messages()), ask(client, model.base_model, theirs)
        )
        trajectory.messages_and_choices.append(choice)
        trajectory.metrics[mine] = trajectory.metrics.get(mine, 0) + 1
        if call is None:
            break
        trajectory.reward += float(BEATS.get(mine) == move)
        trajectory.messages_and_choices.append({"role": "tool", "tool_call_id": call.id, "content": f"they: {move}"})
        theirs.append(
            {
                "role": "assistant",
                "content": other.message.content or "",
                "tool_calls": [c.model_dump() for c in other.message.tool_calls or []],
            }
            if other_call
            else {"role": "assistant", "content": "?"}
        )
        theirs.append(
            {"role": "tool", "tool_call_id": other_call.id, "content": f"they: {mine}"}
            if other_call
            else {"role": "user", "content": "Play."}
        )
    return trajectory


async def main():
    model = art.TrainableModel(name="003", project="rock-paper-scissors", base_model=BASE_MODEL)
    backend = LocalBackend()
    await model.register(backend)
    for _ in range(await model.get_step(), STEPS):
        groups = await art.gather_trajectory_groups(
            [art.TrajectoryGroup(rollout(model) for _ in range(ROLLOUTS))], pbar_desc="train", max_exceptions=64
        )
        await model.delete_checkpoints()
        await model.train(groups, config=art.TrainConfig(learning_rate=5e-5))


if __name__ == "__main__":
    asyncio.run(main())
