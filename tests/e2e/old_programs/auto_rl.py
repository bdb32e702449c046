"""AutoRL: a model writes the inputs, RULER scores three answers to each."""

import asyncio
import json

from openai import AsyncOpenAI

import art
from art.local import LocalBackend
from art.rewards import ruler_score_group
from art.utils import iterate_dataset

BASE_MODEL = "Qwen/Qwen2.5-7B-Instruct"
WRITER = {"base_url": "https://openrouter.ai/api/v1", "api_key": "x"}
JUDGE = "openrouter/deepseek/deepseek-r1-0528"
JUDGE_PARAMS = None
NUM_INPUTS = 25
TASK = "Rewrite a sentence without mistakes."


async def write_inputs(count: int) -> list[str]:
    client = AsyncOpenAI(**WRITER)
    answer = await client.chat.completions.create(
        model="moonshotai/kimi-k2",
        messages=[
            {"role": "system", "content": 'Answer with JSON: {"scenarios": [{"input": "..."}]}'},
            {"role": "user", "content": f"Write exactly {count} inputs for this task: {TASK}"},
        ],
        response_format={"type": "json_object"},
    )
    return [row["input"] for row in json.loads(answer.choices[0].message.content)["scenarios"]]


async def rollout(model: art.TrainableModel, text: str) -> art.Trajectory:
    trajectory = art.Trajectory(
        messages_and_choices=[{"role": "system", "content": TASK}, {"role": "user", "content": text}], reward=0.0
    )
    completion = await model.openai_client().chat.completions.create(
        model=model.name, messages=trajectory.messages(), max_tokens=32
    )
    trajectory.messages_and_choices.append(completion.choices[0])
    return trajectory


async def main():
    inputs = await write_inputs(NUM_INPUTS)
    model = art.TrainableModel(name="auto-rl", project="custom-task", base_model=BASE_MODEL)
    model._internal_config = art.dev.InternalModelConfig(
        init_args=art.dev.InitArgs(gpu_memory_utilization=0.8), engine_args=art.dev.EngineArgs(enforce_eager=True)
    )
    with LocalBackend(in_process=True) as backend:
        await model.register(backend)
        for batch in iterate_dataset(inputs, groups_per_step=2, num_epochs=1, initial_step=await model.get_step()):
            groups = await art.gather_trajectory_groups(
                art.TrajectoryGroup(rollout(model, text) for _ in range(3)) for text in batch.items
            )
            judged = await asyncio.gather(
                *(ruler_score_group(group, JUDGE, extra_litellm_params=JUDGE_PARAMS) for group in groups)
            )
            await model.delete_checkpoints()
            await model.train(judged, config=art.TrainConfig(learning_rate=1e-5))
        client = model.openai_client()
        for text in inputs[:2]:
            answer = await client.chat.completions.create(
                model=model.get_inference_name(), messages=[{"role": "user", "content": text}], max_tokens=32
            )
            print(text, "->", answer.choices[0].message.content)


if __name__ == "__main__":
    asyncio.run(main())
