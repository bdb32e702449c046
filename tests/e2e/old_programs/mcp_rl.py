"""MCP-RL: scenarios written from a server's tools, rollouts with them, RULER."""

import asyncio
import json

import art
from art.local import LocalBackend
from art.mcp import MCPResource, MCPTool, complete_task_tool, generate_scenarios
from art.rewards import ruler_score_group
from art.utils import iterate_dataset

BASE_MODEL = "Qwen/Qwen2.5-3B-Instruct"
JUDGE = "openrouter/openai/o4-mini"
JUDGE_PARAMS = None
GENERATOR = {
    "generator_model": "openai/gpt-4.1-mini",
    "generator_base_url": "https://openrouter.ai/api/v1",
    "generator_api_key": "x",
}
MAX_SEQ_LENGTH = 8192
NUM_TRAIN = 16
NUM_VAL = 8
ROLLOUTS = 4
MAX_TURNS = 10
TOOLS = [
    MCPTool("weather", "weather", {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]})
]
RESOURCES = [MCPResource(uri="cities://all", name="cities", description="a list of cities")]


async def call_tool(name: str, arguments: dict) -> str:
    return f"sunny in {arguments.get('city', 'no city')}"


async def rollout(model: art.Model, scenario) -> art.Trajectory:
    tools = [tool.to_tool_schema() for tool in TOOLS] + [complete_task_tool]
    trajectory = art.Trajectory(
        messages_and_choices=[{"role": "user", "content": f"Task: {scenario.task}"}], tools=tools, reward=0,
        metadata={"task": scenario.task}, metrics={"task_completed": False}, scenario=scenario.to_dict(),
    )  # fmt: skip
    for turn in range(MAX_TURNS):
        completion = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(), messages=trajectory.messages(), tools=tools, max_completion_tokens=64
        )
        choice = completion.choices[0]
        trajectory.messages_and_choices.append(choice)
        trajectory.metrics["num_turns"] = turn + 1
        if not choice.message.tool_calls:
            break
        for call in choice.message.tool_calls:
            try:
                arguments = json.loads(call.function.arguments)
            except ValueError as error:
                trajectory.log(f"bad arguments: {error}")
                return trajectory.finish()
            if call.function.name == "complete_task":
                trajectory.metrics["task_completed"] = True
                return trajectory.finish()
            result = await call_tool(call.function.name, arguments)
            trajectory.messages_and_choices.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return trajectory.finish()


async def main():
    collection = await generate_scenarios(
        tools=TOOLS, resources=RESOURCES, num_scenarios=NUM_TRAIN + NUM_VAL, show_preview=False, **GENERATOR
    )
    train, val = collection.split(NUM_TRAIN)
    model = art.TrainableModel(name="mcp-agent", project="mcp-agentic", base_model=BASE_MODEL)
    model._internal_config = art.dev.InternalModelConfig(init_args=art.dev.InitArgs(max_seq_length=MAX_SEQ_LENGTH))
    backend = LocalBackend(in_process=True, path="./.art")
    await model.register(backend)
    for batch in iterate_dataset(list(train), groups_per_step=2, num_epochs=1, initial_step=await model.get_step()):
        groups = await art.gather_trajectory_groups(
            (art.TrajectoryGroup(rollout(model, s) for _ in range(ROLLOUTS)) for s in batch.items), pbar_desc="train"
        )
        scored = [await ruler_score_group(group, JUDGE, JUDGE_PARAMS, swallow_exceptions=True) for group in groups]
        result = await backend.train(model, [group for group in scored if group], learning_rate=1e-5)
        await model.log(scored, split="train", metrics=result.metrics, step=result.step)
    for scenario in val:
        group = art.TrajectoryGroup([await rollout(model, scenario) for _ in range(2)])
        await model.log([await ruler_score_group(group, JUDGE, JUDGE_PARAMS)], split="val")


if __name__ == "__main__":
    asyncio.run(main())
