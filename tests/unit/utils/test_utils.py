"""Retrying, data sets, limits, conversions."""

from __future__ import annotations

import asyncio
import importlib.util
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

import art
from art.client.http import PerLoop
from art.client.openai_client import make_openai_client
from openpipe_art.utils import (
    DatasetBatch,
    convert_litellm_choice_to_openai,
    format_message,
    get_model_step,
    iterate_dataset,
    limit_concurrency,
)

# --- retry ---


async def test_retry_async_and_sync() -> None:
    seen: list[tuple[str, int]] = []
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        if calls % 3:
            raise KeyError(calls)
        return calls

    def note(error: Exception, attempt: int) -> None:
        seen.append((type(error).__name__, attempt))

    @art.retry(delay=0.001, on_retry=note)
    async def fetch(add: int, *, more: int = 0) -> int:
        """Doc."""
        return count() + add + more

    assert await fetch(1, more=2) == 6
    assert seen == [("KeyError", 1), ("KeyError", 2)]
    assert (fetch.__name__, fetch.__doc__) == ("fetch", "Doc.")
    assert art.retry(delay=0.001)(count)() == 6


async def test_retry_gives_up_and_keeps_to_its_exceptions() -> None:
    calls = []

    @art.retry(max_attempts=2, delay=0.001, exceptions=(ValueError,))
    async def fail(error: BaseException) -> None:
        calls.append(error)
        raise error

    for error, attempts in ((ValueError("x"), 2), (KeyError("x"), 1), (asyncio.CancelledError(), 1)):
        calls.clear()
        with pytest.raises(type(error)):
            await fail(error)
        assert len(calls) == attempts
    with pytest.raises(ValueError, match="max_attempts"):
        art.retry(max_attempts=0)


async def test_retry_waits_longer_each_time_and_not_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(delay_s: float) -> None:
        waits.append(delay_s)

    monkeypatch.setattr(asyncio, "sleep", sleep)

    @art.retry(max_attempts=4, delay=1.0)
    async def fail() -> None:
        raise ValueError

    for _ in range(2):
        with pytest.raises(ValueError):
            await fail()
    for wait, middle in zip(waits, [1, 2, 4, 1, 2, 4], strict=True):
        assert 0.75 * middle <= wait <= 1.25 * middle
    assert waits[:3] != waits[3:]


# --- data sets ---


@given(
    size=st.integers(0, 30),
    per_step=st.integers(1, 7),
    epochs=st.integers(1, 3),
    start=st.integers(0, 30),
    seed=st.integers(),
)
def test_a_resumed_run_sees_what_an_uninterrupted_one_sees(
    size: int, per_step: int, epochs: int, start: int, seed: int
) -> None:
    def batches(initial_step: int) -> list[DatasetBatch[int]]:
        return list(iterate_dataset(list(range(size)), per_step, epochs, initial_step, use_tqdm=False, seed=seed))

    full = batches(0)
    assert batches(start) == full[start:]
    assert [batch.step for batch in full] == list(range(len(full)))
    for epoch in range(epochs):
        seen = [item for batch in full if batch.epoch == epoch for item in batch.items]
        assert sorted(seen) == list(range(size))


def test_dataset_leaves_the_global_generator_alone() -> None:
    random.seed(1)
    expected = random.random()
    random.seed(1)
    list(iterate_dataset([1, 2, 3], use_tqdm=False))
    assert random.random() == expected


def test_orders_differ_by_epoch_and_seed() -> None:
    items = list(range(50))
    one, two = (batch.items for batch in iterate_dataset(items, 50, 2, use_tqdm=False))
    (other,) = (batch.items for batch in iterate_dataset(items, 50, 1, use_tqdm=False, seed=1))
    assert one != two
    assert one != other
    assert next(iterate_dataset(items, 50, 1, use_tqdm=False)).items == one


def test_both_styles_of_unpacking() -> None:
    for batch, epoch, global_step, epoch_step in iterate_dataset("ab", num_epochs=2, initial_step=3, use_tqdm=False):
        assert (len(batch), epoch, global_step, epoch_step) == (1, 1, 3, 1)
    for batch in iterate_dataset("ab", 2, use_tqdm=False):
        assert (sorted(batch.items), batch.step) == (["a", "b"], 0)
    with pytest.raises(ValueError, match="groups_per_step"):
        next(iterate_dataset("ab", 0))


# --- limits ---


