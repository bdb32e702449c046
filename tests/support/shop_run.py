"""A real training run of the tiny model that has something of everything that the page shows.

Rollouts with tool calls, reasoning, sub-agents, faults and judges; held-out rollouts before and after; texts that would
do harm if a page took them for more than text.
"""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import art
from art.rewards import Judgement, Verdict, score_group

PROJECT, NAME = "shop", "clerk"
NUM_STEPS, NUM_GROUPS, ROLLOUTS_PER_GROUP, NUM_HELD_OUT = 3, 3, 4, 6
MARK = "pwned"
"""What a script of the hostile texts would set on the page's window."""
HOSTILE = f"<script>window.{MARK}=1</script><img src=x onerror='window.{MARK}=1'>"
TURNED = "price \u202eeerf si siht\u202c \x1b[31mred\x1b[0m \x00 end"
"""Text with a right-to-left override, a colour code of terminals and a null character."""
HOSTILE_METRIC = f"odd/{HOSTILE}"
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
"""The tiny model seldom ends a thought, so most rollouts have none."""
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": f"Look up the price of an article. {HOSTILE}",
            "parameters": {
                "type": "object",
                "properties": {"article": {"enum": ["tea", "salt", "rice"]}},
                "required": ["article"],
                "additionalProperties": False,
            },
        },
    }
]


class Clerk:
    """A judge that likes short answers, and explains itself in hostile words."""

    name = "clerk"

    async def judge(self, group: art.TrajectoryGroup) -> Judgement:
        sizes = [len(str(trajectory.messages()[-1].get("content"))) for trajectory in group]
        longest = max(sizes) or 1
        verdicts = [
            Verdict(score=1 - size / longest, explanation=f"{size} characters. {HOSTILE}", parts={"short": 1.0})
            for size in sizes
        ]
        return Judgement(verdicts=verdicts, metrics={"judge_disagreement": 0.125})


async def serve_customer(model: art.TrainableModel, scenario: str, seed: int) -> art.Trajectory:
    """A rollout of two turns: a tool call, then an answer. Some have a sub-agent, some end in a fault."""
    client, rng = model.openai_client(), random.Random(seed)
    if rng.random() < 0.1:
        raise ConnectionError(f"the till does not answer {HOSTILE}")
    trajectory = art.Trajectory(
        messages_and_choices=[
            {"role": "system", "content": "You sell tea, salt and rice."},
            {"role": "user", "content": f"What is {scenario}? {TURNED}"},
        ],
        tools=TOOLS,
        metadata={"scenario_id": f"{scenario} {HOSTILE}"},
    )
    asked = await client.chat.completions.create(
        model=model.get_inference_name(), messages=trajectory.messages(), tools=TOOLS, tool_choice="required",
        max_completion_tokens=64, seed=seed, logprobs=True, extra_body=NO_THINKING if seed % 4 else None,
    )  # fmt: skip
    trajectory.messages_and_choices.append(asked.choices[0])
    calls = asked.choices[0].message.tool_calls or []
    trajectory.metrics["calls"] = len(calls)
    for call in calls:
        result = json.dumps({"price": len(scenario), "note": HOSTILE})
        trajectory.messages_and_choices.append({"role": "tool", "tool_call_id": call.id, "content": result})
    if calls:
        said = await client.chat.completions.create(
            model=model.get_inference_name(), messages=trajectory.messages(), tools=TOOLS, tool_choice="none",
            max_completion_tokens=8 + seed % 9, seed=seed + 1, logprobs=True,
        )  # fmt: skip
        trajectory.messages_and_choices.append(said.choices[0])
    if seed % 3 == 0:
        question = [{"role": "user", "content": f"Is {scenario} cheap?"}]
        aside = await client.chat.completions.create(
            model=model.get_inference_name(), messages=question, max_completion_tokens=6, seed=seed, logprobs=True
        )
        trajectory.additional_histories.append(art.History(messages_and_choices=[*question, aside.choices[0]]))
    trajectory.reward = rng.random()
    trajectory.metrics[HOSTILE_METRIC] = float(seed % 5)
    trajectory.logs.append(f"served {HOSTILE}")
    return trajectory


async def gather(model: art.TrainableModel, step: int) -> list[art.TrajectoryGroup]:
    groups = await art.gather_trajectory_groups(
        (
            art.TrajectoryGroup(
                serve_customer(model, f"the price of article {number}", 1000 * step + 10 * number + place)
                for place in range(ROLLOUTS_PER_GROUP)
            )
            for number in range(NUM_GROUPS)
        ),
        pbar_desc=None,
        max_exceptions=NUM_GROUPS * ROLLOUTS_PER_GROUP,
    )
    judged = [await score_group(group, Clerk()) for group in groups[1:]]
    if step == 0:
        for trajectory in groups[0]:
            trajectory.reward = 1.0  # a group without spread, which teaches nothing
    return [groups[0], *judged]


async def hold_out(model: art.TrainableModel) -> None:
    step = await model.get_step()
    trajectories = await asyncio.gather(
        *(
            serve_customer(model, f"a held-out article {number}", 77_000 + 1000 * step + 31 * number + place)
            for number in range(NUM_HELD_OUT)
            for place in range(2)
        ),
        return_exceptions=True,
    )
    await model.log([one for one in trajectories if isinstance(one, art.Trajectory)], split="val")


async def train(model: art.TrainableModel) -> None:
    """Train a registered model for a few steps, with held-out rollouts before and after."""
    await hold_out(model)
    for step in range(await model.get_step(), NUM_STEPS):
        groups = await gather(model, step)
        await model.train(groups, learning_rate=1e-3)
    await hold_out(model)
