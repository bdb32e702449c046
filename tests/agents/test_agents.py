"""Each agent as it is installed, in a container without network, on three tasks with a scripted model."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import pytest

from art.errors import NotFoundError
from art_agents.address import MOUNT, open_address
from art_agents.containers import ContainerEngine, Limits
from art_agents.harness import Harness
from art_agents.run import pack, run_agent
from tests.agents.conftest import image_of
from tests.clients.model import MAX_CONTEXT, call
from tests.support.served_app import ServedApp

pytestmark = pytest.mark.timeout(1200)
ADD = "def add(a, b):\n    return a - b\n"


@dataclass(frozen=True)
class Chore:
    """A task with the shell command and the edit that do it."""

    instruction: str
    files: dict[str, str]
    command: str
    edit: str
    """What aider is told instead: a file's name and its whole new text."""
    check: str


CHORES = {
    "write": Chore(
        "Write hello into answer.txt.", {}, "echo hello > answer.txt",
        "answer.txt\n```\nhello\n```\n",
        "test $(cat /app/answer.txt) = hello",
    ),
    "repair": Chore(
        "add.py subtracts. Mend it.", {"/app/add.py": ADD}, "sed -i 's/a - b/a + b/' add.py",
        "add.py\n```\ndef add(a, b):\n    return a + b\n```\n",
        'cd /app && test $(python3 -c "import add; print(add.add(2, 3))") = 5',
    ),
    "count": Chore(
        "Write the number of lines of log.txt into count.txt.", {"/app/log.txt": "a\nb\nc\n"},
        "wc -l < log.txt > count.txt",
        "count.txt\n```\n3\n```\n", "test $(cat /app/count.txt) = 3",
    ),
}  # fmt: skip


def turns(harness: Harness, chore: Chore) -> list[list[str]]:
    """What a model that does the chore says to this agent."""
    done = ["It is done."]
    match harness.name:
        case "aider":
            return [[chore.edit], *[done] * 3]
        case "claude-code":
            return [[call("Bash", command=chore.command)], done]
        case "codex":
            return [[call("exec_command", cmd=chore.command)], done]
        case "opencode":
            # It has a title made of each conversation, in a request of its own that comes at any time.
            act = call("bash", command=chore.command, description="do it")
            return [[act], [act], done, done]
        case "mini-swe-agent":
            end = call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
            return [[call("bash", command=chore.command)], [end]]
    raise AssertionError(harness.name)


@pytest.mark.parametrize("chore", CHORES)
async def test_it_does_a_task_and_all_that_it_asked_is_recorded(
    containers: ContainerEngine, harness: Harness, served: ServedApp, chore: str
) -> None:
    about, rollout_id = CHORES[chore], f"{harness.name}-{chore}"
    served.app.bench.engine.turns = turns(harness, about)
    image = await image_of(containers, harness)
    await served.policy.put_rollout(rollout_id, sampling={"temperature": 1.0})  # aider asks for 0
    base_url = served.policy.rollout_base_url(rollout_id)
    async with (
        open_address(
            base_url,
            served.policy.inference_api_key or "",
            20,
            side_url=served.policy.rollout_base_url(f"{rollout_id}-side"),
        ) as address,
        containers.open(image, Limits(), mount=(address.folder, MOUNT)) as container,
    ):
        await container.put(pack(about.files))
        run = await run_agent(
            harness,
            container,
            address,
            about.instruction,
            model_name="games/agent",
            max_context=MAX_CONTEXT,
            cwd="/app",
            timeout_s=300,
        )
        checked = await container.run(about.check, timeout_s=30)
    assert run.ending == "finished", run.output
    assert checked.code == 0, run.output
    exchanges = served.app.bench.recorder.by_rollout(rollout_id, "games")
    assert len(exchanges) >= (1 if harness.name == "aider" else 2)
    assert all(exchange.temperature > 0 for exchange in exchanges)
    with nullcontext() if harness.side_requests else pytest.raises(NotFoundError):
        assert served.app.bench.recorder.by_rollout(f"{rollout_id}-side", "games")
