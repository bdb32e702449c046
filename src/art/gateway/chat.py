"""OpenAI chat completions on a token-only engine.

    request --resolve--> policy
            --conversations--> the recorded turn that the request continues, if any
            --bridge or render--> prompt tokens
            --structures--> the grammar of the answer, if the request asks for a form
            --engine--> completion tokens (one sequence per choice)
            --parse--> message      --recorder--> exchange      --> answer

The answer is sent only after its exchange (request and answer) is committed to the record. When a client hangs up, the
engine's work is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from art.engine import GenerateRequest, TokenChunk
from art.errors import ConfigError, ContextLengthError, InvalidRequestError, NotFoundError, ProcessError
from art.gateway.completion import Completion
from art.gateway.format.bridge import Branch, BranchReason
from art.gateway.format.reasoning import reasoning_settings
from art.gateway.format.renderer import RecordedTurn, Renderer, TemplateKwargs
from art.gateway.format.size import COUNTED_CONTEXTS, SizeLimit, check_size, work_size
from art.gateway.policies import ModelResolver, PolicyRef
from art.gateway.record.conversations import Conversations, conversation_hashes, extend_hash
from art.gateway.record.deleted_responses import DeletedResponses
from art.gateway.record.recorder import Exchange, Recorder
from art.gateway.record.rollout_store import RolloutStore
from art.gateway.stream import ChatStream, ChoiceWriter, whole_choice
from art.gateway.structure.grammar import AnswerGrammar
from art.gateway.structure.structures import Structures
from art.gateway.workers import Workers
from art.protocol.chat import ChatRequest, FinishReason, Message, Tool, normalize_messages
from art.protocol.samples import Constraint
from art.storage.layout import validate_name

_SEEDS = 1 << 64
Put = Callable[[dict[str, Any]], None]
"""Function that takes the entries of `choices` in the chunks of a stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """A request that is ready for the engine. All its choices share it."""

    request: ChatRequest
    rollout_id: str | None
    policy: PolicyRef
    renderer: Renderer
    messages: list[Message]
    """The messages as rendered: earlier answers include the reasoning that was recorded for them."""
    tools: list[Tool] | None
    conversation: bytes
    prompt_token_ids: list[int]
    parent: Exchange | None
    branch_reason: BranchReason | None
    max_tokens: int
    seed: int
    grammar: AnswerGrammar | None
    """What the whole answer must match."""


