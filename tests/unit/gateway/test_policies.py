"""Model names, rollout histories, and the modules that the server process must not load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from art.errors import NotFoundError
from art.gateway.policies import ModelName, find_model, parse_model_name
from tests.support.gateway import LOOK_UP, Bench, user


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("games/agent", ModelName("games", "agent", None)),
        ("games/agent@12", ModelName("games", "agent", 12)),
        ("agent", ModelName(None, "agent", None)),
        ("agent@0", ModelName(None, "agent", 0)),
        ("games/agent@promoted", ModelName("games", "agent", "promoted")),
        ("my-model.v2", ModelName(None, "my-model.v2", None)),
    ],
)
def test_model_names_are_split_into_their_parts(text: str, name: ModelName) -> None:
    assert parse_model_name(text) == name


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a/b/c",
        "a@",
        "a@x",
        "a@-1",
        "@3",
        "a@promoted2",
        "a@2promoted",
        "@promoted",
        "/a",
        "a/",
        "a@1@2",
        "a@" + "9" * 30,
    ],
)
def test_malformed_model_names_are_not_found(text: str) -> None:
    with pytest.raises(NotFoundError, match="project/name"):
        parse_model_name(text)


def test_bare_names_must_be_unique() -> None:
    registered = [("games", "agent"), ("work", "agent"), ("work", "clerk")]
    assert find_model(ModelName("games", "agent", 3), registered) == ("games", "agent")
    assert find_model(ModelName(None, "clerk", None), registered) == ("work", "clerk")
    with pytest.raises(NotFoundError, match="games/agent, work/agent"):
        find_model(ModelName(None, "agent", None), registered)
    with pytest.raises(NotFoundError, match="'games/clerk'; registered models: games/agent, work/agent, work/clerk"):
        find_model(ModelName("games", "clerk", None), registered)
    with pytest.raises(NotFoundError, match="registered models: none"):
        find_model(ModelName(None, "x", None), [])


async def test_a_rollout_has_one_history_per_conversation(bench: Bench) -> None:
    """One conversation forks, and another one has tools."""
    bench.answers("one", "two", "other two", "with tools")
    await bench.chat(user("hi"), rollout_id="r")
    start = [user("hi"), {"role": "assistant", "content": "one"}]
    await bench.chat(*start, user("left"), rollout_id="r")
    await bench.chat(*start, user("right"), rollout_id="r")
    await bench.chat(user("hi"), tools=[LOOK_UP], rollout_id="r")
    histories = (await bench.gateway.rollouts.get("r", "games")).histories
    told = [
        [item.get("content") or item["message"]["content"] for item in history["messages_and_choices"]]
        for history in histories
    ]
    assert told == [["hi", "one", "left", "two"], ["hi", "one", "right", "other two"], ["hi", "with tools"]]
    assert [history["tools"] for history in histories] == [None, None, [LOOK_UP]]
    choices = [item for item in histories[0]["messages_and_choices"] if "message" in item]
    exchanges = bench.recorder.get(choice["exchange_id"] for choice in choices)
    assert [exchange.message["content"] for exchange in exchanges] == ["one", "two"]
    with pytest.raises(NotFoundError):
        await bench.gateway.rollouts.get("nobody", None)


def test_the_server_process_loads_no_torch(tokenizer_dir: Path) -> None:
    code = (
        "import sys\n"
        "from art.server.app import App\n"
        "from art.gateway.chat import Gateway\n"
        "from art.gateway.renderer import load_renderer\n"
        f"load_renderer({str(tokenizer_dir)!r})\n"
        "print([name for name in ('torch', 'transformers', 'fastapi') if name in sys.modules])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
