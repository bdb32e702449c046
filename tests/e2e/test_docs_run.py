"""The blocks of the documentation run, page by page and in their order, on a real server with a tiny model.

Python gets what a reader of the page has by then: `backend`, a registered `model`, `groups` of its rollouts. A
`LocalBackend` of a page finds the server running; `test_quickstart.py` runs the script of the README as it is. Shell runs
in bash, in a folder of the page's own, and stays where it has gone to by `cd`; `art-server` goes to the background, and
`pip install` does nothing.
`tests.support.docs_blocks` tells how a block says that it cannot run.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import art
from art.rewards import GroupScorer, combine
from art.tasks.yes_no_maybe import YesNoMaybe
from tests.support.docs_blocks import PAGES, ROOT, Block, blocks_of, module_is_there
from tests.support.ports import free_port
from tests.support.shared_server import on

RUNNABLE = {
    str(page.relative_to(ROOT)): blocks
    for page in PAGES
    if (blocks := [b for b in blocks_of(page) if not b.not_run and b.language in ("python", "shell")])
}
SHELL_TIMEOUT_S = 120
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CHECKPOINT = ".art/my_agent/models/my_agent-seed0/checkpoints/0030"
"""Of a training that takes minutes; the reader gets another one in its place."""
FEWER_STEPS = {
    "README.md": {"steps=15": "steps=2"},
    "docs/asynchronous.md": {"steps=4": "steps=1", "steps=6": "steps=2"},
    "skills/train-my-agent/SKILL.md": {"--steps 4": "--steps 1", "--held-out 100": "--held-out 10"},
}
MAKES_TINY, MAKES_ANOTHER = "art tiny-model ./tiny ", "art tiny-model ./another --warm-start-steps 1 "
"""The pages train the `./tiny` of all tests, which the server has loaded."""
QUESTION = "say yes, no or maybe"

SERVER = """\
import os, subprocess, sys, time
words = [word.replace("5000", os.environ["DOCS_PORT"]) for word in sys.argv[1:]]
log = open("server.log", "w")
server = subprocess.Popen(
    [sys.executable, "-m", "art.cli.server", *words], stdout=log, stderr=log, start_new_session=True
)
open(os.environ["DOCS_PIDS"], "a").write(f"{server.pid}\\n")
while "listens on" not in open("server.log").read():
    if server.poll() is not None:
        sys.exit(open("server.log").read())
    time.sleep(0.05)
