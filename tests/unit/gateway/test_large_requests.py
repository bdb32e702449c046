"""Large requests do not hold up the event loop, and those that cannot fit are refused before they are tokenised."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from art.errors import ContextLengthError
from art.gateway.renderer import Branch, extend_text
from art.gateway.tokenizer import Tokenizer
from art.gateway.turn import check_size
from art.protocol.chat_completions import parse_chat_request
from tests.support.gateway import Bench, open_bench, user

CONTEXT = 4096
WORDS = "hello world, this is the way of the agent. "


def text_of(num_chars: int) -> str:
    return (WORDS * (num_chars // len(WORDS) + 1))[:num_chars]


class Encoded:
    """Counts the characters that a tokenizer encodes, and notes the threads."""

    def __init__(self, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_chars = 0
        self.threads: set[int] = set()
        encode = tokenizer.encode

        def counted(text: str, add_special_tokens: bool = False) -> list[int]:
            self.num_chars += len(text)
            if len(text) > 100:
                self.threads.add(threading.get_ident())
            return encode(text, add_special_tokens)

        monkeypatch.setattr(tokenizer, "encode", counted)


@pytest.fixture
def encoded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Encoded:
    return Encoded(bench.renderer.tokenizer, monkeypatch)


async def test_more_characters_than_the_context_can_hold(bench: Bench, encoded: Encoded) -> None:
    num_chars = 8 * 8 * CONTEXT + 1
    with pytest.raises(ContextLengthError, match=f"{num_chars} characters, are too many"):
        await bench.chat(user(text_of(num_chars)))
    assert encoded.num_chars == 0


async def test_more_messages_than_tokens(bench: Bench, encoded: Encoded) -> None:
    with pytest.raises(ContextLengthError, match="32769 messages"):
        await bench.chat(*[user("")] * (8 * CONTEXT + 1))
    assert encoded.num_chars == 0


def test_short_texts_of_large_tokens_still_fit() -> None:
    """A token of a tiny model may be a whole phrase."""
    messages = [{"role": "user", "content": " arguments" * 20_000}]
    check_size(messages, None, 64, limit="it")
    with pytest.raises(ContextLengthError):
        check_size(messages * 2, None, 64, limit="it")


async def test_large_prompts_are_built_in_a_thread(tmp_path: Path, tokenizer_dir: Path, monkeypatch: Any) -> None:
    async with open_bench(tmp_path, tokenizer_dir, max_context=10**6) as bench:
        encoded = Encoded(bench.renderer.tokenizer, monkeypatch)
        render, released = bench.renderer.tokenizer.render_text, threading.Event()

        def waiting(*args: Any, **kwargs: Any) -> str:
            assert released.wait(60), "the event loop did not run while the template was rendered"
            return render(*args, **kwargs)

        monkeypatch.setattr(bench.renderer.tokenizer, "render_text", waiting)
        bench.answers("yes", "no")
        large = asyncio.create_task(bench.chat(user(text_of(100_000))))
        await asyncio.sleep(0.05)
        assert not large.done()
        released.set()
        first = await large
        assert threading.get_ident() not in encoded.threads
        answer = {**first["choices"][0]["message"]}
        encoded.threads.clear()
        second = await bench.chat(user(text_of(100_000)), answer, user("hello"))  # extends the recorded tokens
        assert bench.exchange(second).parent_id == first["choices"][0]["exchange_id"]
        assert threading.get_ident() not in encoded.threads


async def test_small_prompts_need_no_thread(bench: Bench, encoded: Encoded) -> None:
    bench.answers("yes")
    await bench.chat(user(text_of(500)))
    assert encoded.threads == {threading.get_ident()}


async def test_tokens_of_a_long_request_are_counted(bench: Bench) -> None:
    request = parse_chat_request({"model": "games/agent", "messages": [user(text_of(40_000))]})
    assert len(await bench.gateway.prompt_token_ids(request)) > CONTEXT
    request.messages[0]["content"] = text_of(8 * 8 * CONTEXT + 1)
    with pytest.raises(ContextLengthError):
        await bench.gateway.prompt_token_ids(request)


@pytest.mark.parametrize("text", [text_of(60_000), "😀 日本語 " * 5000, "<|im_end|>hello<think>" * 2000, " " * 50_000])
def test_long_texts_have_the_tokens_of_the_plain_method(tokenizer: Tokenizer, text: str) -> None:
    plain = tokenizer.backend.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text, add_special_tokens=False) == plain


def test_open_think_tags_take_no_more_time_than_other_text() -> None:
    """Each open tag was searched to the end of the text: time grew with the square of their number."""

    def took_s(tag: str) -> float:
        before = f"{tag * 8000}<|im_end|>"
        started = time.thread_time()
        assert isinstance(extend_text(before, f"x{before}", "<|im_end|>", keep_reasoning=True), Branch)
        return time.thread_time() - started

    plain = min(took_s("<thunk>") for _ in range(3))
    assert min(took_s("<think>") for _ in range(3)) < 20 * plain
