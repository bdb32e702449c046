"""OpenAI chat completions on a token-only engine.

    request --turns--> policy, prompt tokens, grammar
            --engine--> completion tokens (one sequence per choice)
            --parse--> message      --recorder--> exchange      --> answer

The answer is sent only after its exchange (request and answer) is committed to the record. When a client hangs up, the
engine's work is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from art.engine import GenerateRequest, TokenChunk
from art.errors import InvalidRequestError, ProcessError
from art.gateway.completion import ChatStream, ChoiceWriter, Completion, whole_choice
from art.gateway.format.renderer import TemplateKwargs, reasoning_settings
from art.gateway.live import LiveHub, LiveRequest
from art.gateway.policies import ModelResolver, PolicyRef
from art.gateway.record.conversations import Conversations, extend_hash
from art.gateway.record.recorder import Exchange, Recorder
from art.gateway.record.rollout_store import RolloutStore
from art.gateway.record.tables import DeletedResponses
from art.gateway.structure.structures import Structures
from art.gateway.switching import SwitchingAnswer
from art.gateway.turn import SEEDS, Turn, TurnMaker
from art.protocol.answers import FinishReason
from art.protocol.dialects.chat_completions import ChatRequest
from art.protocol.samples import Constraint

logger = logging.getLogger(__name__)

WATCHED_CHUNK_S = 0.2
"""How often the engine reports the tokens of a request for people who watch, where its client does not stream. Sending
each token by itself would slow the server down."""
Put = Callable[[dict[str, Any]], None]
"""Function that takes the entries of `choices` in the chunks of a stream."""


class Gateway:
    """Answers chat requests to every registered model, and records each answer with its exact tokens."""

    def __init__(self, resolver: ModelResolver, recorder: Recorder, conversations: Conversations | None = None) -> None:
        self.recorder = recorder
        self.rollouts = RolloutStore(recorder)
        self.deleted_responses = DeletedResponses(recorder.database)
        self.live = LiveHub()
        """What is being sampled now."""
        self.tokens: Counter[tuple[str, str]] = Counter()
        """Tokens since the server started, by model (`project/name`) and kind: prompt, cached, completion.

        Cached tokens are also counted as prompt tokens.
        """
        self.ignored: Counter[tuple[str, str]] = Counter()
        """Requests with a field that was ignored or replaced, by the key's id and the field."""
        self._greedy: set[str] = set()
        """Models whose greedy requests were logged."""
        self._resolver = resolver
        self._structures = Structures()
        self.conversations = conversations or Conversations(recorder)
        self.turns = TurnMaker(resolver, self.rollouts, self.conversations, self._structures)

    async def complete(
        self,
        request: ChatRequest,
        *,
        rollout_id: str | None = None,
        key: str = "",
        seed: int | None = None,
        switches: bool = False,
        strict: bool = False,
    ) -> dict[str, Any]:
        """Answer a request with one `chat.completion` object of OpenAI's API.

        It has further fields: `policy_version`; in every choice `exchange_id`, the id of its record, and `exchange`,
        its step, times and tokens; and `stop_reason` in a choice that ended at a stop string. `logprobs` lists every
        sampled token, including the one that ended the answer.

        Args:
            key: id of the caller's key. Keys take turns at the engine.
            seed: where the random numbers begin, if the request has no seed. Unlike the request's own seed it does not
                demand an engine that repeats itself, so vLLM draws as fast as without one.
            switches: whether an answer that is being sampled goes on with new weights when a step is published.
            strict: whether to refuse a request with a field that would have no effect.

        Raises:
            InvalidRequestError, ContextLengthError, NotFoundError, OverloadedError: the request cannot be served.
            QuotaError: the model's project has used up what it may.
            ProcessError: the engine died. StorageError: the exchange could not be recorded.
        """
        turn = await self._admitted(request, rollout_id, key, strict=strict, seed=seed, switches=switches)
        completions = await self._sample_all(turn, None)
        return {
            **_envelope(turn, "chat.completion"),
            **_prompt_ids(turn),
            "choices": [whole_choice(completion) for completion in completions],
            "usage": _usage(turn, completions),
        }

    async def stream(
        self,
        request: ChatRequest,
        *,
        rollout_id: str | None = None,
        key: str = "",
        seed: int | None = None,
        switches: bool = False,
        strict: bool = False,
    ) -> ChatStream:
        """Answer a request with OpenAI's `chat.completion.chunk` objects.

        The chunk with a `finish_reason` comes after the answer is recorded. Closing the generator of chunks cancels
        the engine's work. The errors are those of `complete`: this call raises what is wrong with the request, the
        generator raises what goes wrong later.
        """
        turn = await self._admitted(request, rollout_id, key, strict=strict, seed=seed, switches=switches)
        return ChatStream(num_prompt_tokens=len(turn.prompt_token_ids), chunks=self._chunks(turn))

    async def _admitted(
        self, request: ChatRequest, rollout_id: str | None, key: str, *, strict: bool, **how: Any
    ) -> Turn:
        turn = await self.turns.prepare(request, rollout_id, key, **how)
        if strict and request.ignored:
            raise InvalidRequestError(
                f"`{request.ignored[0]}` would have no effect, and this server refuses such fields "
                "(`ServerConfig.strict`); leave it out",
                param=request.ignored[0],
            )
        self.recorder.usage.check_sampling(turn.policy.project)
        self._remark(turn)
        return turn

    def _remark(self, turn: Turn) -> None:
        """Log what of a request is ignored, once per key and field, and a trainable model's first greedy request."""
        for name in turn.request.ignored:
            self.ignored[turn.key, name] += 1
            if self.ignored[turn.key, name] == 1:
                logger.warning("`%s` of requests with the key %r has no effect; it is ignored", name, turn.key)
        model = turn.request.model
        if turn.request.temperature != 0 or turn.policy.adapter is None or "@" in model:
            return
        turn.request.remarks.append("temperature 0 cannot be trained")
        if model not in self._greedy:
            self._greedy.add(model)
            logger.warning(
                "a request to %s asks for temperature 0. A rollout with such answers cannot be trained: they have no "
                "policy gradient. If they are for training, ask for temperature 1, or set `sampling` of the rollout "
                "(PUT /api/rollouts/{id}) or of the model's settings, which replaces what an agent asks for",
                model,
            )

    async def prompt_token_ids(self, request: ChatRequest, *, rollout_id: str | None = None) -> list[int]:
        """Return the prompt tokens of a request, even of one that is longer than the model's context.

        Raises:
            ContextLengthError: it is many times as long.
        """
        return (await self.turns.prepare(request, rollout_id, "", check_length=False)).prompt_token_ids

    async def reasoning_settings(self, model: str, rollout_id: str | None, *, reasons: bool) -> TemplateKwargs:
        """The settings of a model's chat template that switch its reasoning on or off; none where there is no choice.

        Raises:
            InvalidRequestError: the model should reason, and never does.
        """
        policy = await self.turns.find_policy(model, rollout_id)
        return reasoning_settings(policy.renderer, reasons=reasons, param="thinking")

    async def _chunks(self, turn: Turn) -> AsyncGenerator[dict[str, Any], None]:
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        base = _envelope(turn, "chat.completion.chunk")
        opening = _prompt_ids(turn)  # in the first chunk alone
        include_usage = turn.request.stream_options is not None and turn.request.stream_options.include_usage
        if include_usage:
            base["usage"] = None
        task = asyncio.create_task(self._sample_all(turn, queue.put_nowait))
        task.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while (entry := await queue.get()) is not None:
                yield {**base, **opening, "choices": [entry]}
                opening = {}
            completions = await task
            if include_usage:
                yield {**base, "choices": [], "usage": _usage(turn, completions)}
        finally:
            await _cancel([task])

    async def _sample_all(self, turn: Turn, put: Put | None) -> list[Completion]:
        """Sample the choices of a request. When one fails, or the caller is cancelled, the others are cancelled."""
        count = turn.request.n or 1
        if count == 1:
            return [await self._sample(turn, 0, put)]
        tasks = [asyncio.create_task(self._sample(turn, i, put)) for i in range(count)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            await _cancel(tasks)

    async def _sample(self, turn: Turn, index: int, put: Put | None) -> Completion:
        """Sample, parse and record one choice. With `put`, stream it."""
        request, renderer, policy = turn.request, turn.renderer, turn.policy
        while not self._resolver.is_ready(policy):  # its adapter was unloaded while this request waited
            policy = await self.turns.find_policy(request.model, turn.rollout_id)
        parse_tools = bool(turn.tools) and request.tool_choice != "none"
        parser = renderer.parser(turn.prompt_token_ids, turn.tools, parse_tools=parse_tools)
        completion = Completion(index, request, renderer, parser)
        writer = None if put is None else ChoiceWriter(completion, put)
        # With stop strings, read the tokens as they are sampled, to stop at the first match.
        at_once = writer is not None or bool(request.stop_strings)
        is_watched = self.live.is_watched(policy.project)
        switching = await self._switching(turn, policy)
        generate = _generate_request(turn, policy, completion, 0.0 if at_once else WATCHED_CHUNK_S)
        is_streamed = at_once or is_watched or switching is not None
        with self.live.followed(_live_request(turn, policy, completion, is_streamed=is_streamed)) as live:
            try:
                if switching is not None:
                    await self._follow(switching.chunks(generate), completion, writer, live)
                elif is_streamed:
                    await self._follow(policy.engine.generate(generate, stream=True), completion, writer, live)
                else:
                    completion.add(await policy.engine.generate_whole(generate))
            except BaseException:
                if completion.token_ids:  # they were sampled, though the client has hung up
                    self._count(turn, completion)
                raise
            if completion.finish_reason is None:
                raise ProcessError(
                    f"the engine ended completion {completion.exchange_id} without a finish reason; send it again"
                )
            if turn.grammar is not None:
                await self._structures.check(turn.grammar, renderer, completion.token_ids)
            if switching is not None:
                policy = replace(policy, policy_version=switching.first_version)
                completion.segments = switching.segments(len(completion.token_ids))
            self._count(turn, completion)
            await self._record(turn, policy, generate, completion, completion.finish_reason)
        if writer is not None:
            writer.finish()
        return completion

    async def _switching(self, turn: Turn, policy: PolicyRef) -> SwitchingAnswer | None:
        """How to go on with new weights, for an answer that may. `None` for one that ends with those it began with."""
        if not turn.switches or (turn.grammar is not None and not (await policy.engine.info()).resumes_grammars):
            return None
        find_policy = partial(self.turns.find_policy, turn.request.model, turn.rollout_id)
        return SwitchingAnswer(turn.request.model, policy, self._resolver, find_policy)

    async def _follow(
        self, chunks: AsyncIterator[TokenChunk], completion: Completion, writer: ChoiceWriter | None, live: LiveRequest
    ) -> None:
        """Take an answer in parts, as it is sampled: for a client that streams, stop strings and people who watch."""
        async with contextlib.aclosing(cast("AsyncGenerator[TokenChunk, None]", chunks)):
            async for chunk in chunks:
                completion.add(chunk)
                if completion.finish_reason is not None:
                    break
                if writer is not None:
                    writer.write()
                self.live.sampled(live)

    def _count(self, turn: Turn, completion: Completion) -> None:
        project, name = turn.policy.project, turn.policy.name
        counts = {"prompt": 0, "cached": 0, "completion": len(completion.token_ids)}
        if completion.index == 0:  # the choices of a request share its prompt
            counts |= {"prompt": len(turn.prompt_token_ids), "cached": completion.num_cached_tokens}
        for kind, count in counts.items():
            self.tokens[f"{project}/{name}", kind] += count
        self.recorder.count_tokens(project, name, **counts, key_id=turn.key)

    async def _record(
        self,
        turn: Turn,
        policy: PolicyRef,
        generate: GenerateRequest,
        completion: Completion,
        finish_reason: FinishReason,
    ) -> None:
        exchange = Exchange(
            id=completion.exchange_id,
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
            segments=completion.segments,
            constraint=_constraint(generate, completion, reports_kept=await _reports_kept(policy, generate)),
        )
        conversation = extend_hash(turn.conversation, completion.message)
        await self.recorder.append(exchange, conversation=conversation, parent=turn.parent)
        completion.exchange = exchange.summary()
        self.conversations.add(exchange, conversation)


def _generate_request(turn: Turn, policy: PolicyRef, completion: Completion, chunk_every_s: float) -> GenerateRequest:
    request, grammar = turn.request, turn.grammar
    return GenerateRequest(
        request_id=completion.exchange_id,
        adapter=policy.adapter,
        prompt_token_ids=turn.prompt_token_ids,
        max_tokens=turn.max_tokens,
        stop_token_ids=turn.renderer.stop_token_ids if grammar is None else grammar.stop_token_ids,
        grammar=None if grammar is None else grammar.text,
        seed=(turn.seed + completion.index) % SEEDS,
        repeatable=request.seed is not None,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=max(0, request.top_k or 0),
        min_p=request.min_p or 0.0,
        num_top_logprobs=request.top_logprobs or 0,
        chunk_every_s=chunk_every_s,
        sender=(policy.project, turn.key),
    )


def _live_request(turn: Turn, policy: PolicyRef, completion: Completion, *, is_streamed: bool) -> LiveRequest:
    return LiveRequest(
        project=policy.project,
        name=policy.name,
        policy_version=policy.policy_version,
        rollout_id=turn.rollout_id,
        messages=turn.messages,
        num_prompt_tokens=len(turn.prompt_token_ids),
        max_tokens=turn.max_tokens,
        completion=completion,
        token_bytes=turn.renderer.tokenizer.token_bytes,
        is_streamed=is_streamed,
    )


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


def _envelope(turn: Turn, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{os.urandom(12).hex()}",
        "object": kind,
        "created": int(time.time()),
        "model": turn.request.model,
        "policy_version": turn.policy.policy_version,
    }


def _prompt_ids(turn: Turn) -> dict[str, Any]:
    """The exact tokens of the prompt, for a request that asks for them."""
    return {"prompt_token_ids": turn.prompt_token_ids} if turn.request.return_token_ids else {}


def _usage(turn: Turn, completions: list[Completion]) -> dict[str, Any]:
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
