"""The user's script of `agent_storm`: a pipeline whose rollouts are agents in containers, on a server elsewhere.

    ART_SERVER_URL=... ART_API_KEY=... python -m benchmarks.agent_storm_client --folder DIR --model DIR --steps 10

DIR/record.jsonl gets a line {"ended": [scenario, index], "seconds": s} for each rollout that came to its end, and
{"error": ...} for what a user would see, after which the script begins again.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from pathlib import Path

import art
from art.errors import ArtError
from art.task import Scenario
from art_tasks.harbor import HarborTask
from benchmarks.storm_client import NAME, Record

ROLLOUTS, GROUPS, AT_ONCE = 4, 5, 8
SPARE_GROUPS = 50
AGENT = """python3 - <<'END'
import http.client, json, os, time, urllib.error, urllib.request
def ask(messages):
    body = json.dumps({"model": os.environ["ART_MODEL"], "messages": messages, "max_completion_tokens": 8}).encode()
    url, headers = os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"Content-Type": "application/json"}
    for attempt in range(200):  # agents ask again too
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as answer:
                return json.load(answer)["choices"][0]["message"]["content"]
        except urllib.error.HTTPError as error:
            if error.code < 500:
                raise
        except (OSError, http.client.HTTPException):
            pass
        time.sleep(0.5)
messages = [{"role": "user", "content": open(os.environ["ART_INSTRUCTION"]).read()}]
messages += [{"role": "assistant", "content": ask(messages)}, {"role": "user", "content": "Are you sure?"}]
open("/app/answer.txt", "w").write(ask(messages))
END"""
"""A small agent that asks twice and writes what it was told."""

TASK = {
    "environment/Dockerfile": "FROM {image}\nRUN command -v python3 || (apt-get update && apt-get install -y python3)\n"
    "VOLUME /data\nWORKDIR /app\n",
    "tests/test.sh": "#!/bin/bash\n[ -s /app/answer.txt ]; echo $((1 - $?)) > /logs/verifier/reward.txt\n",
    "instruction.md": "respond with yes or no",
    "task.toml": "[agent]\ntimeout_sec = 300.0\n",
}


def write_task(folder: Path, image: str) -> None:
    """Write a task directory whose check asks for an answer, whatever it is."""
    for file, text in TASK.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text.replace("{image}", image))


class Agent:
    """Rollouts of one task directory, in the order of their scenarios."""

    def __init__(self, folder: Path) -> None:
        self.task = HarborTask(folder / "task", agent=f"command:{AGENT}", max_containers=AT_ONCE)
        self._record = Record(folder / "record.jsonl")

    def scenarios(self, num_groups: int) -> list[Scenario]:
        return [self.task.scenario("train", 0, index, {"task": "task"}) for index in range(num_groups)]

    async def rollout(
        self, model: art.TrainableModel, scenario: Scenario, rollout_index: int, seed: int
    ) -> art.Trajectory:
        began = time.monotonic()
        trajectory = await self.task.rollout(model, scenario, rollout_index=rollout_index)
        trajectory.metadata["index"] = rollout_index
        trajectory.reward = random.Random(seed).random()  # there is always something to learn, and never an end of it
        self._record.write(ended=[scenario.id, rollout_index], seconds=time.monotonic() - began)
        return trajectory


async def run(folder: Path, base_model: str, steps: int) -> None:
    agent, record = Agent(folder), Record(folder / "record.jsonl")
    while True:
        try:
            async with art.RemoteBackend() as backend:
                model = art.TrainableModel(
                    name=NAME, project=folder.name, base_model=base_model, base_path=str(folder / "log")
                )
                await model.register(backend)
                pipeline = art.pipeline(
                    model, scenarios=agent.scenarios(steps * GROUPS + SPARE_GROUPS), rollout=agent.rollout,
                    rollouts_per_group=ROLLOUTS, groups_per_step=GROUPS, max_concurrent=AT_ONCE, shuffle=False,
                )  # fmt: skip
                async for _ in pipeline.train(steps=steps, learning_rate=1e-4):
                    pass
            return
        except ArtError as error:  # what a user would see; again, as if the script were started again
            record.error(error, "the run")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    asyncio.run(run(args.folder, args.model, args.steps))


if __name__ == "__main__":
    main()
