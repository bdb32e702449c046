"""Real client libraries, each in its own environment, against a server that answers with a script.

`make test-clients` makes the environments. A client whose environment is missing is skipped with that reason. The engine
is scripted, so that a model without any training calls the tool; the rest is the real server behind a real socket.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from art.client.submission import wire_groups
from art.config import TrainConfig
from art.credit.plan import plan_step
from art.credit.resolve import exchange_ids, resolve
from tests.support.app import KEY
from tests.support.served_app import ServedApp

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
NAMES = sorted(path.stem for path in (Path(__file__).parent / "requirements").glob("*.txt"))
ANSWER = "it is there"
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"key": "a b"}}\n</tool_call>'


async def run(served: ServedApp, name: str, task: str) -> str:
    """Run one task of a client's program under a rollout id of its own, and return the answer that it printed."""
    python = ROOT / f".venv-clients-{name}" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"there is no {python}; `make test-clients` makes it")
    environment = {
        "PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", ""), "CLIENT_KEY": KEY, "CLIENT_MODEL": "games/agent",
        "CLIENT_URL": f"{served.url}/rollouts/{name}-{task}", "PYTHONPATH": str(PROGRAMS),
    }  # fmt: skip
    program = PROGRAMS / f"run_{name.replace('-', '_')}.py"
    process = await asyncio.create_subprocess_exec(
        str(python), str(program), task, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(300):
        printed, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()[-4000:]
    answer = json.loads(printed.decode().splitlines()[-1])["answer"]
    assert isinstance(answer, str)
    return answer


async def check_trainable(served: ServedApp, rollout_id: str, num_answers: int) -> list[Any]:
    """Reward the rollout with one that did worse, and plan a step: every sampled token is learnt from."""
    other = f"{rollout_id}-other"
    served.app.bench.answers("no")
    await served.app.bench.chat({"role": "user", "content": "hi"}, rollout_id=other)
    for one, reward in ((rollout_id, 1.0), (other, 0.0)):
        await served.policy.put_rollout(one, group_id=rollout_id, reward=reward)
    (group,) = await served.policy.collect_trajectory_groups(1, 2, timeout_s=20, pbar_desc=None)
    wired = wire_groups([group])
    exchanges = served.app.bench.recorder.find(exchange_ids(wired))
    plan = plan_step(resolve(wired, exchanges, project="games", name="agent"), TrainConfig(), step=3)
    made = served.app.bench.recorder.by_rollout(rollout_id, "games")
    assert len(made) == num_answers
    assert {exchange.id for exchange in made} <= set(plan.exchange_ids)
    sampled = sum(len(exchange.completion_token_ids) for exchange in exchanges.values())
    assert plan.ledger["ledger/sampled_tokens"] == sampled == plan.ledger["ledger/trained_tokens"]
    return made


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("task", ["tools", "streamed"])
async def test_a_tool_round_trip(served: ServedApp, name: str, task: str) -> None:
    served.app.bench.answers(CALL, ANSWER)
    assert await run(served, name, task) == ANSWER
    first, second = await check_trainable(served, f"{name}-{task}", 2)
    assert second.request_messages[-1]["content"] == "value of a b"
    assert (second.parent_id, second.branch_reason) == (first.id, None)
