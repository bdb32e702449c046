"""OpenAI chat completions on a token-only engine. `Gateway.complete` and `Gateway._answer` are the way of one chat:

    request --turns--> policy, prompt tokens, grammar
            --engine--> completion tokens (one sequence per choice)
            --parse--> message      --recorder--> exchange      --> answer

The answer is sent only after its exchange (request and answer) is committed to the record. When a client hangs up, the
engine's work is cancelled.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Unpack, cast

from art.engine import GenerateRequest, TokenChunk
from art.errors import ProcessError
from art.gateway.completion import ChatStream, ChoiceWriter, Completion, whole_choice
from art.gateway.live import LiveHub, LiveRequest
from art.gateway.policies import ModelResolver, PolicyRef
from art.gateway.structures import Structures
from art.gateway.turn import SEEDS, ChatOptions, Turn, TurnMaker
from art.protocol.chat_completions import ChatRequest
from art.protocol.samples import Constraint
from art.record.conversations import extend_hash
from art.record.recorded_answers import Segments, join_segments, pack_alternatives
from art.record.recorder import Exchange, Recorder
from art.record.rollout_store import RolloutStore
from art.record.usage_book import Amounts

logger = logging.getLogger(__name__)

WATCHED_CHUNK_S = 0.2
"""How often the engine reports the tokens of a request for people who watch, where its client does not stream. Sending
each token by itself would slow the server down."""
Put = Callable[[dict[str, Any]], None]
"""Function that takes the entries of `choices` in the chunks of a stream."""


class Gateway:
    """Answers chat requests to every registered model, and records each answer with its exact tokens."""

    def __init__(self, resolver: ModelResolver, recorder: Recorder, num_alternatives: int = 0) -> None:
        self.recorder = recorder
        self._num_alternatives = num_alternatives  # most likely tokens that are recorded beside each sampled one
        self.rollouts = RolloutStore(recorder)
        self.live = LiveHub()
        """What is being sampled now."""
        self.tokens: Counter[tuple[str, str]] = Counter()
        """Tokens since the server started, by model (`project/name`) and kind: prompt, cached, completion.

        Cached tokens are also counted as prompt tokens.
        """
        self._ignored: set[tuple[str, str]] = set()
        """Fields that were ignored or replaced and logged, by the key's id."""
        self._greedy: set[str] = set()
        """Models whose greedy requests were logged."""
        self._resolver = resolver
        self._structures = Structures()
        self.turns = TurnMaker(resolver, recorder, self.rollouts, self._structures)

    async def complete(self, request: ChatRequest, **asked: Unpack[ChatOptions]) -> dict[str, Any]:
        """Answer a request with one `chat.completion` object of OpenAI's API.

        It has further fields: `policy_version`; in every choice `exchange_id`, the id of its record, and `exchange`,
        its step, times and tokens; and `stop_reason` in a choice that ended at a stop string. `logprobs` lists every
        sampled token, including the one that ended the answer.

        Raises:
            InvalidRequestError, ContextLengthError, NotFoundError, OverloadedError: the request cannot be served.
            QuotaError: the model's project has used up what it may.
            ConflictError: the rollout is finished.
            ProcessError: the engine died. StorageError: the exchange could not be recorded.
        """
        turn = await self._admit(request, asked)  # request -> policy, prompt tokens, grammar
        completions = await self._answer_all(turn, None)  # -> engine -> parsed answer -> recorded exchange
        choices = [whole_choice(completion) for completion in completions]
        return {**_envelope(turn, "chat.completion"), "choices": choices, "usage": _usage(turn, completions)}

    async def stream(self, request: ChatRequest, **asked: Unpack[ChatOptions]) -> ChatStream:
        """Answer a request with OpenAI's `chat.completion.chunk` objects. The chunk with a `finish_reason` comes after
        the answer is recorded. Closing the generator of chunks cancels the engine's work. The errors are those of
        `complete`: this call raises what is wrong with the request, the generator raises what goes wrong later."""
        turn = await self._admit(request, asked)
        return ChatStream(num_prompt_tokens=len(turn.prompt_token_ids), chunks=self._chunks(turn))

    async def _chunks(self, turn: Turn) -> AsyncGenerator[dict[str, Any], None]:
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        envelope, options = _envelope(turn, "chat.completion.chunk"), turn.request.stream_options
        usage = {"usage": None} if options is not None and options.include_usage else {}
        task = asyncio.create_task(self._answer_all(turn, queue.put_nowait))
        task.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while (entry := await queue.get()) is not None:
                yield {**envelope, **usage, "choices": [entry]}
                envelope.pop("prompt_token_ids", None)  # they are in the first chunk alone
            completions = await task
            if usage:
                yield {**envelope, "choices": [], "usage": _usage(turn, completions)}
        finally:
            await _cancel([task])

    async def _admit(self, request: ChatRequest, asked: ChatOptions) -> Turn:
        """Make a request ready for the engine. Log what of it is ignored, and what cannot be trained, once each."""
        turn = await self.turns.prepare(request, **asked)
        self.recorder.usage.check_sampling(turn.policy.project)
        for name in request.ignored:
            if (turn.key, name) not in self._ignored:
                self._ignored.add((turn.key, name))
                logger.warning("`%s` of requests with the key %r has no effect; it is ignored", name, turn.key)
        if request.temperature == 0 and turn.policy.adapter is not None and "@" not in request.model:
            request.remarks.append("temperature 0 cannot be trained")
            if request.model not in self._greedy:
                self._greedy.add(request.model)
                logger.warning(
                    "a request to %s asks for temperature 0. A rollout with such answers cannot be trained: they have "
                    "no policy gradient. If they are for training, ask for temperature 1, or set `sampling` of the "
                    "rollout (PUT /api/rollouts/{id}) or of the model's settings, which replaces what agents ask for",
                    request.model,
                )
        return turn

    async def _answer_all(self, turn: Turn, put: Put | None) -> list[Completion]:
        """Answer with each choice of a request. When one fails, or the caller is cancelled, the rest are cancelled."""
        count = turn.request.n or 1
        if count == 1:
            return [await self._answer(turn, 0, put)]
        tasks = [asyncio.create_task(self._answer(turn, i, put)) for i in range(count)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            await _cancel(tasks)

    async def _answer(self, turn: Turn, index: int, put: Put | None) -> Completion:
        """Answer with one choice: prompt tokens -> engine -> parsed answer -> recorded exchange -> reply to `put`."""
        request, renderer, policy = turn.request, turn.renderer, turn.policy
        while not self._resolver.is_ready(policy):  # its adapter was unloaded while this request waited
            policy = await self.turns.find_policy(request.model, turn.rollout_id)
        parse_tools = bool(turn.tools) and request.tool_choice != "none"
        parser = renderer.parser(turn.prompt_token_ids, turn.tools, parse_tools=parse_tools)
        completion = Completion(index, request, renderer, parser, self._num_alternatives)
        writer = None if put is None else ChoiceWriter(completion, put)

        # The engine reports tokens as they are sampled to a client that streams, to people who watch, for stop strings
        # (to stop at the first match), and where the answer may go on with new weights. Else all of them at the end.
        at_once = writer is not None or bool(request.stop_strings)
        switching = None
        if turn.switches and (turn.grammar is None or (await policy.engine.info()).resumes_grammars):
            switching = SwitchingAnswer(turn, policy, self._resolver, self.turns)
        is_streamed = at_once or switching is not None or self.live.is_watched(policy.project)
        generate = _generate_request(turn, policy, completion, 0.0 if at_once else WATCHED_CHUNK_S)
        with self.live.followed(LiveRequest(turn, policy, completion, is_streamed)) as live:
            try:
                if not is_streamed:
                    completion.add(await policy.engine.generate_whole(generate))
                else:
                    if switching is None:
                        answer = policy.engine.generate(generate, stream=True)
                    else:
                        answer = switching.chunks(generate)
                    async with aclosing(cast("AsyncGenerator[TokenChunk, None]", answer)) as chunks:
                        async for chunk in chunks:
                            completion.add(chunk)
                            if completion.finish_reason is not None:
                                break
                            if writer is not None:
                                writer.write()
                            self.live.sampled(live)
            except BaseException:
                if completion.token_ids:  # they were sampled, though the client has hung up
                    self._count(turn, completion)
                raise
            if completion.finish_reason is None:
                problem = f"the engine ended completion {completion.exchange_id} without a finish reason; send it again"
                raise ProcessError(problem)
            if turn.grammar is not None:
                await self._structures.check(turn.grammar, renderer, completion.token_ids)
            if switching is not None:
                policy = replace(policy, policy_version=switching.first_version)
                completion.segments = switching.segments(len(completion.token_ids))

            # The answer is whole. It is on the disk before its end is told to anybody.
            self._count(turn, completion)
            exchange = _exchange(turn, policy, completion, generate, await _constraint(policy, completion, generate))
            conversation = extend_hash(turn.conversation, completion.message)
            await self.recorder.append(exchange, conversation=conversation, parent=turn.parent)
            completion.exchange = exchange.summary()
        if writer is not None:
            writer.finish()
        return completion

    def _count(self, turn: Turn, completion: Completion) -> None:
        project, name = turn.policy.project, turn.policy.name
        counts = {"prompt": 0, "cached": 0, "completion": len(completion.token_ids)}
        if completion.index == 0:  # the choices of a request share its prompt
            counts |= {"prompt": len(turn.prompt_token_ids), "cached": completion.num_cached_tokens}
        for kind, count in counts.items():
            self.tokens[f"{project}/{name}", kind] += count
        self.recorder.usage.add(project, name, Amounts(**counts))

    async def prompt_token_ids(self, request: ChatRequest, *, rollout_id: str | None = None) -> list[int]:
        """Return the prompt tokens of a request, even of one that is longer than the model's context. Raises
        `ContextLengthError` if it is many times as long."""
        return (await self.turns.prepare(request, rollout_id=rollout_id, check_length=False)).prompt_token_ids


def _generate_request(turn: Turn, policy: PolicyRef, completion: Completion, chunk_every_s: float) -> GenerateRequest:
    request, grammar = turn.request, turn.grammar
    return GenerateRequest(
        request_id=completion.exchange_id, adapter=policy.adapter, prompt_token_ids=turn.prompt_token_ids,
        max_tokens=turn.max_tokens,
        stop_token_ids=turn.renderer.stop_token_ids if grammar is None else grammar.stop_token_ids,
        grammar=None if grammar is None else grammar.text, seed=(turn.seed + completion.index) % SEEDS,
        repeatable=request.seed is not None, temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p, top_k=max(0, request.top_k or 0),
        min_p=request.min_p or 0.0, num_top_logprobs=max(request.top_logprobs or 0, completion.num_alternatives),
        chunk_every_s=chunk_every_s, sender=(policy.project, turn.key),
    )  # fmt: skip


async def _constraint(policy: PolicyRef, completion: Completion, generate: GenerateRequest) -> Constraint | None:
    """The part of the vocabulary that a completion was drawn from; `None` for all of it."""
    is_cut = generate.top_p < 1 or generate.top_k > 0 or generate.min_p > 0
    reports_kept = is_cut and generate.temperature > 0 and (await policy.engine.info()).reports_kept
    if generate.grammar is None and not reports_kept:
        return None
    stops = [] if generate.grammar is None else list(generate.stop_token_ids)
    return Constraint(grammar=generate.grammar, stop_token_ids=stops, kept=completion.kept if reports_kept else None)


def _exchange(
    turn: Turn, policy: PolicyRef, completion: Completion, generate: GenerateRequest, constraint: Constraint | None
) -> Exchange:
    assert completion.finish_reason is not None
    return Exchange(
        id=completion.exchange_id, rollout_id=turn.rollout_id, project=policy.project, name=policy.name,
        policy_version=policy.policy_version, parent_id=None if turn.parent is None else turn.parent.id,
        branch_reason=turn.branch_reason, prompt_token_ids=turn.prompt_token_ids,
        completion_token_ids=completion.token_ids, sampling_logprobs=completion.logprobs,
        temperature=generate.temperature, top_p=generate.top_p, seed=generate.seed,
        finish_reason=completion.finish_reason, message=completion.message, request_messages=turn.messages,
        tools=turn.tools, created_at=time.time(), segments=completion.segments, constraint=constraint,
        alternatives=pack_alternatives(completion.alternatives or ()),
    )  # fmt: skip


def _envelope(turn: Turn, kind: str) -> dict[str, Any]:
    """The fields of an answer, with the exact tokens of the prompt for a request that asks for them."""
    return {
        "id": f"chatcmpl-{os.urandom(12).hex()}",
        "object": kind,
        "created": int(time.time()),
        "model": turn.request.model,
        "policy_version": turn.policy.policy_version,
        **({"prompt_token_ids": turn.prompt_token_ids} if turn.request.return_token_ids else {}),
    }


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


class SwitchingAnswer:
    """One answer that goes on with new weights when a step is published, for clients that ask for it
    (`x-art-in-flight: switch`).

        tokens of step 3   tokens of step 4          the answer, as the client gets it
        [a b c d]          [e f g]                   a b c d e f g          segments (3, 4), (4, 3)
                 ^ step 4 is published

    Once a newer step is published, the request to the engine ends after the tokens that have arrived, and a new one
    goes on under the new weights: its prompt is the old one and these tokens. Their keys and values are computed again.
    Each token keeps the log-prob that it was drawn with, so its importance ratio is exact. The random number of token i
    depends on (seed, i) as before. A request that waits for the engine, which has sampled none of its tokens, switches
    too, after its first tokens. The name of a model with `@step` always means the same weights.
    """

    def __init__(self, turn: Turn, policy: PolicyRef, resolver: ModelResolver, turns: TurnMaker) -> None:
        self._turn, self._policy, self._resolver, self._turns = turn, policy, resolver, turns
        self._parts: Segments = []

    @property
    def first_version(self) -> int:
        """Step that sampled the first token."""
        return next((step for step, count in self._parts if count), self._policy.policy_version)

    def segments(self, num_tokens: int) -> Segments:
        """Step and number of tokens of each part of the answer's first `num_tokens`; empty if it is one step."""
        left, parts = num_tokens, list[tuple[int, int]]()
        for step, count in self._parts:
            parts.append((step, min(count, left)))
            left -= parts[-1][1]
        return join_segments(parts)

    async def chunks(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Yield the answer to `request`, as `Engine.generate` does with `stream`. The errors are those of it."""
        received: list[int] = []
        part, num_prompt = request, len(request.prompt_token_ids)
        for number in itertools.count(1):
            generator = self._policy.engine.generate(part, stream=True)
            async with aclosing(cast("AsyncGenerator[TokenChunk, None]", generator)) as chunks:
                async for chunk in chunks:
                    received += chunk.token_ids
                    self._parts.append((self._policy.policy_version, len(chunk.token_ids)))
                    if number > 1:  # what a later part says of time and cache is not that of the whole request
                        num_cached = min(chunk.num_cached_tokens, num_prompt)
                        chunk = replace(chunk, timings=None, num_cached_tokens=num_cached)
                    yield chunk
                    if chunk.finish_reason is not None:
                        return
                    if await self._is_replaced():
                        break
                else:
                    return  # the engine ended without a finish reason, which the caller reports
            self._policy = await self._turns.find_policy(self._turn.request.model, self._turn.rollout_id)
            part = replace(
                request, request_id=f"{request.request_id}-{number}", adapter=self._policy.adapter,
                prompt_token_ids=request.prompt_token_ids + received, max_tokens=request.max_tokens - len(received),
                first_index=request.first_index + len(received),
            )  # fmt: skip

    async def _is_replaced(self) -> bool:
        """Whether the model means other weights now, or is about to: these cannot come while the old ones are used."""
        newest = self._resolver.resolve_ready(self._turn.request.model)
        if newest is None and self._resolver.is_ready(self._policy):
            newest = await self._turns.find_policy(self._turn.request.model, self._turn.rollout_id)
        return newest is None or newest.policy_version != self._policy.policy_version
