"""OpenAI chat completions on a token-only engine.

    request --resolve--> policy
            --conversations--> recorded turn that it continues, if any
            --bridge or render--> prompt tokens
            --engine--> completion tokens (one per choice)
            --parse--> message      --recorder--> exchange      --> answer

An answer leaves only after its exchange is committed. Leaving early (a client that hangs up) cancels the engine's work.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, cast

from art.engine import GenerateRequest, TokenChunk
from art.errors import ConfigError, ContextLengthError, InvalidRequestError, NotFoundError, ProcessError
from art.gateway.completion import Completion, Finished
from art.gateway.format.bridge import Branch, BranchReason
from art.gateway.format.renderer import RecordedTurn, Renderer
from art.gateway.policies import ModelResolver, PolicyRef
from art.gateway.record.conversations import Conversations, conversation_hashes, extend_hash
from art.gateway.record.recorder import Exchange, Recorder, new_exchange_id
from art.gateway.record.rollout_store import RolloutStore
from art.gateway.stream import ChoiceWriter
from art.protocol.chat import ChatRequest, FinishReason, Message, Tool, normalize_messages
from art.storage.layout import validate_name

_SEEDS = 1 << 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """A request, made ready for the engine. Shared by its choices."""

    request: ChatRequest
    rollout_id: str | None
    policy: PolicyRef
    renderer: Renderer
    messages: list[Message]
    """As rendered: earlier answers have the reasoning that was recorded for them."""
    tools: list[Tool] | None
    conversation: bytes
    prompt_token_ids: list[int]
    parent: Exchange | None
    branch_reason: BranchReason | None
    max_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class ChatStream:
    """An answer that is on its way."""

    num_prompt_tokens: int
    chunks: AsyncGenerator[dict[str, Any], None]
    """OpenAI's `chat.completion.chunk` objects."""


