"""A program of a user on another machine: trains by a loop and by `art.pipeline`, with a tracker and tools over MCP."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import art
from art.config import PipelineConfig
from art.sinks import Row, Run, Sink
from art.task import get_task
from art_recipes.mcp import MCPClient

SERVER = """
import sys
from mcp.server.mcpserver import MCPServer
print("tools are ready", file=sys.stderr, flush=True)
server = MCPServer("clock")
@server.tool()
def now() -> str:
    "The time."
    return "noon ☀"
server.run()
"""


class Printer(Sink):
    """A tracker that prints the names of the rows that it gets."""

    name = "printer"

    def start(self, run: Run) -> None:
        print(f"tracker started for {run.name}")

    def metrics(self, row: Row) -> None:
        print(f"tracker got step {row.step}")


async def main(base_model: str, steps: int) -> None:
    task = get_task("yes_no_maybe")
    async with art.RemoteBackend() as backend:
        model: art.TrainableModel[Any, Any] = art.TrainableModel(
            name="agent", project="windows", base_model=base_model, report_metrics=[Printer]
        )
        await model.register(backend)
        for step in range(steps):
            groups = await art.gather_trajectory_groups(
                art.TrajectoryGroup(task.rollout(model, scenario, rollout_index=i) for i in range(6))
                for scenario in task.scenarios("train", seed=step, count=3)
            )
            result = await backend.train(model, groups, learning_rate=3e-3)
            await model.log(groups, split="train", metrics=result.metrics, step=result.step)
        pipeline = art.pipeline(
            model, PipelineConfig(groups_per_step=2, rollouts_per_group=4, max_staleness=1),
            scenarios=task.scenarios("train", seed=9, count=8), rollout=task.rollout,
        )  # fmt: skip
        async for trained in pipeline.train(steps + 2, learning_rate=3e-3):
            print(f"pipeline trained step {trained.number}")
        model.merge_state({"where": "Zürich"})
        print(f"state {model.read_state()}, step {await model.get_step()}")
    async with MCPClient([sys.executable, "-c", SERVER]) as tools:
        print("tool said", ascii(await tools.call_tool("now", {})))
        print("log said", tools._read_log())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
