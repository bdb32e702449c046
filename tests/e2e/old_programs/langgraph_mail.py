"""A LangGraph agent: `wrap_rollout` around the rollout, `init_chat_model` inside, RULER after each group."""

import asyncio

from langchain_core.tools import tool
from langgraph.prebuilt import create_react_agent

import art
from art.langgraph import init_chat_model, wrap_rollout
from art.local import LocalBackend
from art.rewards import ruler_score_group

BASE_MODEL = "Qwen/Qwen2.5-7B-Instruct"
JUDGE = "openai/o4-mini"
JUDGE_PARAMS = None
STEPS = 2
ROLLOUTS = 4
QUESTIONS = ["When is lunch?", "What is the budget?"]


@tool
def search(word: str) -> str:
    """search"""
    return "lunch is at noon"


async def rollout(model: art.Model, question: str) -> art.Trajectory:
    graph = create_react_agent(init_chat_model(model.name, temperature=1.0, max_tokens=48), [search])
    try:
        await graph.ainvoke({"messages": [("user", question)]}, config={"recursion_limit": 6})
        gave_up = False
    except RecursionError:
        gave_up = True
    return art.Trajectory(
        messages_and_choices=[], reward=0.0, metrics={"gave_up": gave_up}, metadata={"question": question}
    )


async def main():
    model = art.TrainableModel(name="langgraph-agent", project="email-langgraph", base_model=BASE_MODEL)
    backend = LocalBackend(in_process=True)
    await model.register(backend)
    for _ in range(await model.get_step(), STEPS):
        groups = await art.gather_trajectory_groups(
            (
                art.TrajectoryGroup(wrap_rollout(model, rollout)(model, question) for _ in range(ROLLOUTS))
                for question in QUESTIONS
            ),
            pbar_desc="gather",
            max_exceptions=8,
            after_each=lambda group: ruler_score_group(group, JUDGE, JUDGE_PARAMS, swallow_exceptions=True),
        )
        await model.train(groups, config=art.TrainConfig(learning_rate=1.2e-5))


if __name__ == "__main__":
    asyncio.run(main())
