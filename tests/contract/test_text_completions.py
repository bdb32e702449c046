"""Text completions and tokens of prompts, driven by the real client: what is sampled, recorded, collected and trained."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx2
import openai
import pytest

import art
from art.client.training.submission import wire_groups
from art.credit.resolve import exchange_ids, resolve
from art.errors import ProcessError
from art.protocol.dialects.text_completions import CompletionAnswer, TokenizeAnswer
from tests.support.app import KEY, AppBench
from tests.support.gateway import LOOK_UP, ScriptedEngine, user
from tests.support.served_app import ServedApp

MODEL = "games/agent"
PROMPT = "hello the world"


def tokens_of(app: AppBench, text: str) -> list[int]:
    return app.bench.renderer.tokenizer.encode(text, add_special_tokens=False)


def recorded(app: AppBench, choice: Any) -> Any:
    return app.bench.recorder.get([choice.exchange_id])[0]


async def test_a_prompt_reaches_the_engine_as_it_is_and_is_recorded(app: AppBench, oai: openai.AsyncOpenAI) -> None:
    app.bench.answers(" <think>name</think>\n")
    answer = await oai.completions.create(model=MODEL, prompt=PROMPT, seed=7, temperature=0.5)
    choice, asked = answer.choices[0], app.bench.engine.requests[0]
    assert asked.prompt_token_ids == tokens_of(app, PROMPT)  # no chat template
    assert (asked.max_tokens, asked.seed, asked.temperature) == (16, 7, 0.5)
    assert (choice.text, choice.finish_reason) == (" <think>name</think>\n", "stop")  # nothing is parsed or stripped
    exchange = recorded(app, choice)
    assert exchange.prompt_token_ids == asked.prompt_token_ids
    assert exchange.completion_token_ids == [*tokens_of(app, choice.text), app.bench.renderer.stop_token_ids[0]]
    assert len(exchange.sampling_logprobs) == len(exchange.completion_token_ids)
    assert (exchange.policy_version, exchange.temperature, exchange.seed) == (3, 0.5, 7)
    assert exchange.request_messages == [user(PROMPT)]
    assert exchange.message == {"role": "assistant", "content": choice.text}
    assert answer.usage
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
        len(exchange.prompt_token_ids), len(exchange.completion_token_ids),
    )  # fmt: skip
    assert app.bench.recorder.token_counts("games", "agent")[::2] == (
        len(exchange.prompt_token_ids), len(exchange.completion_token_ids),
    )  # fmt: skip
    CompletionAnswer.model_validate(answer.model_dump(exclude_unset=True))


async def test_tokens_as_a_prompt(app: AppBench, oai: openai.AsyncOpenAI) -> None:
    app.bench.answers("one", "two")
    token_ids = tokens_of(app, "world hello")
    await oai.completions.create(model=MODEL, prompt=token_ids)
    await oai.completions.create(model=MODEL, prompt=[token_ids])
    assert [request.prompt_token_ids for request in app.bench.engine.requests] == [token_ids] * 2


async def test_choices_of_several_prompts(app: AppBench, oai: openai.AsyncOpenAI) -> None:
    end = app.bench.renderer.stop_token_ids[0]
    app.bench.engine.script = lambda request: [*request.prompt_token_ids[:1], end]
    prompts = ["hello world", "system", "user tool"]
    fields: Any = {"model": MODEL, "prompt": prompts, "n": 2, "seed": 10}
    answer = await oai.completions.create(**fields)
    assert [choice.index for choice in answer.choices] == list(range(6))
    for choice in answer.choices:
        exchange = recorded(app, choice)
        assert exchange.request_messages == [user(prompts[choice.index // 2])]
        assert exchange.seed == 10 + choice.index
    num_prompt = sum(len(tokens_of(app, prompt)) for prompt in prompts)
    assert answer.usage
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (num_prompt, 12)
    chunks = [
        chunk
        async for chunk in await oai.completions.create(stream=True, stream_options={"include_usage": True}, **fields)
    ]
    texts: dict[int, str] = {}
    for chunk in chunks:
        for part in chunk.choices:
            texts[part.index] = texts.get(part.index, "") + part.text
    assert texts == {choice.index: choice.text for choice in answer.choices}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].usage == answer.usage


async def test_a_stream_has_the_text_and_the_reason(app: AppBench, oai: openai.AsyncOpenAI) -> None:
    app.bench.answers(*["one two END three"] * 2)
    fields: Any = {"model": MODEL, "prompt": PROMPT, "stop": ["never", "END"], "max_tokens": 99, "logprobs": 2}
    whole = (await oai.completions.create(**fields)).choices[0]
    parts = [chunk.choices[0] async for chunk in await oai.completions.create(stream=True, **fields)]
    assert "".join(part.text for part in parts) == whole.text == "one two "
    assert [part.finish_reason for part in parts if part.finish_reason] == [whole.finish_reason] == ["stop"]
    assert parts[-1].stop_reason == whole.stop_reason == "END"  # type: ignore[attr-defined]
    assert whole.logprobs
    assert [token for part in parts if part.logprobs for token in part.logprobs.tokens or []] == whole.logprobs.tokens
    offsets = [offset for part in parts if part.logprobs for offset in part.logprobs.text_offset or []]
    assert offsets == whole.logprobs.text_offset


async def test_log_probs(app: AppBench, oai: openai.AsyncOpenAI) -> None:
    app.bench.answers("né 😀 hello", "hello")
    choice = (await oai.completions.create(model=MODEL, prompt=PROMPT, logprobs=2)).choices[0]
    exchange, logprobs = recorded(app, choice), choice.logprobs
    assert logprobs
    assert logprobs.token_logprobs == exchange.sampling_logprobs
    assert logprobs.tokens
    assert logprobs.text_offset
    assert logprobs.top_logprobs
    assert len(logprobs.tokens) == len(exchange.completion_token_ids)
    assert all(len(top) == 2 for top in logprobs.top_logprobs)
    for token, offset in zip(logprobs.tokens[:-1], logprobs.text_offset, strict=False):
        assert "\ufffd" in token or choice.text[offset : offset + len(token)] == token
    assert logprobs.text_offset[-1] == len(choice.text)  # the token that ended the answer
    plain = (await oai.completions.create(model=MODEL, prompt=PROMPT, logprobs=0)).choices[0].logprobs
    assert plain is not None
    assert plain.token_logprobs
    assert plain.top_logprobs is None


@pytest.mark.parametrize(
    ("fields", "param", "part"),
    [
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"echo": True}, "echo", "not supported"),
        ({"best_of": 3}, "best_of", "not supported"),
        ({"presence_penalty": 1}, "presence_penalty", "not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "not supported"),
        ({"guided_choice": ["a"]}, "guided_choice", "not supported"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", "not supported"),
        ({"messages": []}, "messages", "unknown parameter"),
        ({"prompt": ""}, "prompt", "no tokens"),
        ({"prompt": []}, "prompt", "a text or a list of token ids"),
        ({"prompt": ["a", 3]}, "prompt", "a text or a list of token ids"),
        ({"prompt": [True]}, "prompt", "a text or a list of token ids"),
        ({"prompt": [-1]}, "prompt", "a text or a list of token ids"),
        ({"prompt": [2**32]}, "prompt", "a text or a list of token ids"),
        ({"prompt": [100_000]}, "prompt", "no token of this model"),
        ({"prompt": "word " * 5000}, "prompt", "context"),
        ({"prompt": "word " * 500_000}, "prompt", "`prompt` is too long"),
        ({"prompt": [1] * 4096}, "prompt", "leaves no room"),
        ({"prompt": [1] * 50_000}, "prompt", "leaves no room"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt", "at most 128"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"logprobs": True}, "logprobs", "integer"),
        ({"stream_options": {}}, "stream_options", "needs `stream"),
        ({"stop": list("abcde")}, "stop", "at most 4"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ],
)  # fmt: skip
async def test_what_completions_refuse(
    app: AppBench, http: httpx2.AsyncClient, fields: Any, param: str, part: str
) -> None:
    answer = await http.post("/v1/completions", json={"model": MODEL, "prompt": PROMPT} | fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert part in error["message"]
    assert app.bench.engine.requests == []


async def test_a_prompt_that_fails_ends_the_others(app: AppBench, http: httpx2.AsyncClient) -> None:
    class Engine(ScriptedEngine):
        async def generate(self, request: Any, *, stream: bool) -> Any:
            if len(self.requests) == 1:
                raise ProcessError("the engine died")
            async for chunk in super().generate(request, stream=stream):
                yield chunk

    engine = Engine(lambda request: [5, 6], delay_s=30)
    app.bench.resolver.policy = _with_engine(app, engine)
    async with asyncio.timeout(60):
        answer = await http.post("/v1/completions", json={"model": MODEL, "prompt": ["one", "two"]})
    assert answer.status_code == 503
    assert (engine.num_running, engine.num_cancelled) == (0, 1)


def _with_engine(app: AppBench, engine: Any) -> Any:
    return replace(app.bench.resolver.policy, engine=engine)


async def test_a_chat_does_not_continue_the_tokens_of_a_bare_prompt(app: AppBench, oai: openai.AsyncOpenAI) -> None:
    app.bench.answers("fine", "good")
    text = (await oai.completions.create(model=MODEL, prompt=PROMPT)).choices[0]
    said: Any = {"role": "assistant", "content": "fine", "exchange_id": text.exchange_id}  # type: ignore[attr-defined]
    chat = await oai.chat.completions.create(model=MODEL, messages=[user(PROMPT), said, user("and?")])
    exchange = recorded(app, chat.choices[0])
    assert exchange.parent_id is None
    assert app.bench.renderer.tokenizer.text(exchange.prompt_token_ids).startswith("<|im_start|>user\n")


async def test_rollouts_of_text_completions_are_trained(served: ServedApp) -> None:
    """They are collected as trajectories, whose token paths are exactly what was sampled."""
    bench = served.app.bench
    bench.answers(" one", " two")
    client = openai.AsyncOpenAI(base_url=served.policy.rollout_base_url("r1"), api_key=KEY)
    async with client:
        first = (await client.completions.create(model="agent", prompt=PROMPT)).choices[0]
        tokens = [*recorded(served.app, first).prompt_token_ids, *recorded(served.app, first).completion_token_ids]
        second = (await client.completions.create(model="agent", prompt=[*tokens, 5])).choices[0]
    trajectory = await served.policy.get_rollout("r1")
    trajectory.reward = 1.0
    groups = wire_groups([art.TrajectoryGroup([trajectory])])
    exchanges = bench.recorder.find(exchange_ids(groups))
    (group,) = resolve(groups, bench.recorder.find_answers, project="games", name="agent")
    (path,) = group.trajectories[0].paths  # the second prompt continues the first answer
    assert path.num_tokens == len([*tokens, 5, *recorded(served.app, second).completion_token_ids])
    assert len(path.answers) == 2
    assert sorted(exchanges) == sorted([first.exchange_id, second.exchange_id])  # type: ignore[attr-defined]
    assert trajectory.initial_policy_version == 3


async def test_a_text_completion_in_a_trajectory_says_what_to_do(app: AppBench, oai: openai.AsyncOpenAI) -> None:
    app.bench.answers("one")
    choice = (await oai.completions.create(model=MODEL, prompt=PROMPT)).choices[0]
    with pytest.raises(ValueError, match=r"model\.get_rollout"):
        art.Trajectory(messages_and_choices=[user(PROMPT), choice])


async def test_text_completions_inside_a_capture(served: ServedApp) -> None:
    served.app.bench.answers("fine", "good")
    async with art.capture(served.policy) as captured:
        await served.policy.openai_client().completions.create(model="games/agent", prompt=PROMPT)
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=KEY) as foreign:
            await foreign.completions.create(model="games/agent", prompt="world")
    histories = [captured.trajectory, *captured.trajectory.additional_histories]
    assert sorted(history.messages()[0]["content"] for history in histories) == [PROMPT, "world"]


# --- tokens ---


@pytest.mark.parametrize("root", ["", "/v1", "/projects/games", "/rollouts/r1/v1"])
async def test_tokens_of_a_prompt_and_back(app: AppBench, http: httpx2.AsyncClient, root: str) -> None:
    body = {"model": MODEL, "prompt": "hello 😀 world", "return_token_strs": True}
    answer = (await http.post(f"{root}/tokenize", json=body)).json()
    TokenizeAnswer.model_validate(answer)
    assert answer["tokens"] == tokens_of(app, "hello 😀 world")
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 4096)
    assert "".join(answer["token_strs"]).startswith("helloĠ")
    back = (await http.post(f"{root}/detokenize", json={"model": MODEL, "tokens": answer["tokens"]})).json()
    assert back == {"prompt": "hello 😀 world"}


async def test_tokens_of_messages_are_those_of_a_chat(app: AppBench, http: httpx2.AsyncClient) -> None:
    app.bench.answers("fine", "good")
    fields: Any = {"model": MODEL, "messages": [user("hi")], "tools": [LOOK_UP]}
    asked: Any = (await http.post("/v1/chat/completions", json=fields)).json()
    counted = (await http.post("/tokenize", json=fields)).json()
    assert counted["tokens"] == app.bench.engine.requests[0].prompt_token_ids
    assert counted["token_strs"] is None
    fields["messages"] = [user("hi"), asked["choices"][0]["message"], user("and?")]
    counted = (await http.post("/tokenize", json=fields)).json()
    await http.post("/v1/chat/completions", json=fields)
    assert counted["tokens"] == app.bench.engine.requests[1].prompt_token_ids
    closed = (await http.post("/tokenize", json=fields | {"add_generation_prompt": False})).json()
    text = app.bench.renderer.tokenizer.text
    assert text(counted["tokens"]) == text(closed["tokens"]) + "<|im_start|>assistant\n"


async def test_tokens_of_more_than_the_context(app: AppBench, http: httpx2.AsyncClient) -> None:
    for field in ({"prompt": "word " * 5000}, {"messages": [user("word " * 5000)]}):
        assert (await http.post("/tokenize", json={"model": MODEL, **field})).json()["count"] > 4096


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [user("a")]}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": [LOOK_UP]}, "tools"),
        ("/tokenize", {"prompt": "word " * 800_000}, "prompt"),
        ("/tokenize", {"messages": [user("a")], "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": [user("word " * 800_000)], "add_generation_prompt": False}, "messages"),
        ("/tokenize", {"messages": [{"role": "nobody"}]}, "messages.0.role"),
        ("/detokenize", {"tokens": [100_000]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
async def test_what_has_no_tokens(http: httpx2.AsyncClient, path: str, fields: Any, param: str) -> None:
    answer = await http.post(path, json={"model": MODEL} | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
