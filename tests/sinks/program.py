"""A run that logs, as a program of its own, so that it can be killed: python program.py FOLDER TRACKER FIRST LAST END.

END is `close`, `exit` (ends without closing) or `kill` (kill -9 once the sink has sent everything).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

import art
from art.metrics.catalogue import describe


def make_group(rewards: list[float], text: str) -> art.TrajectoryGroup:
    messages: Any = [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
    return art.TrajectoryGroup(
        [
            art.Trajectory(messages_and_choices=messages, reward=reward, metrics={"win": reward > 0})
            for reward in rewards
        ]
    )


async def main(folder: str, tracker: str, first: int, last: int, end: str) -> None:
    model = art.Model(
        name="agent", project="games", base_path=folder, report_metrics=[tracker],
        config={"turns": 3, "search_api_key": "hidden-key"},
    )  # fmt: skip
    builder = model.metrics_builder("train")
    for step in range(first, last):
        builder.add_cost("train/search", 0.01)
        builder.add_user_timing(step_actor_s=2.0)
        metrics = {"loss/train": 1 / (step + 1), "throughput/train_tokens_per_s": 100.0, "odd name: <b>é</b>": 1.0}
        metrics |= describe("data/reward", [0.0, 1.0, 0.5, 0.0, 1.0])
        groups = [make_group([0.0, 1.0, 0.5], f"answer {step}"), make_group([0.0, 1.0], "other")]
        await model.log(groups, split="train", metrics=metrics, step=step)
        await model.log([make_group([step / 10], "held out")], split="val", step=step)
    if end == "close":
        await model.close()
    elif end == "kill":
        reporting = model._sinks._by_folder[model._paths().root]
        assert reporting is not None
        while any(worker.num_waiting() for worker in reporting._workers):
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]))
