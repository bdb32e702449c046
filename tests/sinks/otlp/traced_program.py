"""A run that logs rollouts with tools, as a program that can be killed: python traced_program.py FOLDER FIRST LAST END.

END is `close`, or `kill`: kill -9 as soon as the sink has sent what was logged.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import art
from art.trajectory import TrajectoryGroup
from tests.support.logged_rollouts import failure, tool_rollout


async def main(folder: str, first: int, last: int, end: str) -> None:
    model = art.Model(
        name="agent", project="games", base_path=folder, report_metrics=["otlp"],
        inference_base_url="http://localhost/v1", inference_api_key="none",
    )  # fmt: skip
    for step in range(first, last):
        group = TrajectoryGroup([tool_rollout(), tool_rollout()], exceptions=[failure()] if step == 0 else [])
        await model.log([group], split="train", step=step)
    if end == "close":
        await model.close()
        return
    cursor = Path(folder) / "games" / "models" / "agent" / "sinks" / "otlp.jsonl"
    while not cursor.exists() or f'"file": "trajectories/train/{last - 1:04d}.jsonl"' not in cursor.read_text():
        await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    where, begin, until, how = sys.argv[1:]
    asyncio.run(main(where, int(begin), int(until), how))
