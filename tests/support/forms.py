"""A gateway whose fake engine honours grammars, for tests of structured answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from art.config import RenderConfig
from art.gateway.renderer import load_renderer
from tests.support.fake_engine import FakeEngine, Script
from tests.support.gateway import Bench, open_bench

COLUMNS = ["a", "b", "c"]
MOVE: dict[str, Any] = {
    "type": "object",
    "properties": {"column": {"enum": COLUMNS}, "row": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["column", "row"],
    "additionalProperties": False,
}
"""A schema that random tokens fill quickly."""
FORMAT: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "move", "schema": MOVE, "strict": True}}


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": MOVE, **function}}


TOOLS = [tool("play"), tool("undo")]


def is_move(value: Any) -> bool:
    return set(value) == {"column", "row"} and value["column"] in COLUMNS and 1 <= value["row"] <= 9


def grammar_engine(tokenizer: Path, script: Script | None = None) -> FakeEngine:
    """An engine that draws tokens at random among those that the grammar allows, or says what `script` says."""
    loaded = load_renderer(tokenizer).tokenizer
    return FakeEngine(vocab_size=loaded.vocab_size, tokenizer_json=loaded.backend.to_str(), script=script)


@asynccontextmanager
async def open_form_bench(
    directory: Path, tokenizer: Path, script: Script | None = None, *, thinking: bool = False
) -> AsyncIterator[Bench]:
    """Open a gateway with such an engine. Random tokens that may think seldom stop to think, so they may not."""
    config = RenderConfig(chat_template_kwargs={} if thinking else {"enable_thinking": False})
    async with open_bench(directory, tokenizer, config=config, engine=grammar_engine(tokenizer, script)) as bench:
        bench.resolver.policy = replace(bench.resolver.policy, adapter=None)
        yield bench
