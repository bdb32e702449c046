"""Helpers of gateway and server tests: a small ChatML tokenizer, scripted engines, a gateway on a temporary database."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from art.config import RenderConfig
from art.engine import EngineInfo, GenerateRequest, TokenChunk, only_chunk
from art.errors import NotFoundError
from art.gateway.chat import Gateway
from art.gateway.policies import PolicyRef
from art.gateway.renderer import Renderer, load_renderer
from art.protocol.chat_completions import parse_chat_request
from art.record.recorder import Recorder
from art.storage.database import Database

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

CHATML = """\
{%- if tools %}{{ '<|im_start|>system\\nTools:' }}{% for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and m.reasoning_content and loop.index0 > ns.last %}{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}{{ '\\n<tool_call>\\n' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson + '\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"""
"""Drops the reasoning of answers before the last user message, and takes `enable_thinking`."""

QWEN3 = (Path(__file__).parents[2] / "src/art/testing/tiny_template.jinja").read_text()
"""The tiny model's own template, which claims to be that of Qwen3."""

LOOK_UP = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {"key": {"type": "string"}}}},
}


def make_tokenizer(directory: Path, *, template: str | None = CHATML) -> Path:
    """Train a byte-level BPE of 400 tokens and write it in Hugging Face's layout."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(
        ["hello world system user assistant tool the name arguments look_up key END"] * 20, trainer
    )
    backend.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": {"__type": "AddedToken", "content": "<|endoftext|>"},
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(
        json.dumps({"eos_token_id": backend.token_to_id("<|endoftext|>")})
    )
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


Script = Callable[[GenerateRequest], list[int]]


class ScriptedEngine:
    """Answers what `script` says, one token per chunk when streaming. Counts what it was asked and what was cancelled."""

    def __init__(self, script: Script, *, delay_s: float = 0.0) -> None:
        self.script = script
        self.delay_s = delay_s
        self.requests: list[GenerateRequest] = []
        self.num_cancelled = 0
        self.num_running = 0
        self.error: Exception | None = None

    async def info(self) -> EngineInfo:
        return EngineInfo(vocab_size=512, max_context=4096, dtype="float32", device="cpu")

    async def generate_whole(self, request: GenerateRequest) -> TokenChunk:
        return await only_chunk(self.generate(request, stream=False))

    async def generate(self, request: GenerateRequest, *, stream: bool) -> AsyncGenerator[TokenChunk, None]:
        if self.error is not None:
            raise self.error
        self.requests.append(request)
        self.num_running += 1
        over = False
        try:
            ids = self.script(request)
            reason = "stop" if ids and ids[-1] in request.stop_token_ids else "length"
            if len(ids) > request.max_tokens:
                ids, reason = ids[: request.max_tokens], "length"
            pieces = [[token] for token in ids] if stream and ids else [ids]
            done = 0
            for i, piece in enumerate(pieces):
                await asyncio.sleep(self.delay_s)
                last = i == len(pieces) - 1
                over = last
                logprobs = [-0.5 - 0.001 * (done + k) for k in range(len(piece))]
                done += len(piece)
                top = [[(token, -0.5), (0, -3.0)][: request.num_top_logprobs] for token in piece]
                yield TokenChunk(
                    token_ids=piece,
                    logprobs=logprobs,
                    top_logprobs=top if request.num_top_logprobs else [],
                    finish_reason=reason if last else None,  # type: ignore[arg-type]
                    num_cached_tokens=3 if last else 0,
                )
        finally:
            self.num_running -= 1
            self.num_cancelled += not over


class Resolver:
    """One model, `games/agent`, at step 3."""

    def __init__(self, engine: Any, renderer: Renderer, max_context: int = 4096) -> None:
        self.policy = PolicyRef(
            project="games",
            name="agent",
            policy_version=3,
            engine=engine,
            adapter="games/agent@3",
            renderer=renderer,
            max_context=max_context,
        )

    def resolve_ready(self, model: str) -> PolicyRef | None:
        return self.policy if model in ("games/agent", "agent") else None

    def is_ready(self, policy: PolicyRef) -> bool:
        return policy is self.policy

    async def resolve(self, model: str) -> PolicyRef:
        if (policy := self.resolve_ready(model)) is not None:
            return policy
        raise NotFoundError(f"there is no model {model!r}", param="model")


class Bench:
    """A gateway with everything around it."""

    def __init__(self, database: Database, renderer: Renderer, engine: Any, max_context: int = 4096) -> None:
        self.database = database
        self.renderer = renderer
        self.engine = engine
        self.resolver = Resolver(engine, renderer, max_context)
        self.recorder = Recorder(database)
        self.gateway = Gateway(self.resolver, self.recorder)

    def forget(self) -> None:
        """What a restart of the server does to the gateway."""
        self.recorder = Recorder(self.database)
        self.gateway = Gateway(self.resolver, self.recorder)

    async def chat(self, *messages: dict[str, Any], rollout_id: str | None = None, **fields: Any) -> dict[str, Any]:
        request = parse_chat_request({"model": "games/agent", "messages": list(messages), **fields})
        return await self.gateway.complete(request, rollout_id=rollout_id)

    async def stream(self, *messages: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
        request = parse_chat_request({"model": "games/agent", "messages": list(messages), "stream": True, **fields})
        return [chunk async for chunk in (await self.gateway.stream(request)).chunks]

    def answers(self, *texts: str) -> None:
        """Make the engine give these texts in turn, each with the end of a turn."""
        queue = [self.renderer.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        end = self.renderer.stop_token_ids[0]
        self.engine.script = lambda request: [*queue.pop(0), end]

    def exchange(self, response: dict[str, Any], choice: int = 0) -> Any:
        return self.recorder.get([response["choices"][choice]["exchange_id"]])[0]


@asynccontextmanager
async def open_bench(
    directory: Path, tokenizer: Path, *, config: RenderConfig | None = None, max_context: int = 4096, engine: Any = None
) -> AsyncGenerator[Bench, None]:
    database = Database(directory / "art.db")
    renderer = load_renderer(tokenizer, config)
    bench = Bench(database, renderer, engine or ScriptedEngine(lambda request: []), max_context)
    await bench.recorder.start()
    try:
        yield bench
    finally:
        database.close()


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def accumulate(chunks: list[dict[str, Any]], choice: int = 0) -> tuple[dict[str, Any], str | None]:
    """The message and finish reason that a client makes of a stream."""
    message: dict[str, Any] = {}
    finish = None
    for chunk in chunks:
        for part in chunk["choices"]:
            if part["index"] != choice:
                continue
            for key, value in part["delta"].items():
                if key == "tool_calls":
                    message.setdefault("tool_calls", []).extend(
                        {k: v for k, v in call.items() if k != "index"} for call in value
                    )
                elif key == "role":
                    message["role"] = value
                else:
                    message[key] = message.get(key, "") + value
            finish = part["finish_reason"] or finish
    if message.get("tool_calls") and not message.get("content"):
        message["content"] = None
    return message, finish
