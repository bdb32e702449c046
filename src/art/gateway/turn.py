"""What a chat request becomes before it is sampled: a policy, a renderer, the tokens of its prompt, a grammar.

    request --resolve--> policy
            --conversations--> the recorded turn that the request continues, if any
            --bridge or render--> prompt tokens
            --structures--> the grammar of the answer, if the request asks for a form

Work on large requests happens in threads, so that the event loop goes on answering everybody else.

A conversation that is many times as long as the model's context is refused before it is rendered and tokenised. To
tokenise a text takes about a microsecond and up to a hundred bytes of memory per character, so a message of some MiB
would cost seconds and gigabytes only to be refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict, Unpack

import orjson

from art.config import SamplingConfig
from art.errors import ConfigError, ContextLengthError, InvalidRequestError, NotFoundError
from art.gateway.grammar import AnswerGrammar
from art.gateway.policies import ModelResolver, PolicyRef
from art.gateway.renderer import RecordedTurn, Renderer, TemplateKwargs
from art.gateway.structures import Structures
from art.gateway.workers import Workers
from art.protocol.answers import Branch, BranchReason
from art.protocol.chat import Message, Tool, invalid, normalize_messages
from art.protocol.chat_completions import ChatRequest
from art.record.conversations import conversation_hashes, find_continued
from art.record.recorder import Exchange, Recorder
from art.record.rollout_store import RolloutStore
from art.storage.layout import validate_name

_MOST = 8
"""How many times the context a conversation may have. Answers may hold reasoning that the template leaves out, and the
tokens of a longer prompt can be counted."""
_CHARS, _FREE = 8, 2**18
"""Characters per token that a conversation may have, where ordinary text has three to five, and characters that any
conversation may have."""
_PER_MESSAGE = 16
"""Smallest number of characters that a message counts as, where work is compared with other work."""


def work_size(messages: list[Message], tools: list[Tool] | None) -> int:
    """Roughly the number of characters to work on. The messages need not be checked yet."""
    size = len(messages) * _PER_MESSAGE + (len(orjson.dumps(tools)) if tools else 0)
    return size + sum(map(len, _texts(messages)))


def check_size(messages: list[Message], tools: list[Tool] | None, max_context: int, *, limit: str) -> None:
    """Check that normalised messages are not far longer than the context. `limit` names it in errors."""
    most = max_context * _MOST
    num_chars = sum(map(len, _texts(messages))) + (len(orjson.dumps(tools)) if tools else 0)
    if num_chars > max(most * _CHARS, _FREE) or len(messages) > most:
        given = f"{len(messages)} messages, with the tools {num_chars} characters"
        raise ContextLengthError(f"{given}, are too many; the limit is {limit}", param="messages")


def _texts(messages: Iterable[Message]) -> Iterator[str]:
    """The texts that a template may print, without reasoning, which most templates leave out. Of messages that are not
    checked yet, what is no text is left out."""
    for message in messages:
        content, calls = message.get("content"), message.get("tool_calls")
        texts: list[Any] = [content]
        if isinstance(content, list):
            texts = [part.get("text") for part in content if isinstance(part, dict)]
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            texts.append(function.get("arguments") if isinstance(function, dict) else None)
        yield from (text for text in texts if isinstance(text, str))


SEEDS = 1 << 64
"""Number of seeds. A request without one, in its body or its header, gets one of them at random."""


class ChatOptions(TypedDict, total=False):
    """What comes with a request, beside its body."""

    rollout_id: str | None
    key: str
    """Id of the caller's key. Keys take turns at the engine."""
    seed: int | None
    """Where the random numbers begin, if the request has no seed. Unlike the request's own seed it does not demand an
    engine that repeats itself, so vLLM draws as fast as without one."""
    scenario: str | None
    """Name of the rollout's scenario, for people who watch."""
    switches: bool
    """Whether an answer that is being sampled goes on with new weights when a step is published."""
    strict: bool
    """Whether to refuse a request with a field that would have no effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
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
    key: str
    scenario: str | None = None
    switches: bool = False
    """Whether the answer goes on with new weights when a step is published while it is sampled (`SwitchingAnswer`)."""


class TurnMaker:
    """Makes turns of requests. Nothing of a request is recorded here."""

    def __init__(
        self, resolver: ModelResolver, recorder: Recorder, rollouts: RolloutStore, structures: Structures
    ) -> None:
        self._resolver, self._recorder, self._rollouts = resolver, recorder, rollouts
        self._structures, self._workers = structures, Workers()

    async def prepare(self, request: ChatRequest, *, check_length: bool = True, **asked: Unpack[ChatOptions]) -> Turn:
        """Make the turn of a request; `ChatOptions` explains what comes with it. The errors are those of `complete`.
        With `check_length=False` the prompt alone is wanted, even one that leaves no room for an answer."""
        rollout_id, seed = asked.get("rollout_id"), asked.get("seed")
        if rollout_id is not None:
            validate_name(rollout_id, param="rollout_id")
        size = work_size(request.messages, request.tools)
        messages = await self._workers.run(size, normalize_messages, request.messages)
        policy = await self.find_policy(request.model, rollout_id)
        sampling = None if rollout_id is None else self._rollouts.check_open(rollout_id, policy.project)
        if check_length:
            _set_sampling(request, sampling or policy.sampling)
        if asked.get("strict") and request.ignored:
            why = "would have no effect, and this server refuses such fields (`ServerConfig.strict`); leave it out"
            raise invalid(request.ignored[0], why)
        renderer = _choose_renderer(policy, request)
        make = partial(_make_prompt, self._recorder, policy, renderer, request.tools or None, rollout_id)
        prompt = await self._workers.run(size, make, messages, request.chat_template_kwargs)
        conversation, token_ids, messages, parent, branch_reason = prompt
        grammar, max_tokens = None, 0
        if check_length:
            room = policy.max_context - len(token_ids)
            if room < 1:
                problem = f"the messages are {len(token_ids)} tokens long, and {policy.context} leaves no room"
                raise ContextLengthError(f"{problem} for an answer; shorten them", param="messages")
            max_tokens = min(room, request.token_limit or room)
            model = f"{policy.project}/{policy.name}"
            grammar = await self._structures.prepare(request, renderer, token_ids, policy.engine, model_name=model)
        seed = request.seed if request.seed is not None else seed
        return Turn(
            request=request, rollout_id=rollout_id, policy=policy, renderer=renderer, messages=messages,
            tools=request.tools or None, conversation=conversation, prompt_token_ids=token_ids, parent=parent,
            branch_reason=branch_reason, max_tokens=max_tokens, grammar=grammar,
            key=asked.get("key", ""), scenario=asked.get("scenario"), switches=asked.get("switches", False),
            seed=int.from_bytes(os.urandom(8)) if seed is None else seed % SEEDS,
        )  # fmt: skip

    async def find_policy(self, model: str, rollout_id: str | None) -> PolicyRef:
        """Find the policy for a model name. An unknown name means the model that its rollout was announced with. That
        serves agents whose model name cannot be changed."""
        if (ready := self._resolver.resolve_ready(model)) is not None:
            return ready
        try:
            return await self._resolver.resolve(model)
        except NotFoundError:
            announced = None if rollout_id is None or "@" in model else self._rollouts.announced_model(rollout_id, None)
            if announced is None:
                raise
        return await self._resolver.resolve(announced)


def _make_prompt(
    recorder: Recorder, policy: PolicyRef, renderer: Renderer, tools: list[Tool] | None, rollout_id: str | None,
    messages: list[Message], settings: TemplateKwargs | None,
) -> tuple[bytes, list[int], list[Message], Exchange | None, BranchReason | None]:  # fmt: skip
    """Extend the tokens of the exchange that the messages continue, or render them. Returns the hash of the
    conversation, the tokens, the messages as rendered, and the exchange that was extended, or why none was. It takes no
    state that changes, so that it can run in a thread."""
    check_size(messages, tools, policy.max_context, limit=policy.context)

    def hash_with(tools: list[Tool] | None) -> list[bytes]:
        return conversation_hashes(f"{policy.project}/{policy.name}", tools, settings, messages)

    hashes = hash_with(tools)
    earlier = find_continued(recorder, messages, hashes, rollout_id, hash_with)
    for message in messages:
        message.pop("exchange_id", None)
    branch = earlier if isinstance(earlier, Branch) else None
    if isinstance(earlier, tuple):
        parent, num_covered = earlier
        recorded = [*parent.request_messages, parent.message]
        turn = RecordedTurn(recorded, parent.prompt_token_ids, parent.completion_token_ids)
        bridged = renderer.bridge(turn, messages[num_covered:], tools)
        messages = recorded + messages[num_covered:]
        if not isinstance(bridged, Branch):
            return hashes[-1], bridged, messages, parent, None
        branch = bridged
    return hashes[-1], renderer.render(messages, tools), messages, None, None if branch is None else branch.reason


def _set_sampling(request: ChatRequest, sampling: SamplingConfig | None) -> None:
    """Sample a request as `sampling` says, and note what of the request that replaces. A penalty must be replaced."""
    if sampling is None:
        for name in request.penalties:
            todo = "leave it out, or set `sampling` of the rollout or the model, which replaces what requests ask for"
            problem = f"is not supported (got {getattr(request, name)}), since training cannot repeat it"
            raise invalid(name, f"{problem}; {todo}")
        return
    for name, value in sampling:
        asked = getattr(request, name)
        if asked is not None and max(asked, 0) != value:  # a `top_k` of -1 means 0
            request.ignored.append(name)
        setattr(request, name, value)
    request.ignored.extend(request.penalties)


def _choose_renderer(policy: PolicyRef, request: ChatRequest) -> Renderer:
    """Return the renderer of a policy with the settings of a request, if its template has them and can call tools."""
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