async def test_limit_concurrency() -> None:
    running, most = 0, 0

    async def work(key: str, fail: bool = False) -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.005)
        running -= 1
        if fail:
            raise ValueError
        return key

    limited = limit_concurrency(2)(work)
    assert await asyncio.gather(*(limited("a") for _ in range(6))) == ["a"] * 6
    assert most == 2
    by_key = limit_concurrency(1, derive_key=lambda key, fail=False: key)(work)
    most = 0
    await asyncio.gather(*(by_key(key, fail=True) for key in "aabbcc"), return_exceptions=True)
    assert most == 3
    with pytest.raises(ValueError, match="at least 1"):
        limit_concurrency(0)


def test_limit_concurrency_in_several_loops() -> None:
    @limit_concurrency(1)
    async def work() -> None:
        await asyncio.sleep(0.001)

    async def main() -> None:
        await asyncio.gather(work(), work(), work())

    for _ in range(2):
        asyncio.run(main())


def test_per_loop_resources() -> None:
    events: list[str] = []

    async def close(resource: list[int]) -> None:
        await asyncio.sleep(0)
        events.append("closed")

    holder: PerLoop[list[int]] = PerLoop(close)

    async def main() -> None:
        first = holder.get(lambda: [1])
        assert holder.get(lambda: [2]) is first
        assert holder.get(lambda: [3], key="other") == [3]
        assert events == []

    asyncio.run(main())
    assert events == ["closed", "closed"], "without anybody closing it"

    async def closes() -> None:
        holder.get(lambda: [4])
        await holder.close()
        await holder.close()
        assert len(events) == 3

    asyncio.run(closes())
    assert len(events) == 3
    with pytest.raises(RuntimeError):
        holder.get(lambda: [5])


# --- conversions ---


def test_format_message() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"x": 1}'}}
    message = {"role": "assistant", "content": "Hm.", "reasoning_content": "why", "tool_calls": [call]}
    assert format_message(message) == 'assistant:\n(thinking) why\nHm.\n-> look({"x": 1})'
    assert format_message({"role": "user", "content": [{"type": "text", "text": "a"}]}) == (
        'user:\n[{"type": "text", "text": "a"}]'
    )
    assert format_message({"role": "assistant", "content": None}) == "assistant:"


def test_get_model_step(tmp_path: Path) -> None:
    model = SimpleNamespace(project="p", name="m")
    assert get_model_step(model, tmp_path) == 0
    for name in ("0000", "0012", "0003", ".0099.tmp-1", "notes"):
        (tmp_path / "p/models/m/checkpoints" / name).mkdir(parents=True)
    assert get_model_step(model, str(tmp_path)) == 12


class Shape(BaseModel):
    """Like LiteLLM's objects."""

    model_config = ConfigDict(extra="allow")


def litellm_choice(**fields: Any) -> Shape:
    message = {"role": "assistant", "content": "x", "tool_calls": None, "function_call": None}
    return Shape.model_validate({"index": 0, "finish_reason": "stop", "message": message, **fields})


def test_litellm_choices() -> None:
    logprobs = {"content": [{"token": "a", "bytes": [97], "logprob": -0.1, "top_logprobs": []}]}
    choice = convert_litellm_choice_to_openai(
        litellm_choice(logprobs=logprobs, provider_specific_fields={"exchange_id": "e1"})
    )
    assert choice.exchange_id == "e1"  # type: ignore[attr-defined]
    assert choice.message.content == "x"
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert choice.logprobs.content[0].token == "a"
    art.Trajectory(messages_and_choices=[choice])
    message = {
        "role": "assistant",
        "content": None,
        "reasoning_content": "r",
        "provider_specific_fields": {"exchange_id": "e2"},
        "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}],
    }
    choice = convert_litellm_choice_to_openai(litellm_choice(message=message, finish_reason="tool_calls"))
    assert choice.exchange_id == "e2"  # type: ignore[attr-defined]
    assert choice.message.tool_calls is not None
    assert choice.message.tool_calls[0].function.name == "f"  # type: ignore[union-attr]
    assert choice.message.reasoning_content == "r"  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="assistant message"):
        convert_litellm_choice_to_openai(litellm_choice(message={"role": "user", "content": "x"}))


@pytest.mark.parametrize(("version", "adapter"), [("2.54.0", "httpx_aiohttp"), ("3.54.0", "aiohttp")])
async def test_the_client_goes_without_aiohttp_where_openai_has_no_adapter(
    version: str, adapter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """litellm still asks for openai 2, and brings aiohttp without the adapter that openai 2 needs for it."""
    monkeypatch.setattr(openai, "__version__", version)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == adapter else found(name))
    client = make_openai_client("http://127.0.0.1:1/v1", "key")
    assert type(client._client).__name__ == type(openai.DefaultAsyncHttpxClient()).__name__
    await client.close()
