"""Real client libraries, each in its own environment, against a server that answers with a script.

`make test-clients` makes the environments. A client whose environment is missing is skipped with that reason. The engine
is scripted, so that a model without any training calls the tool; the rest is the real server behind a real socket.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from art.client.submission import wire_groups
from art.config import TrainConfig
from art.credit.plan import plan_step
from art.credit.resolve import exchange_ids, resolve
from tests.clients.clients import CLIENTS, TASKS
from tests.clients.model import ANSWER, PLACE, turns_of
from tests.clients.program import each_client, run
from tests.support.app import KEY
from tests.support.served_app import ServedApp

pytestmark = pytest.mark.timeout(400)


async def check_trainable(served: ServedApp, rollout_id: str) -> list[Any]:
    """Reward the rollout with one that did worse, and plan a step: every sampled token is learnt from."""
    bench, other = served.app.bench, f"{rollout_id}-other"
    bench.engine.turns = [["no"]]
    await bench.chat({"role": "user", "content": "hi"}, rollout_id=other)
    for one, reward in ((rollout_id, 1.0), (other, 0.0)):
        await served.policy.put_rollout(one, group_id=rollout_id, reward=reward)
    (group,) = await served.policy.collect_trajectory_groups(1, 2, timeout_s=20, pbar_desc=None)
    wired = wire_groups([group])
    exchanges = bench.recorder.find(exchange_ids(wired))
    plan = plan_step(resolve(wired, bench.recorder.find_answers, project="games", name="agent"), TrainConfig(), step=3)
    made = bench.recorder.by_rollout(rollout_id, "games")
    assert {exchange.id for exchange in made} <= set(plan.exchange_ids)
    sampled = sum(len(exchange.completion_token_ids) for exchange in exchanges.values())
    assert plan.ledger["ledger/sampled_tokens"] == sampled == plan.ledger["ledger/trained_tokens"]
    return list(made)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", each_client())
async def test_a_task(served: ServedApp, name: str, task: str, record_property: Any) -> None:
    turns = turns_of(name, task)
    served.app.bench.engine.turns = list(turns)
    said = await run(CLIENTS[name], task, url=f"{served.url}/rollouts/{name}-{task}", key=KEY, model="games/agent")
    record_property("version", said["version"])
    if "unwritten" in said:
        pytest.skip("the suite's program does not do this")
    if "unsupported" in said:
        pytest.xfail(said["unsupported"])
    assert said["answer"] == (PLACE if task.startswith("structured") else ANSWER)
    made = await check_trainable(served, f"{name}-{task}")
    assert len(made) == len(turns)
    results = [one["content"] for one in made[-1].request_messages if one["role"] == "tool"]
    assert task != "turns" or any("value of" not in result for result in results), "the tool's error was not told"
    assert all(exchange.constraint is not None for exchange in made) or not task.startswith("structured")
    for before, after in itertools.pairwise(made):
        assert "value of a b" in json.dumps(after.request_messages)
        if after.branch_reason is not None:
            record_property("note", f"it branches: `{after.branch_reason}`")
        elif after.parent_id is None:
            record_property("note", "each request is a conversation of its own")
        else:
            assert after.parent_id == before.id
