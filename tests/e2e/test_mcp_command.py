"""`art mcp`, asked by a real MCP client over standard input and output, says what `art view --read` says."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import art
from art.cli.main import main
from tests.support import shop_run
from tests.support.comparisons import make_comparison
from tests.support.model_folder import paths_of

mcp = pytest.importorskip("mcp", reason="needs the extra mcp")

pytestmark = pytest.mark.asyncio(loop_scope="module")

RUN = {"project": shop_run.PROJECT, "name": shop_run.NAME}
ROLLOUT = {**RUN, "split": "train", "step": 2, "group": 1, "index": 0}
AT = f"runs/{shop_run.PROJECT}/{shop_run.NAME}"
QUESTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("runs", {}, "runs"),
    ("runs", {"project": shop_run.PROJECT}, f"runs?project={shop_run.PROJECT}"),
    ("run", RUN, AT),
    ("series", {**RUN, "metric": ["train/reward", "val/reward"]}, f"{AT}/series?metric=train/reward&metric=val/reward"),
    ("series", {**RUN, "metric": ["loss/total"], "first": 2}, f"{AT}/series?metric=loss/total&first=2"),
    ("rollouts", RUN, f"{AT}/rollouts"),
    (
        "rollouts",
        {**RUN, "split": "train", "sort": "reward", "descending": False, "limit": 3},
        f"{AT}/rollouts?split=train&sort=reward&descending=false&limit=3",
    ),
    ("rollouts", {**RUN, "text": '"article 1" pri*'}, f"{AT}/rollouts?text=%22article%201%22%20pri*"),
    ("rollouts", {**RUN, "outcome": "infra_fault"}, f"{AT}/rollouts?outcome=infra_fault"),
    ("rollout", ROLLOUT, f"{AT}/rollouts/train/2/1/0"),
    ("tokens", ROLLOUT, f"{AT}/rollouts/train/2/1/0/tokens"),
    ("tokens", {**ROLLOUT, "path": 0, "last": 5}, f"{AT}/rollouts/train/2/1/0/tokens?path=0&last=5"),
    ("group", {**RUN, "split": "train", "step": 2, "group": 1}, f"{AT}/groups/train/2/1"),
    ("step", {**RUN, "step": 2}, f"{AT}/steps/2"),
    ("tree", {**RUN, "step": 2}, f"{AT}/steps/2/tree"),
    ("ledger", {**RUN, "first": 1, "last": 2}, f"{AT}/ledger?first=1&last=2"),
    ("checkpoints", RUN, f"{AT}/checkpoints"),
    ("compare", {**RUN, "a": 0, "b": 3}, f"{AT}/checkpoints/compare?a=0&b=3"),
    ("comparisons", {}, "comparisons"),
    ("comparison", {"comparison": "three"}, "comparisons/three"),
    ("costs", RUN, f"{AT}/costs"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def data_dir(shared_backend: art.LocalBackend, tiny_model: Path) -> Path:
    """The data directory of a run with faults, judges, sub-agents and held-out rollouts, and of a comparison."""
    model = art.TrainableModel(name=shop_run.NAME, project=shop_run.PROJECT, base_model=str(tiny_model))
    await model.register(shared_backend)
    await shop_run.train(model)
    root = paths_of(model).root.parents[2]
    folder = root / "comparisons" / "three"
    folder.mkdir(parents=True)
    (folder / "comparison.json").write_text(make_comparison("three", 2.0).model_dump_json())
    return root


@asynccontextmanager
async def connected(data_dir: Path) -> AsyncIterator[Any]:
    """A client of `art mcp` on a data directory."""
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import get_default_environment, stdio_client

    environment = get_default_environment() | {"PYTHONPATH": ":".join(sys.path)}
    command = StdioServerParameters(
        command=sys.executable, args=["-m", "art.cli.main", "mcp", str(data_dir)], env=environment
    )
    async with Client(stdio_client(command), cache=None) as client:
        yield client


def without_moment(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name != "now"}


async def test_its_answers_are_those_of_art_view(data_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "answer.json"
    async with connected(data_dir) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert tools.keys() == {tool for tool, _, _ in QUESTIONS} | {"request", "doctor"}
        assert all(tool.annotations.read_only_hint for tool in tools.values())
        assert tools["compare"].input_schema["required"] == ["project", "name", "a", "b"]
        assert "Words that the conversation" in tools["rollouts"].input_schema["properties"]["text"]["description"]
        shown = (await client.call_tool("rollout", ROLLOUT)).content[0].text
        exchange = re.findall(r"ex_[0-9a-z]+", shown)[0]
        again = ("request", {**ROLLOUT, "exchange": exchange}, f"{AT}/rollouts/train/2/1/0/request?exchange={exchange}")
        for tool, arguments, path in (*QUESTIONS, again):
            said = await client.call_tool(tool, arguments)
            assert not said.is_error, f"{tool}: {said.content[0].text}"
            assert main(["view", str(data_dir), "--read", path, "--json", str(file)]) == 0
            answer = json.loads(said.content[0].text)
            assert without_moment(answer) == without_moment(json.loads(file.read_text())), path


async def test_a_question_that_has_no_answer_says_why(data_dir: Path) -> None:
    async with connected(data_dir) as client:
        for tool, arguments, words in (
            ("run", {**RUN, "name": "nobody"}, "there is no run shop/nobody"),
            ("run", {"project": "shop"}, "`name` is missing"),
            ("rollouts", {**RUN, "colour": "red"}, "colour"),
            ("step", {**RUN, "step": "../.."}, "step"),
            ("delete", {}, "there is no tool 'delete'"),
            ("doctor", {}, "`model` is missing"),
            ("doctor", {"model": "m", "task": "os:system"}, "`task` must be one of"),
        ):
            said = await client.call_tool(tool, arguments)
            assert said.is_error, tool
            assert words in said.content[0].text


async def test_a_folder_that_comes_later(tmp_path: Path) -> None:
    """A coding agent may start `art mcp` before the first training."""
    async with connected(tmp_path / "later") as client:
        said = await client.call_tool("runs", {})
        assert "there is no folder" in said.content[0].text
        (tmp_path / "later/games/models/agent").mkdir(parents=True)
        said = await client.call_tool("runs", {})
        assert json.loads(said.content[0].text)["runs"][0]["name"] == "agent"


@pytest.mark.slow
async def test_doctor(data_dir: Path, tiny_model: Path) -> None:
    async with connected(data_dir) as client:
        said = await client.call_tool("doctor", {"model": str(tiny_model), "task": "yes_no_maybe"})
        assert not said.is_error, said.content[0].text
        summary = json.loads(said.content[0].text)
        assert summary["ready"]
        assert "reward spread" in [check["name"] for check in summary["checks"]]
        said = await client.call_tool("doctor", {"model": "./nowhere"})
        assert not json.loads(said.content[0].text)["ready"]
