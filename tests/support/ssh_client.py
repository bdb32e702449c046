"""A program on a laptop: it trains tic-tac-toe on another machine. It is run with the core package of ART only.

    python ssh_client.py SETTINGS.json

The file has `ssh_config`, `alias`, `source` (a wheel or folder), `model` (path on the other machine), `name`, `steps`,
`log_dir` and `record`, a file of JSON lines that this program adds to. A second call goes on.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

import art
from art_cloud.ssh import Ssh
from art_cloud.ssh_backend import Install
from art_recipes.training.training_loop import StepReport, evaluate, train_task

NUM_GAMES = 200


async def main(settings: dict[str, Any]) -> None:
    assert importlib.util.find_spec("torch") is None, "this environment has more than the core package"
    record = Path(settings["record"])
    started = time.monotonic()

    def write(**row: Any) -> None:
        with record.open("a") as file:
            file.write(json.dumps({"at_s": time.monotonic() - started, **row}) + "\n")

    ssh = Ssh(settings["alias"], config=settings["ssh_config"])
    async with art.SshBackend(ssh, install=Install(source=settings["source"])) as backend:
        await backend.open()
        assert backend.tunnel is not None
        write(opened=backend.tunnel.url)
        model = art.TrainableModel(
            name=settings["name"], project="storm", base_model=settings["model"], base_path=settings["log_dir"]
        )
        await model.register(backend)
        task = art.get_task("tic_tac_toe")
        before = await evaluate(model, task, count=NUM_GAMES, seed=20_000)
        write(before=before.mean, interval=before.interval)

        def on_step(report: StepReport) -> None:
            assert backend.tunnel is not None
            write(
                step=report.step, reward=report.reward, loss=report.metrics.get("loss/train"), url=backend.tunnel.url,
                tunnels=backend.tunnel.num_opened,
            )  # fmt: skip

        await train_task(model, task, task.defaults, num_steps=settings["steps"], seed=0, on_step=on_step)
        after = await evaluate(model, task, count=NUM_GAMES, seed=20_000)
        write(after=after.mean, interval=after.interval, tunnels=backend.tunnel.num_opened)


if __name__ == "__main__":
    asyncio.run(main(json.loads(Path(sys.argv[1]).read_text())))