class Gateway:
    """Answers chat requests to every registered model, and records each answer with its exact tokens."""

    def __init__(self, resolver: ModelResolver, recorder: Recorder, conversations: Conversations | None = None) -> None:
        self.recorder = recorder
        self.rollouts = RolloutStore(recorder)
        self.deleted_responses = DeletedResponses(recorder.database)
        self.tokens: Counter[tuple[str, str]] = Counter()
        """Tokens since the server started, by model (`project/name`) and kind: prompt, cached, completion.

        Cached tokens are also counted as prompt tokens.
        """
        self._resolver = resolver
        self._structures = Structures()
        self._workers = Workers()
        self.conversations = conversations or Conversations(recorder)

    async def complete(self, request: ChatRequest, *, rollout_id: str | None = None) -> dict[str, Any]:
        """Answer a request with one `chat.completion` object of OpenAI's API.

        It has three fields more: `policy_version`, an `exchange_id` in every choice, which is the id of its record, and
        `stop_reason` in a choice that ended at a stop string. `logprobs` lists every sampled token, including the one
        that ended the answer.

        Raises:
            InvalidRequestError, ContextLengthError, NotFoundError, OverloadedError: the request cannot be served.
            ProcessError: the engine died. StorageError: the exchange could not be recorded.
        """
        turn = await self._prepare(request, rollout_id)
        completions = await self._sample_all(turn, None)
        return {
            **_envelope(turn, "chat.completion"),
            "choices": [whole_choice(completion) for completion in completions],
            "usage": _usage(turn, completions),
        }

    async def stream(self, request: ChatRequest, *, rollout_id: str | None = None) -> ChatStream:
        """Answer a request with OpenAI's `chat.completion.chunk` objects.

        The chunk with a `finish_reason` comes after the answer is recorded. Closing the generator of chunks cancels
        the engine's work. The errors are those of `complete`: this call raises what is wrong with the request, the
        generator raises what goes wrong later.
        """
        turn = await self._prepare(request, rollout_id)
        return ChatStream(num_prompt_tokens=len(turn.prompt_token_ids), chunks=self._chunks(turn))

    async def count_tokens(self, request: ChatRequest, *, rollout_id: str | None = None) -> int:
        """Count the prompt tokens of a request, even of one that is longer than the model's context.

        Raises:
            ContextLengthError: it is many times as long.
        """
        return len((await self._prepare(request, rollout_id, check_length=False)).prompt_token_ids)

    async def reasoning_settings(self, model: str, rollout_id: str | None, *, reasons: bool) -> TemplateKwargs:
        """The settings of a model's chat template that switch its reasoning on or off; none where there is no choice.

        Raises:
            InvalidRequestError: the model should reason, and never does.
        """
        policy = self._resolver.resolve_ready(model) or await self._resolve(model, rollout_id)
        return reasoning_settings(policy.renderer, reasons=reasons, param="thinking")

    async def _chunks(self, turn: _Turn) -> AsyncGenerator[dict[str, Any], None]:
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        base = _envelope(turn, "chat.completion.chunk")
        include_usage = turn.request.stream_options is not None and turn.request.stream_options.include_usage
        if include_usage:
            base["usage"] = None
        task = asyncio.create_task(self._sample_all(turn, queue.put_nowait))
        task.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while (entry := await queue.get()) is not None:
                yield {**base, "choices": [entry]}
            completions = await task
            if include_usage:
                yield {**base, "choices": [], "usage": _usage(turn, completions)}
        finally:
            await _cancel([task])

    async def _sample_all(self, turn: _Turn, put: Put | None) -> list[Completion]:
        """Sample the choices of a request. When one fails, or the caller is cancelled, the others are cancelled."""
        count = turn.request.n or 1
        if count == 1:
            return [await self._sample(turn, 0, put)]
        tasks = [asyncio.create_task(self._sample(turn, i, put)) for i in range(count)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            await _cancel(tasks)

    async def _prepare(self, request: ChatRequest, rollout_id: str | None, *, check_length: bool = True) -> _Turn:
        if rollout_id is not None:
            validate_name(rollout_id, param="rollout_id")
        size = work_size(request.messages, request.tools)
        messages = await self._workers.run(size, normalize_messages, request.messages)
        policy = self._resolver.resolve_ready(request.model) or await self._resolve(request.model, rollout_id)
        if rollout_id is not None:
            self.rollouts.check_open(rollout_id, policy.project)
        renderer = _renderer(policy, request)
        tools = request.tools or None
        limit = SizeLimit(policy.max_context, renderer.tokenizer, 1 if check_length else COUNTED_CONTEXTS)
        await self._workers.run(size, check_size, messages, tools, limit)
        model = f"{policy.project}/{policy.name}"

        def hash_with(tools: list[Tool] | None) -> list[bytes]:
            return conversation_hashes(model, tools, request.chat_template_kwargs, messages)

        hashes = await self._workers.run(size, hash_with, tools)
        earlier = self.conversations.find(messages, hashes, rollout_id, hash_with)
        for message in messages:
            message.pop("exchange_id", None)
        prompt = await self._workers.run(size, _build_prompt, renderer, messages, tools, earlier)
        return _Turn(
            request=request,
            rollout_id=rollout_id,
            policy=policy,
            renderer=renderer,
            messages=prompt.messages,
            tools=tools,
            conversation=hashes[-1],
            prompt_token_ids=prompt.token_ids,
            parent=prompt.parent,
            branch_reason=prompt.branch_reason,
            max_tokens=_max_tokens(request, len(prompt.token_ids), policy.max_context) if check_length else 0,
            seed=int.from_bytes(os.urandom(8)) if request.seed is None else request.seed % _SEEDS,
            grammar=await self._structures.prepare(request, renderer, prompt.token_ids, policy.engine, model_name=model)
            if check_length
            else None,
        )

    async def _resolve(self, model: str, rollout_id: str | None) -> PolicyRef:
        """Find the policy for a model name. An unknown name means the model that its rollout was announced with.

        That serves agents whose model name cannot be changed.
        """
        try:
            return await self._resolver.resolve(model)
        except NotFoundError:
            announced = None if rollout_id is None or "@" in model else self.rollouts.announced_model(rollout_id, None)
            if announced is None:
                raise
        return await self._resolver.resolve(announced)

    async def _sample(self, turn: _Turn, index: int, put: Put | None) -> Completion:
        """Sample, parse and record one choice. With `put`, stream it."""
        request, renderer, policy = turn.request, turn.renderer, turn.policy
        while not self._resolver.is_ready(policy):  # its adapter was unloaded while this request waited
            policy = await self._resolve(request.model, turn.rollout_id)
        parse_tools = bool(turn.tools) and request.tool_choice != "none"
        parser = renderer.parser(turn.prompt_token_ids, turn.tools, parse_tools=parse_tools)
        completion = Completion(index, request, renderer, parser)
        writer = None if put is None else ChoiceWriter(completion, put)
        generate = GenerateRequest(
            request_id=completion.exchange_id,
            adapter=policy.adapter,
            prompt_token_ids=turn.prompt_token_ids,
            max_tokens=turn.max_tokens,
            stop_token_ids=renderer.stop_token_ids if turn.grammar is None else turn.grammar.stop_token_ids,
            grammar=None if turn.grammar is None else turn.grammar.text,
            seed=(turn.seed + index) % _SEEDS,
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=max(0, request.top_k or 0),
            min_p=request.min_p or 0.0,
            num_top_logprobs=request.top_logprobs or 0,
        )
        # With stop strings, read the tokens as they are sampled, to stop at the first match.
        chunks = policy.engine.generate(generate, stream=writer is not None or bool(request.stop_strings))
        async with contextlib.aclosing(cast("AsyncGenerator[TokenChunk, None]", chunks)):
            async for chunk in chunks:
                completion.add(chunk)
                if completion.finish_reason is not None:
                    break
                if writer is not None:
                    writer.write()
        if completion.finish_reason is None:
            raise ProcessError(
                f"the engine ended completion {completion.exchange_id} without a finish reason; send it again"
            )
        if turn.grammar is not None:
            await self._structures.check(turn.grammar, renderer, completion.token_ids)
        self._count(turn, completion)
        await self._record(turn, policy, generate, completion, completion.finish_reason)
        if writer is not None:
            writer.finish()
        return completion

    def _count(self, turn: _Turn, completion: Completion) -> None:
        project, name = turn.policy.project, turn.policy.name
        counts = {"prompt": 0, "cached": 0, "completion": len(completion.token_ids)}
        if completion.index == 0:  # the choices of a request share its prompt
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
        finish_reason: FinishReason,
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
            finish_reason=finish_reason,
            message=completion.message,
            request_messages=turn.messages,
            tools=turn.tools,
            created_at=time.time(),
            constraint=_constraint(generate, completion, reports_kept=await _reports_kept(policy, generate)),
        )
        conversation = extend_hash(turn.conversation, completion.message)
        await self.recorder.append(exchange, conversation=conversation, parent=turn.parent)
        self.conversations.add(exchange, conversation)