"""


class Reader:
    """Somebody who follows one page."""

    def __init__(self, folder: Path, stage: dict[str, Any], environ: pytest.MonkeyPatch) -> None:
        self.folder, self.names, self._stage, self._environ = folder, {"__name__": "page"}, stage, environ
        self._bin, self._pids = folder / "bin", folder / "pids"
        self._port = free_port()
        self._bin.mkdir()
        (self._bin / "server.py").write_text(SERVER)
        python = f"exec '{sys.executable}'"
        programs = {"art": f"{python} -m art.cli.main", "art-server": f"{python} '{self._bin / 'server.py'}'",
                    "python": python, "pip": ": "}  # fmt: skip
        for name, start in programs.items():
            (self._bin / name).write_text(f'#!/bin/sh\n{start} "$@"\n')
            (self._bin / name).chmod(0o755)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ART_")}
        self.environ = kept | {
            "PATH": f"{self._bin}:{kept['PATH']}", "DOCS_PORT": str(self._port), "DOCS_PIDS": str(self._pids),
            "PWD": str(folder),
        }  # fmt: skip

    def text(self, block: Block) -> str:
        """The block with addresses and folders that are there."""
        text, folder = block.text, ".art" if block.page == "docs/guide.md" else "srv"
        for address in ("gpu-machine:5000", "127.0.0.1:5000"):
            text = text.replace(address, f"127.0.0.1:{self._port}")
        for long, short in FEWER_STEPS.get(block.page, {}).items():
            text = text.replace(long, short)
        text = text.replace(MAKES_TINY, MAKES_ANOTHER)
        return text.replace("/srv/art", folder).replace(CHECKPOINT, str(max(self._stage["checkpoints"].iterdir())))

    async def run(self, block: Block) -> None:
        await (self._shell if block.language == "shell" else self._python)(block)

    async def _shell(self, block: Block) -> None:
        script = f"set -eo pipefail\n{self.text(block)}\nenv -0 > '{self.folder}/variables'\n"
        done = await asyncio.to_thread(
            subprocess.run, ["bash", "-c", script], cwd=self.environ["PWD"], env=self.environ, capture_output=True,
            text=True, timeout=SHELL_TIMEOUT_S,
        )  # fmt: skip
        assert done.returncode == 0, f"{block.id}:\n{block.text}\n{done.stdout}\n{done.stderr}"
        lines = (self.folder / "variables").read_text().split("\0")
        self.environ = dict(line.split("=", 1) for line in lines if "=" in line)

    async def _python(self, block: Block) -> None:
        self._environ.chdir(self.environ["PWD"])
        for name, value in self.environ.items():
            self._environ.setenv(name, value)
        self.names |= self._stage | await fresh_names(self._stage["model"], block)
        code = compile(self.text(block), block.id, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        done = eval(code, self.names)
        if inspect.isawaitable(done):
            await done
        for name, check in AFTER.items():
            if name in block.text:
                await check(self)

    def close(self) -> None:
        for pid in self._pids.read_text().split() if self._pids.exists() else ():
            os.killpg(int(pid), signal.SIGTERM)


async def fresh_names(model: art.TrainableModel, block: Block) -> dict[str, Any]:
    """What the page has taken for granted, and this block speaks of."""
    names: dict[str, Any] = {}
    if "pending" in block.text:
        names["pending"] = [rollouts_of(model, i) for i in range(3)]
    elif "groups" in block.text:
        names["groups"] = await art.gather_trajectory_groups([rollouts_of(model, i) for i in range(3)], pbar_desc=None)
    if "trajectory." in block.text:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        answers = [
            await model.openai_client().chat.completions.create(
                model=model.get_inference_name(), messages=messages, logprobs=True, max_completion_tokens=4
            )
            for _ in range(2)
        ]
        names["choices"] = [answer.choices[0] for answer in answers]
        names["trajectory"] = art.Trajectory(messages_and_choices=[*messages, *names["choices"]])
    if block.page == "docs/integrations.md":
        names |= names_of_agents(block)
    if block.page == "docs/asynchronous.md":
        names["model"] = art.TrainableModel(name="ahead", project="docs", base_model=model.base_model)
        await names["model"].register(model.backend())
    return names


def rollouts_of(model: art.TrainableModel, index: int) -> art.TrajectoryGroup:
    task = YesNoMaybe()
    (scenario,) = task.scenarios("train", seed=index, count=1)
    return art.TrajectoryGroup(task.rollout(model, scenario, rollout_index=i) for i in range(8))


def names_of_agents(block: Block) -> dict[str, Any]:
    names: dict[str, Any] = {
        "question": QUESTION, "grade": lambda _: 1.0, "messages": [{"role": "user", "content": QUESTION}]
    }  # fmt: skip
    if "import agents" in block.text:
        import agents

        names["my_agent"] = agents.Agent(name="a", instructions="Answer.")
    elif "pydantic_ai" in block.text:
        import pydantic_ai

        names["my_agent"] = pydantic_ai.Agent()
    elif "build_graph" in block.text:
        names["build_graph"] = graph_of
    else:
        names["my_agent"] = ask
    return names


def graph_of(llm: Any) -> Any:
    from langgraph.graph import END, START, MessagesState, StateGraph

    async def answer(state: Any) -> dict[str, Any]:
        return {"messages": [await llm.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("answer", answer)
    graph.add_edge(START, "answer")
    graph.add_edge("answer", END)
    return graph.compile()


async def ask(client: Any, question: str) -> str:
    done = await client.chat.completions.create(
        model="docs/agent", messages=[{"role": "user", "content": question}], max_completion_tokens=4
    )
    return str(done.choices[0].message.content)


# -- what a block that only defines something is tried with --


async def try_rollout(reader: Reader) -> None:
    trajectory = await reader.names["rollout"](reader.names["model"], QUESTION, "maybe")
    assert trajectory.metrics["num_turns"] >= 1


async def try_address(reader: Reader) -> None:
    """The server of the page is where the page says, and takes the page's key."""
    backend = reader.names["backend"]
    client = await backend._connection()
    assert (await client.health())["base_models"] == [], "only who has the key is told"
    assert await client.list_models() == []
    await backend.close()