class Gateway:
    """Chat completions for every registered model."""

    def __init__(self, resolver: ModelResolver, recorder: Recorder, conversations: Conversations | None = None) -> None:
        self.recorder = recorder
        self.rollouts = RolloutStore(recorder)
        self.tokens: Counter[tuple[str, str]] = Counter()
        """Of all requests so far, by model (`project/name`) and kind: prompt, cached (part of prompt), completion."""
        self._resolver = resolver
        self.conversations = conversations or Conversations(recorder)

    async def complete(self, request: ChatRequest, *, rollout_id: str | None = None) -> dict[str, Any]:
        """A whole answer, as OpenAI's `chat.completion` object.

        Every choice has an `exchange_id`, one that a stop string ended has it as `stop_reason`, and the answer has a
        `policy_version`. `logprobs` lists every sampled token, the one that ended the answer included.

        Raises:
            InvalidRequestError, ContextLengthError, NotFoundError, OverloadedError: of the request.
            ProcessError: the engine is gone. StorageError: the exchange could not be recorded.
        """
        turn = await self._prepare(request, rollout_id)
        count = request.n or 1
        if count == 1:
            choices = [await self._sample(turn, 0, new_exchange_id(), None)]
        else:
            choices = await _gather([self._sample(turn, i, new_exchange_id(), None) for i in range(count)])
        return {
            **_envelope(turn, "chat.completion"),
            "choices": [_choice(choice) for choice in choices],
            "usage": _usage(turn, choices),
        }

    async def stream(
        self, request: ChatRequest, *, rollout_id: str | None = None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The same answer as `chat.completion.chunk` objects. Closing the generator cancels the engine's work.

        The chunk with a `finish_reason` comes after the exchange is committed. Raises as `complete` does: from this
        call for what the request alone shows, else from the generator.
        """
        return (await self.open_stream(request, rollout_id=rollout_id)).chunks

    async def open_stream(self, request: ChatRequest, *, rollout_id: str | None = None) -> ChatStream:
        """`stream`, with what is known before the first token."""
        turn = await self._prepare(request, rollout_id)
        return ChatStream(num_prompt_tokens=len(turn.prompt_token_ids), chunks=self._chunks(turn))

    async def count_tokens(self, request: ChatRequest, *, rollout_id: str | None = None) -> int:
        """Tokens of the prompt that the request would become, however long."""
        return len((await self._prepare(request, rollout_id, check_length=False)).prompt_token_ids)

    def recorded_messages(self, exchange_id: str, *, project: str | None) -> list[Message]:
        """The conversation that ended with an exchange; its last message names the exchange.

        Raises:
            NotFoundError: it is not recorded, or of another project than `project`.
        """
        found = self.recorder.find([exchange_id]).get(exchange_id)
        if found is None or project not in (None, found.project):
            raise NotFoundError(f"exchange {exchange_id!r} is not recorded on this server")
        return [*found.request_messages, {**found.message, "exchange_id": exchange_id}]

    async def _chunks(self, turn: _Turn) -> AsyncGenerator[dict[str, Any], None]:
        queue: asyncio.Queue[dict[str, Any] | Finished | Exception] = asyncio.Queue()
        base = _envelope(turn, "chat.completion.chunk")
        include_usage = turn.request.stream_options is not None and turn.request.stream_options.include_usage
        if include_usage:
            base["usage"] = None
        tasks = [asyncio.create_task(self._stream_choice(turn, i, queue)) for i in range(turn.request.n or 1)]
        finished: list[Finished] = []
        try:
            while len(finished) < len(tasks):
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, Finished):
                    finished.append(item)
                else:
                    yield {**base, "choices": [item]}
            if include_usage:
                yield {**base, "choices": [], "usage": _usage(turn, finished)}
        finally:
            await _cancel(tasks)

    async def _stream_choice(
        self, turn: _Turn, index: int, queue: asyncio.Queue[dict[str, Any] | Finished | Exception]
    ) -> None:
        exchange_id = new_exchange_id()
        writer = ChoiceWriter(index, exchange_id, queue.put_nowait)
        try:
            finished = await self._sample(turn, index, exchange_id, writer)
        except Exception as error:
            queue.put_nowait(error)
        else:
            queue.put_nowait(finished)

    async def _prepare(self, request: ChatRequest, rollout_id: str | None, *, check_length: bool = True) -> _Turn:
        if rollout_id is not None:
            validate_name(rollout_id, param="rollout_id")
        messages = normalize_messages(request.messages)
        policy = self._resolver.resolve_ready(request.model) or await self._resolve(request.model, rollout_id)
        if rollout_id is not None:
            self.rollouts.check_open(rollout_id, policy.project)
        renderer = _renderer(policy, request)
        tools = request.tools or None
        hashes = conversation_hashes(
            f"{policy.project}/{policy.name}", tools, request.chat_template_kwargs, messages
        )  # fmt: skip
        found = self.conversations.find(messages, hashes, rollout_id)
        for message in messages:
            message.pop("exchange_id", None)
        parent: Exchange | None = None
        branch = found if isinstance(found, Branch) else None
        prompt: list[int] | None = None
        if isinstance(found, tuple):
            parent, covered = found
            known = [*parent.request_messages, parent.message]
            turn = RecordedTurn(known, parent.prompt_token_ids, parent.completion_token_ids)
            bridged = renderer.bridge(turn, messages[covered:], tools)
            messages = known + messages[covered:]
            if isinstance(bridged, Branch):
                parent, branch = None, bridged
            else:
                prompt = bridged
        if prompt is None:
            prompt = renderer.render(messages, tools)
        seed = int.from_bytes(os.urandom(8)) if request.seed is None else request.seed % _SEEDS
        return _Turn(
            request=request,
            rollout_id=rollout_id,
            policy=policy,
            renderer=renderer,
            messages=messages,
            tools=tools,
            conversation=hashes[-1],
            prompt_token_ids=prompt,
            parent=parent,
            branch_reason=None if branch is None else branch.reason,
            max_tokens=_max_tokens(request, len(prompt), policy.max_context) if check_length else 0,
            seed=seed,
        )

    async def _resolve(self, model: str, rollout_id: str | None) -> PolicyRef:
        """The policy of a model name; agents that cannot be told another one get the model of their rollout."""
        try:
            return await self._resolver.resolve(model)
        except NotFoundError:
            announced = None if rollout_id is None or "@" in model else self.rollouts.announced_model(rollout_id, None)
            if announced is None:
                raise
        return await self._resolver.resolve(announced)

    async def _sample(self, turn: _Turn, index: int, exchange_id: str, writer: ChoiceWriter | None) -> Finished:
        """One choice: from the engine into the record."""
        request, renderer = turn.request, turn.renderer
        policy = turn.policy
        while not self._resolver.is_ready(policy):  # another took its place while this request waited
            policy = await self._resolve(request.model, turn.rollout_id)
        parse_tools = bool(turn.tools) and request.tool_choice != "none"
        completion = Completion(
            renderer.tokenizer,
            renderer.parser(turn.prompt_token_ids, turn.tools, parse_tools=parse_tools),
            renderer.stop_token_ids,
            request.stop_strings,
            with_logprobs=bool(request.logprobs),
        )
        generate = GenerateRequest(
            request_id=exchange_id,
            adapter=policy.adapter,
            prompt_token_ids=turn.prompt_token_ids,
            max_tokens=turn.max_tokens,
            stop_token_ids=renderer.stop_token_ids,
            seed=(turn.seed + index) % _SEEDS,
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            num_top_logprobs=request.top_logprobs or 0,
        )
        # With stop strings the tokens are wanted as they come, to end as soon as one is there.
        chunks = policy.engine.generate(generate, stream=writer is not None or bool(request.stop_strings))
        over = False
        async with contextlib.aclosing(cast("AsyncGenerator[TokenChunk, None]", chunks)):
            async for chunk in chunks:
                over = completion.add(chunk)
                if over:
                    break
                if writer is not None:
                    writer.write(completion.take(), completion.take_reports())
        if not over:
            raise ProcessError(f"the engine gave completion {exchange_id} up without a reason; send the request again")
        self._count(turn, index, completion)
        message, finish_reason = completion.finish(exchange_id)
        await self._record(turn, policy, generate, completion, message, finish_reason)
        if writer is not None:
            writer.write(completion.take(), completion.take_reports())
            writer.finish(finish_reason, completion.stop_string)
        return Finished(
            index=index,
            exchange_id=exchange_id,
            message=message,
            finish_reason=finish_reason,
            num_tokens=len(completion.token_ids),
            num_cached_tokens=completion.num_cached_tokens,
            stop_string=completion.stop_string,
            reports=completion.take_reports() if request.logprobs else None,
        )

    def _count(self, turn: _Turn, index: int, completion: Completion) -> None:
        project, name = turn.policy.project, turn.policy.name
        counts = {"prompt": 0, "cached": 0, "completion": len(completion.token_ids)}
        if index == 0:  # the choices of a request share its prompt
            counts |= {"prompt": len(turn.prompt_token_ids), "cached": completion.num_cached_tokens}
        for kind, count in counts.items():
            self.tokens[f"{project}/{name}", kind] += count
        self.recorder.count_tokens(project, name, **counts)

    async def _record(
        self,
        turn: _Turn,
        policy: PolicyRef,
        generate: GenerateRequest,
        completion: Completion,
        message: Message,
        finish: FinishReason,
    ) -> None:
        exchange = Exchange(
            id=generate.request_id,
            rollout_id=turn.rollout_id,
            project=policy.project,
            name=policy.name,
            policy_version=policy.policy_version,
            parent_id=None if turn.parent is None else turn.parent.id,
            branch_reason=turn.branch_reason,
            prompt_token_ids=turn.prompt_token_ids,
            completion_token_ids=completion.token_ids,
            sampling_logprobs=completion.logprobs,
            temperature=generate.temperature,
            top_p=generate.top_p,
            seed=generate.seed,
            finish_reason=finish,
            message=message,
            request_messages=turn.messages,
            tools=turn.tools,
            created_at=time.time(),
        )
        conversation = extend_hash(turn.conversation, message)
        await self.recorder.append(exchange, conversation=conversation, parent=turn.parent)
        self.conversations.add(exchange, conversation)


def _renderer(policy: PolicyRef, request: ChatRequest) -> Renderer:
    renderer = policy.renderer
    if request.chat_template_kwargs:
        try:
            renderer = renderer.with_kwargs(request.chat_template_kwargs)
        except ConfigError as error:
            raise InvalidRequestError(error.message, param="chat_template_kwargs") from error
    if request.tools and not renderer.handles_tools:
        raise InvalidRequestError(
            f"{policy.project}/{policy.name} cannot call tools: its chat template takes none, or writes calls in a way "
            "that is not known here; leave `tools` out and describe them in a message",
            param="tools",
        )
    return renderer


def _max_tokens(request: ChatRequest, num_prompt_tokens: int, max_context: int) -> int:
    room = max_context - num_prompt_tokens
    if room < 1:
        raise ContextLengthError(
            f"the messages are {num_prompt_tokens} tokens long, and the model's context of {max_context} tokens leaves "
            "no room for an answer; shorten them",
            param="messages",
        )
    return min(room, request.token_limit or room)


def _envelope(turn: _Turn, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{os.urandom(12).hex()}",
        "object": kind,
        "created": int(time.time()),
        "model": turn.request.model,
        "policy_version": turn.policy.policy_version,
    }


def _choice(finished: Finished) -> dict[str, Any]:
    choice = {
        "index": finished.index,
        "message": finished.message,
        "finish_reason": finished.finish_reason,
        "logprobs": None if finished.reports is None else {"content": finished.reports, "refusal": None},
        "exchange_id": finished.exchange_id,
    }
    if finished.stop_string is not None:
        choice["stop_reason"] = finished.stop_string
    return choice


def _usage(turn: _Turn, choices: list[Finished]) -> dict[str, Any]:
    """The prompt counts once however many choices share it."""
    prompt, completion = len(turn.prompt_token_ids), sum(choice.num_tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": max(choice.num_cached_tokens for choice in choices)},
    }


async def _gather(coroutines: list[Coroutine[Any, Any, Finished]]) -> list[Finished]:
    """All results in order; if one fails or we are cancelled, the others are cancelled first."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _cancel(tasks)


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
