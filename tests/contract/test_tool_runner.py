"""Anthropic's tool runner, unchanged: it asks for a conversation that the server holds, is refused, and goes on."""

from __future__ import annotations

import anthropic
import httpx2

from tests.support.app import KEY, AppBench

CALL = '<tool_call>\n{"name": "look_up", "arguments": {"key": "a b"}}\n</tool_call>'


@anthropic.beta_async_tool
async def look_up(key: str) -> str:
    """Find a value.

    Args:
        key: what to find.
    """
    return f"value of {key}"


async def test_a_tool_round_trip(app: AppBench) -> None:
    app.bench.answers(CALL, "it is there")
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app.app)) as plain:
        claude = anthropic.AsyncAnthropic(base_url="http://art.test", api_key=KEY, max_retries=0, http_client=plain)
        runner = claude.beta.messages.tool_runner(
            model="games/agent", max_tokens=900, tools=[look_up], messages=[{"role": "user", "content": "hi"}]
        )
        final = await runner.until_done()
    assert final.content[0].text == "it is there"  # type: ignore[union-attr]
    exchange = app.bench.recorder.get([final.exchange_id])[0]  # type: ignore[attr-defined]
    assert exchange.request_messages[-1]["content"] == "value of a b"
    assert exchange.parent_id is not None


async def test_a_thread_is_refused_with_details(app: AppBench) -> None:
    body = {"model": "games/agent", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    async with app.http() as http:
        refused = await http.post("/v1/messages", json=body | {"thread": {"type": "create"}})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "thread"
    assert refused.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}