async def try_mcp_server(reader: Reader) -> None:
    from art_recipes.mcp import MCPClient

    (block,) = [block for block in RUNNABLE["docs/mcp.md"] if "@server.tool()" in block.text]
    (reader.folder / "stock.py").write_text(block.text)
    async with MCPClient([sys.executable, "stock.py"]) as client:
        assert (await client.call_tool("count", {"product": "lamp"})).text == "40"
        refused = await client.call_tool("count", {"product": "sofa"})
    assert refused.is_error
    assert "there are desk, lamp" in refused.text


async def save_loss(reader: Reader) -> None:
    """The page tells to save the function beside the script."""
    (block,) = [block for block in RUNNABLE["docs/objectives.md"] if "def capped(" in block.text]
    (reader.names["own_modules"] / "my_losses.py").write_text(block.text)


async def look_at_step(reader: Reader) -> None:
    """The loop of the block has trained up to the step that it asked for."""
    step, pipeline = reader.names["step"], reader.names["pipeline"]
    assert step.number == await pipeline.model.get_step() > 0
    assert not step.trained or step.metrics["ledger/trained_tokens"] == step.metrics["ledger/sampled_tokens"]


async def run_main(reader: Reader) -> None:
    """The program of the page trains."""
    await reader.names["main"]()
    history = Path(reader.environ["PWD"]) / ".art/yes-no-maybe/models/agent-001/history.jsonl"
    assert len(history.read_text().splitlines()) == 2


AFTER = {
    "pipeline = art.pipeline(model, scenarios=PROMPTS": run_main,
    "async for step in pipeline.train(steps=4": look_at_step,
    "async for step in pipeline.train(steps=6": look_at_step,
    "def capped(": save_loss,
    "async def rollout(model: art.TrainableModel, question: str": try_rollout,
    "backend = art.RemoteBackend(": try_address,
    "@server.tool()": try_mcp_server,
}


# -- the test --


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(shared_backend: art.LocalBackend, tiny_model: Path, own_modules: Path) -> AsyncIterator[dict[str, Any]]:
    """`docs/agent` at step 1, and a teacher that has learnt nothing."""
    model, teacher = (
        art.TrainableModel(name=name, project=project, base_model=str(tiny_model))
        for project, name in (("docs", "agent"), ("project", "teacher"))
    )
    await teacher.register(shared_backend)
    await model.register(shared_backend)
    groups = await art.gather_trajectory_groups([rollouts_of(model, i) for i in range(3)], pbar_desc=None)
    result = await shared_backend.train(model, groups)

    async def run_tool(name: str, arguments: object) -> str:
        return "nothing"

    yield {
        "art": art, "asyncio": asyncio, "backend": shared_backend, "model": model, "TOOLS": [TOOL], "run_tool": run_tool,
        "scorer": GroupScorer(combine({"own": lambda trajectory: trajectory.reward})),
        "checkpoints": Path(result.checkpoint_path).parent, "own_modules": own_modules,
    }  # fmt: skip
    await model.close()
    await teacher.close()


@pytest.fixture
def reader(
    request: pytest.FixtureRequest, tmp_path: Path, stage: dict[str, Any], tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Reader]:  # fmt: skip
    page = ROOT / str(request.node.callspec.params["page"])
    (tmp_path / "tiny").symlink_to(tiny_model)
    for program in page.parent.glob("*.py"):
        (tmp_path / program.name).symlink_to(program)
    monkeypatch.setattr(art, "LocalBackend", on(stage["backend"]))
    reader = Reader(tmp_path, stage, monkeypatch)
    yield reader
    reader.close()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("page", RUNNABLE)
async def test_the_blocks_of_a_page_run(page: str, reader: Reader) -> None:
    missing = []
    for block in RUNNABLE[page]:
        if block.needs and not module_is_there(block.needs):
            missing.append(block.needs)
            continue
        await reader.run(block)
    if missing and len(missing) == len(RUNNABLE[page]):
        pytest.skip(f"not installed: {', '.join(missing)}")
