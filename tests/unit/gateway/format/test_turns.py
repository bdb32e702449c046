"""Later turns find the recorded turn, and extend its tokens or declare a branch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from art.config import RenderConfig
from art.gateway.renderer import Branch, RecordedTurn, extend_text, load_renderer
from tests.support.gateway import LOOK_UP, QWEN3, Bench, make_tokenizer, open_bench, system, user

CALL = '<tool_call>\n{"name": "look_up", "arguments": {"key": "a"}}\n</tool_call>'


@pytest.fixture(scope="session")
def qwen3_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("qwen3"), template=QWEN3)


@pytest.fixture(params=["chatml", "qwen3"])
async def turns(
    request: pytest.FixtureRequest, tmp_path: Path, tokenizer_dir: Path, qwen3_dir: Path
) -> AsyncIterator[Bench]:
    """A bench with each of two templates, since both keep the same promises."""
    async with open_bench(tmp_path, tokenizer_dir if request.param == "chatml" else qwen3_dir) as bench:
        yield bench


def text_of(bench: Bench, ids: list[int]) -> str:
    return bench.renderer.tokenizer.text(ids)


async def test_a_later_turn_extends_the_exact_tokens(turns: Bench) -> None:
    tokenizer = turns.renderer.tokenizer
    end = turns.renderer.stop_token_ids[0]
    # "hello" in an unusual tokenisation: re-encoding the text would not give these tokens.
    odd = [tokenizer.token_id(c) for c in "hello"]
    assert odd != tokenizer.encode("hello", add_special_tokens=False)
    turns.engine.script = lambda request: [*odd, end]
    first = turns.exchange(await turns.chat(system("s"), user("hi")))
    messages = [system("s"), user("hi"), {"role": "assistant", "content": "hello"}, user("more")]
    second = turns.exchange(await turns.chat(*messages))
    assert second.parent_id == first.id
    assert second.branch_reason is None
    known = first.prompt_token_ids + first.completion_token_ids
    assert second.prompt_token_ids[: len(known)] == known
    # Beside the odd tokens it is what the template would render.
    assert text_of(turns, second.prompt_token_ids) == tokenizer.render_text(messages, None, add_generation_prompt=True)
    tail = second.prompt_token_ids[len(known) :]
    assert tail == turns.renderer.render(messages, None)[-len(tail) :]


async def test_many_turns_with_tools(turns: Bench) -> None:
    """Within a tool cycle the tokens are extended even if the client changes call ids or drops reasoning."""
    messages: list[dict[str, Any]] = [user("hi")]
    turns.answers(*[f"<think>\nstep {i}\n</think>\n\n{CALL}" for i in range(4)], "<think>\nwell\n</think>\n\ndone")
    previous: Any = None
    for i in range(5):
        response = await turns.chat(*messages, tools=[LOOK_UP])
        exchange = turns.exchange(response)
        if previous is not None:
            known = previous.prompt_token_ids + previous.completion_token_ids
            assert exchange.parent_id == previous.id
            assert exchange.prompt_token_ids[: len(known)] == known
        previous = exchange
        message = response["choices"][0]["message"]
        message.pop("reasoning_content")
        for call in message.get("tool_calls", []):
            call["id"] = f"other_{i}"
            call["function"]["arguments"] = '{"key":"a"}'
        messages += [message, {"role": "tool", "tool_call_id": f"other_{i}", "content": str(i)}]
    assert [m.get("reasoning_content") for m in previous.request_messages if m["role"] == "assistant"] == [
        f"step {i}" for i in range(4)
    ]
    text = text_of(turns, previous.prompt_token_ids)
    assert all(f"step {i}" in text for i in range(4))


async def test_reasoning_that_the_template_drops_is_a_declared_branch(turns: Bench) -> None:
    turns.answers("<think>\nwhy\n</think>\n\nhello", "bye", "end")
    first = await turns.chat(user("hi"))
    messages = [user("hi"), {"role": "assistant", "content": "hello"}, user("more")]
    second = await turns.chat(*messages)
    exchange = turns.exchange(second)
    assert (exchange.parent_id, exchange.branch_reason) == (None, "reasoning_dropped")
    assert exchange.prompt_token_ids == turns.renderer.render(messages, None)
    # No reasoning stands in the second turn's tokens, so the third extends them.
    messages += [{"role": "assistant", "content": "bye"}, user("last")]
    third = turns.exchange(await turns.chat(*messages))
    assert third.parent_id == exchange.id
    assert turns.exchange(first).branch_reason is None


@pytest.mark.parametrize("kind", ["chatml", "qwen3"])
@pytest.mark.parametrize("keep", [True, False])
async def test_keep_reasoning(tmp_path: Path, tokenizer_dir: Path, qwen3_dir: Path, kind: str, keep: bool) -> None:
    directory = tokenizer_dir if kind == "chatml" else qwen3_dir
    async with open_bench(tmp_path, directory, config=RenderConfig(keep_reasoning=keep)) as bench:
        bench.answers(f"<think>\nwhence\n</think>\n\n{CALL}", "<think>\nthus\n</think>\n\nbye", "end")
        answer = (await bench.chat(user("hi"), tools=[LOOK_UP]))["choices"][0]["message"]
        messages = [user("hi"), answer, {"role": "tool", "content": "1"}]
        second = bench.exchange(await bench.chat(*messages, tools=[LOOK_UP]))
        messages += [{"role": "assistant", "content": "bye"}, user("more")]
        third = bench.exchange(await bench.chat(*messages, tools=[LOOK_UP]))
        text = text_of(bench, third.prompt_token_ids)
        if keep:
            assert (third.parent_id, third.branch_reason) == (second.id, None)
            assert "whence" in text
            assert "thus" in text
        else:
            assert (second.branch_reason, third.branch_reason) == ("reasoning_dropped", "reasoning_dropped")
            assert "whence" not in text_of(bench, second.prompt_token_ids)
            assert "thus" not in text


@pytest.mark.parametrize("answer", ["hello world again", "<think>\nwhy oh why"])
async def test_a_truncated_answer_gets_its_end_tokens(turns: Bench, answer: str) -> None:
    turns.answers(answer, "x")
    response = await turns.chat(user("hi"), max_tokens=4)
    first = turns.exchange(response)
    message = response["choices"][0]["message"]
    result = {"role": "tool", "content": "go on"}  # no new query, so that reasoning stays
    second = turns.exchange(await turns.chat(user("hi"), message, result))
    known = first.prompt_token_ids + first.completion_token_ids
    assert second.parent_id == first.id
    assert second.prompt_token_ids[: len(known)] == known
    added = text_of(turns, second.prompt_token_ids[len(known) :])
    assert added.startswith("</think><|im_end|>\n" if "think" in answer else "<|im_end|>\n")


async def test_an_answer_cut_by_a_stop_string_gets_its_end_tokens(turns: Bench) -> None:
    turns.answers("hello END world", "x")
    first = turns.exchange(await turns.chat(user("hi"), stop=["END"]))
    second = turns.exchange(await turns.chat(user("hi"), {"role": "assistant", "content": "hello "}, user("more")))
    known = first.prompt_token_ids + first.completion_token_ids
    assert second.parent_id == first.id
    assert text_of(turns, second.prompt_token_ids[len(known) :]).startswith("<|im_end|>\n<|im_start|>user\nmore")


async def test_an_edited_answer_is_a_branch(turns: Bench) -> None:
    turns.answers("hello", "x", "y")
    first = await turns.chat(user("hi"))
    edited = {"role": "assistant", "content": "hullo"}
    second = turns.exchange(await turns.chat(user("hi"), edited, user("more")))
    assert (second.parent_id, second.branch_reason) == (None, "unknown_history")
    named = {**edited, "exchange_id": first["choices"][0]["exchange_id"]}
    third = turns.exchange(await turns.chat(user("hi"), named, user("more")))
    assert (third.parent_id, third.branch_reason) == (None, "edited_history")
    assert third.request_messages == [user("hi"), edited, user("more")]


async def test_other_tools_are_a_branch_of_their_own(turns: Bench) -> None:
    call = '<tool_call>\n{"name": "look_up", "arguments": {"key": "a"}}\n</tool_call>'
    renamed = {"type": "function", "function": {**LOOK_UP["function"], "name": "find"}}
    turns.answers(call, "x", "y", "z", "v", "w")
    first = await turns.chat(user("hi"), tools=[LOOK_UP])
    said = first["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "found"}
    more = turns.exchange(
        await turns.chat(user("hi"), said, result, tools=[LOOK_UP, renamed])
    )  # known by the call's id
    assert (more.parent_id, more.branch_reason) == (None, "tools_changed")
    edited = turns.exchange(await turns.chat(user("ho"), said, result, tools=[LOOK_UP, renamed]))
    assert edited.branch_reason == "unknown_history"

    await turns.chat(user("hi"), rollout_id="r1", tools=[LOOK_UP])
    plain = {"role": "assistant", "content": "z"}
    in_rollout = await turns.chat(user("hi"), plain, user("more"), rollout_id="r1")  # the newest of its rollout
    assert turns.exchange(in_rollout).branch_reason == "tools_changed"
    named = {**said, "exchange_id": first["choices"][0]["exchange_id"]}
    assert turns.exchange(await turns.chat(user("hi"), named, result)).branch_reason == "tools_changed"


@pytest.mark.parametrize(
    "messages",
    [
        [user("ho"), {"role": "assistant", "content": "hello"}, user("more")],  # another question
        [system("s"), user("hi"), {"role": "assistant", "content": "hello"}, user("more")],
        [user("hi"), user("hi"), {"role": "assistant", "content": "hello"}, user("more")],
    ],
)
async def test_a_changed_history_does_not_continue_the_recorded_one(turns: Bench, messages: list[Any]) -> None:
    turns.answers("hello", "x")
    await turns.chat(user("hi"))
    second = turns.exchange(await turns.chat(*messages))
    assert (second.parent_id, second.branch_reason) == (None, "unknown_history")


async def test_other_tools_or_settings_make_another_conversation(turns: Bench) -> None:
    turns.answers("hello", "x", "y")
    await turns.chat(user("hi"))
    history = [user("hi"), {"role": "assistant", "content": "hello"}, user("more")]
    for fields in ({"tools": [LOOK_UP]}, {"chat_template_kwargs": {"enable_thinking": False}}):
        exchange = turns.exchange(await turns.chat(*history, **fields))
        assert exchange.branch_reason == "unknown_history"


async def test_an_unrecorded_answer_after_a_recorded_one_is_a_branch(turns: Bench) -> None:
    turns.answers("hello", "x")
    await turns.chat(user("hi"))
    other = [{"role": "assistant", "content": "not sampled here"}, user("more")]
    second = turns.exchange(await turns.chat(user("hi"), {"role": "assistant", "content": "hello"}, user("ok"), *other))
    assert (second.parent_id, second.branch_reason) == (None, "unknown_history")


async def test_content_parts_and_developer_role_make_no_difference(turns: Bench) -> None:
    turns.answers("hello", "x")
    first = turns.exchange(await turns.chat(system("s"), user("hi there")))
    parts = {"role": "user", "content": [{"type": "text", "text": "hi "}, {"type": "text", "text": "there"}]}
    answer = {"role": "assistant", "content": "hello", "refusal": None, "tool_calls": None, "annotations": []}
    developer = {"role": "developer", "content": "s"}
    second = turns.exchange(await turns.chat(developer, parts, answer, user("more")))
    assert second.parent_id == first.id


async def test_each_rollout_continues_its_own_tokens(turns: Bench) -> None:
    """The rollouts of a group begin with the same messages, but each continues its own tokens."""
    tokenizer, end = turns.renderer.tokenizer, turns.renderer.stop_token_ids[0]
    spellings = [tokenizer.encode("hello", add_special_tokens=False), [tokenizer.token_id(c) for c in "hello"]]
    history = [user("hi"), {"role": "assistant", "content": "hello"}, user("more")]
    firsts = {}
    for name, ids in zip(("r1", "r2"), spellings, strict=True):
        turns.engine.script = lambda request, ids=ids: [*ids, end]
        firsts[name] = turns.exchange(await turns.chat(user("hi"), rollout_id=name))
    for restart in (False, True):
        if restart:
            turns.forget()
        for name in ("r1", "r2"):
            second = turns.exchange(await turns.chat(*history, rollout_id=name))
            assert second.parent_id == firsts[name].id
        assert turns.exchange(await turns.chat(*history, rollout_id="r3")).parent_id == firsts["r2"].id  # the latest
        named = {**history[1], "exchange_id": firsts["r1"].id}
        second = turns.exchange(await turns.chat(history[0], named, history[2], rollout_id="r2"))
        assert second.parent_id == firsts["r1"].id


async def test_a_restart_forgets_nothing(turns: Bench) -> None:
    messages: list[dict[str, Any]] = [user("hi")]
    turns.answers("<think>\nwhy\n</think>\n\none", "two", "three")
    for _ in range(3):
        turns.forget()
        answer = (await turns.chat(*messages))["choices"][0]
        messages += [
            {"role": "assistant", "content": answer["message"]["content"]},
            {"role": "tool", "content": "go on"},
        ]
    turns.forget()
    last = turns.recorder.get([answer["exchange_id"]])[0]
    middle = turns.recorder.get([last.parent_id])[0]
    first = turns.recorder.get([middle.parent_id])[0]
    assert first.parent_id is None
    assert last.prompt_token_ids[: len(middle.prompt_token_ids)] == middle.prompt_token_ids
    assert last.request_messages[1]["reasoning_content"] == "why"


async def test_concurrent_rollouts_do_not_mix(turns: Bench) -> None:
    turns.engine.delay_s = 0.001
    end = turns.renderer.stop_token_ids[0]
    encode = turns.renderer.tokenizer.encode

    def script(request: Any) -> list[int]:
        return [*encode(f"answer {request.seed}", add_special_tokens=False), end]

    turns.engine.script = script

    async def rollout(number: int) -> None:
        messages = [user("hi")]
        previous = None
        for _ in range(4):
            response = await turns.chat(*messages, seed=number)
            exchange = turns.exchange(response)
            assert exchange.parent_id == previous
            previous = exchange.id
            messages += [response["choices"][0]["message"], user(f"more {number}")]

    await asyncio.gather(*(rollout(i) for i in range(16)))


# --- text bridge ---


def test_the_text_between_two_turns_is_found() -> None:
    before = "u: hi| a: hello|\n"
    assert extend_text(before, before + "u: more| a:", "|", keep_reasoning=False) == "\nu: more| a:"
    rewritten = extend_text(before, "TOOLS u: hi| a: hello|\nu: more| a:", "|", keep_reasoning=True)
    assert rewritten == Branch("template_rewrites_history")
    assert extend_text("no end", "no end at all", "|", keep_reasoning=True) == Branch("template_without_turn_end")
    assert extend_text(before, "u: hi|", "|", keep_reasoning=True) == Branch("template_rewrites_history")


@given(st.lists(st.sampled_from(["", "a", "<think>\n\n</think>\n\n", "<think>x</think>"]), max_size=4), st.booleans())
def test_which_think_blocks_a_template_may_drop(pieces: list[str], keep: bool) -> None:
    """A template may drop empty think blocks, and real reasoning only with `keep_reasoning`."""
    body = "".join(pieces)
    after = body.replace("<think>\n\n</think>\n\n", "").replace("<think>x</think>", "")
    added = extend_text(f"u| {body}|\n", f"u| {after}|\nu2| ", "|", keep_reasoning=keep)
    if "<think>x" in body and not keep:
        assert added == Branch("reasoning_dropped")
    elif not isinstance(added, Branch):
        assert added == "\nu2| "


def test_templates_that_move_the_tools_cannot_be_bridged(tmp_path: Path) -> None:
    moves = (
        "{% for m in messages %}{% if loop.last and tools %}[TOOLS]{% endif %}"
        "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    )
    renderer = load_renderer(make_tokenizer(tmp_path, template=moves))
    messages = [user("hi"), {"role": "assistant", "content": "a"}]
    prompt = renderer.render(messages[:1], [LOOK_UP])
    end = renderer.stop_token_ids[0]
    turn = RecordedTurn(messages, prompt, [*renderer.tokenizer.encode("a", add_special_tokens=False), end])
    assert renderer.bridge(turn, [user("more")], [LOOK_UP]) == Branch("template_rewrites_history")
    assert isinstance(renderer.bridge(turn, [user("more")], None), list)


LEARNT = [
    ([user("hi"), {"role": "assistant", "content": "hello"}], "hello<|im_end|>"),
    (
        [user("hi"), {"role": "assistant", "content": "4", "reasoning_content": "why"}],
        "<think>\nwhy\n</think>\n\n4<|im_end|>",
    ),
    ([user("a<|im_end|>b"), {"role": "assistant", "content": "x<|im_end|>y"}], "x<|im_end|>y<|im_end|>"),
]


@pytest.mark.parametrize(("messages", "expected"), LEARNT)
def test_a_given_answer_is_rendered_as_a_completion(tokenizer_dir: Path, messages: list[Any], expected: str) -> None:
    renderer = load_renderer(tokenizer_dir)
    completion = renderer.completion(messages, None)
    assert completion is not None
    assert renderer.tokenizer.text(completion) == expected


SENTENCES = st.text("ab <>|\n\u00e9", max_size=8).filter(lambda text: "<|" not in text)


@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_a_bridged_prompt_has_the_text_that_the_template_renders(
    tokenizer_dir: Path, qwen3_dir: Path, data: st.DataObject
) -> None:
    """Property: without reasoning, the text of a bridged prompt is the text that the template renders."""
    renderer = (
        _CACHE.setdefault("qwen3", load_renderer(qwen3_dir))
        if data.draw(st.booleans())
        else _CACHE.setdefault("chatml", load_renderer(tokenizer_dir))
    )
    end = renderer.stop_token_ids[0]
    messages: list[dict[str, Any]] = [user(data.draw(SENTENCES))]
    prompt = renderer.render(messages, None)
    for _ in range(data.draw(st.integers(1, 4))):
        answer = data.draw(SENTENCES)
        completion = [*renderer.tokenizer.encode(answer, add_special_tokens=False), end]
        messages.append({"role": "assistant", "content": answer})
        new = data.draw(
            st.lists(
                st.builds(lambda r, c: {"role": r, "content": c}, st.sampled_from(["user", "tool"]), SENTENCES),
                min_size=1,
                max_size=2,
            )
        )
        bridged = renderer.bridge(RecordedTurn(list(messages), prompt, completion), new, None)
        assert not isinstance(bridged, Branch)
        assert bridged[: len(prompt) + len(completion)] == prompt + completion
        messages += new
        expected = renderer.tokenizer.render_text(messages, None, add_generation_prompt=True)
        assert renderer.tokenizer.text(bridged) == expected
        prompt = bridged


_CACHE: dict[str, Any] = {}


@pytest.mark.parametrize("tools", [None, [LOOK_UP]])
def test_the_completions_of_a_conversation_are_those_of_its_messages(
    tokenizer_dir: Path, qwen3_dir: Path, tools: Any
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look_up", "arguments": '{"key": "a"}'}}
    messages = [
        user("hi"), {"role": "assistant", "content": "hello", "reasoning_content": "why"}, user("more"),
        {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "one"}, user("and?"), {"role": "assistant", "content": "two"},
    ]  # fmt: skip
    for renderer in (load_renderer(tokenizer_dir), load_renderer(qwen3_dir)):
        expected = [
            (i, renderer.render(messages[:i], tools), renderer.completion(messages[: i + 1], tools))
            for i in (1, 3, 5, 7)
        ]
        assert list(renderer.completions(messages, tools)) == expected
