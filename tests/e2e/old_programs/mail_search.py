"""Searching mail with tools, as the ART-E scripts do: a trajectory class of one's own, limits, RULER after each group."""

import asyncio
import json

import art
from art.local import LocalBackend
from art.rewards import ruler_score_group
from art.utils import iterate_dataset, limit_concurrency, strip_logprobs

BASE_MODEL = "Qwen/Qwen2.5-14B-Instruct"
JUDGE = "openai/o4-mini"
JUDGE_PARAMS = None
STEPS = 2
ROLLOUTS = 4
MAX_TURNS = 3
MAILS = {"m1": "lunch is at noon", "m2": "the budget is ten"}
SCENARIOS = [
    {"id": "s1", "question": "When is lunch?", "answer": "noon"},
    {"id": "s2", "question": "What is the budget?", "answer": "ten"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": name,
            "parameters": {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]},
        },
    }
    for name, argument in (("search", "word"), ("final_answer", "answer"))
]


class ProjectTrajectory(art.Trajectory):
    final_answer: str | None = None


@limit_concurrency(10, derive_key=lambda model, scenario: model.name)
async def rollout(model: art.Model, scenario: dict) -> ProjectTrajectory:
    trajectory = ProjectTrajectory(
        messages_and_choices=[{"role": "user", "content": scenario["question"]}], reward=0.0, tools=TOOLS,
        metadata={"scenario_id": scenario["id"]},
    )  # fmt: skip
    for _ in range(MAX_TURNS):
        response = await model.openai_client().chat.completions.create(
            model=model.name, temperature=1, messages=trajectory.messages(), tools=TOOLS, max_completion_tokens=64
        )
        choice = response.choices[0]
        trajectory.messages_and_choices.append(choice)
        try:
            call = choice.message.tool_calls[0]
            name, arguments = call.function.name, json.loads(call.function.arguments)
        except (TypeError, ValueError):
            return trajectory
        if name == "final_answer":
            trajectory.final_answer = arguments.get("answer")
            break
        found = [mail for mail in MAILS.values() if arguments.get("word", "?") in mail]
        trajectory.messages_and_choices.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(found)})
    trajectory.metrics["correct"] = trajectory.final_answer == scenario["answer"]
    return trajectory


async def score(group: art.TrajectoryGroup) -> art.TrajectoryGroup | None:
    return await ruler_score_group(group, JUDGE, extra_litellm_params=JUDGE_PARAMS, swallow_exceptions=True, debug=True)


async def main():
    backend = LocalBackend()
    model = art.TrainableModel(name="email-agent-008", project="email_search", base_model=BASE_MODEL)
    await model.register(backend)
    for batch in iterate_dataset(
        SCENARIOS * STEPS, groups_per_step=2, num_epochs=1, initial_step=await model.get_step()
    ):
        groups = await art.gather_trajectory_groups(
            (art.TrajectoryGroup(rollout(model, s) for _ in range(ROLLOUTS)) for s in batch.items),
            pbar_desc="gather",
            max_exceptions=ROLLOUTS * 2,
            after_each=score,
        )
        assert all(isinstance(t, ProjectTrajectory) for group in groups for t in group)
        await model.log(strip_logprobs(groups), split="rollouts")
        result = await backend.train(model, groups, learning_rate=1.2e-5)
        await model.log(groups, split="train", metrics=result.metrics, step=result.step)


if __name__ == "__main__":
    asyncio.run(main())
