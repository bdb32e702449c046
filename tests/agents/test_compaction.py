"""An agent whose context is full summarises its conversation: the summary is an answer, and what follows is a branch."""

from __future__ import annotations

import pytest

from art_agents.address import MOUNT, open_address
from art_agents.containers import ContainerEngine, Limits
from art_agents.harness import find_harness
from art_agents.run import run_agent
from tests.agents.conftest import image_of
from tests.clients.model import call
from tests.support.served_app import ServedApp

pytestmark = pytest.mark.timeout(1200)
SUMMARY = "I wrote answer.txt."


WINDOW = 27_000
"""Codex begins with 24,400 of these tokens, and compacts at nine tenths of its window: after the first answer."""


async def test_a_summary_is_recorded_and_begins_a_branch(containers: ContainerEngine, served: ServedApp) -> None:
    harness, engine = find_harness("codex"), served.app.bench.engine
    engine.turns = [[call("exec_command", cmd="echo hello > answer.txt")], [SUMMARY], ["It is done."]]
    base_url = served.policy.rollout_base_url("compacts")
    async with (
        open_address(base_url, served.policy.inference_api_key or "", 20) as address,
        containers.open(await image_of(containers, harness), Limits(), mount=(address.folder, MOUNT)) as container,
    ):
        run = await run_agent(
            harness, container, address, "Write hello into answer.txt.", model_name="games/agent", max_context=WINDOW,
            timeout_s=300,
        )  # fmt: skip
    exchanges = served.app.bench.recorder.by_rollout("compacts", "games")
    assert run.ending == "finished", run.output
    acted, summary, last = exchanges
    assert summary.message["content"] == SUMMARY
    assert (summary.parent_id, summary.branch_reason) == (None, "tools_changed"), "it is asked for without tools"
    assert any(SUMMARY in str(message["content"]) for message in last.request_messages)
    assert (acted.parent_id, last.parent_id) == (None, None)
    trajectory = await served.policy.get_rollout("compacts")
    assert len(trajectory.additional_histories) == 2, "all three answers are trained, each on its own path"