@dataclass(frozen=True, slots=True)
class _Prompt:
    token_ids: list[int]
    messages: list[Message]
    """The messages as rendered."""
    parent: Exchange | None
    branch_reason: BranchReason | None


def _build_prompt(
    renderer: Renderer,
    messages: list[Message],
    tools: list[Tool] | None,
    earlier: tuple[Exchange, int] | Branch | None,
) -> _Prompt:
    """Extend the tokens of the exchange that the messages continue, or render them. It takes no state of the gateway,
    so that it can run in a thread."""
    branch = earlier if isinstance(earlier, Branch) else None
    if isinstance(earlier, tuple):
        parent, num_covered = earlier
        recorded = [*parent.request_messages, parent.message]
        turn = RecordedTurn(recorded, parent.prompt_token_ids, parent.completion_token_ids)
        bridged = renderer.bridge(turn, messages[num_covered:], tools)
        messages = recorded + messages[num_covered:]
        if not isinstance(bridged, Branch):
            return _Prompt(bridged, messages, parent, None)
        branch = bridged
    return _Prompt(renderer.render(messages, tools), messages, None, None if branch is None else branch.reason)


def _renderer(policy: PolicyRef, request: ChatRequest) -> Renderer:
    renderer = policy.renderer
    if request.chat_template_kwargs:
        try:
            renderer = renderer.with_kwargs(request.chat_template_kwargs)
        except ConfigError as error:
            raise InvalidRequestError(error.message, param="chat_template_kwargs") from error
    if request.tools and not renderer.handles_tools:
        raise InvalidRequestError(
            f"{policy.project}/{policy.name} cannot call tools: its chat template does not accept tools, or writes "
            "calls in a format that ART cannot parse; leave `tools` out and describe the tools in a message",
            param="tools",
        )
    return renderer


async def _reports_kept(policy: PolicyRef, generate: GenerateRequest) -> bool:
    """Whether the chunks of a completion say what truncation left to draw from."""
    is_cut = generate.top_p < 1 or generate.top_k > 0 or generate.min_p > 0
    return is_cut and generate.temperature > 0 and (await policy.engine.info()).reports_kept


def _constraint(generate: GenerateRequest, completion: Completion, *, reports_kept: bool) -> Constraint | None:
    """The part of the vocabulary that a completion was drawn from; `None` for all of it."""
    if generate.grammar is None and not reports_kept:
        return None
    stops = [] if generate.grammar is None else list(generate.stop_token_ids)
    kept = completion.kept if reports_kept else None
    return Constraint(grammar=generate.grammar, stop_token_ids=stops, kept=kept)


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


def _usage(turn: _Turn, completions: list[Completion]) -> dict[str, Any]:
    """Token usage of an answer; its choices share one prompt, which counts once."""
    num_prompt, num_sampled = len(turn.prompt_token_ids), sum(len(one.token_ids) for one in completions)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
        "prompt_tokens_details": {"cached_tokens": max(one.num_cached_tokens for one in completions)},
    }


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
