"""What a chat request becomes before it is sampled: a policy, a renderer, the tokens of its prompt, a grammar.

    request --resolve--> policy
            --conversations--> the recorded turn that the request continues, if any
            --bridge or render--> prompt tokens
            --structures--> the grammar of the answer, if the request asks for a form

Work on large requests happens in threads, so that the event loop goes on answering everybody else.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from art.config import SamplingConfig
from art.errors import ConfigError, ContextLengthError, InvalidRequestError, NotFoundError
from art.gateway.format.bridge import Branch, BranchReason
from art.gateway.format.renderer import RecordedTurn, Renderer, TextRenderer
from art.gateway.format.size import COUNTED_CONTEXTS, check_size, work_size
from art.gateway.policies import ModelResolver, PolicyRef
from art.gateway.record.conversations import Conversations, conversation_hashes
from art.gateway.record.recorder import Exchange
from art.gateway.record.rollout_store import RolloutStore
from art.gateway.structure.grammar import AnswerGrammar
from art.gateway.structure.structures import Structures
from art.gateway.workers import Workers
from art.protocol.chat import Message, Tool, normalize_messages
from art.protocol.dialects.chat_completions import ChatRequest
from art.storage.layout import validate_name

SEEDS = 1 << 64
"""Number of seeds. A request without one, in its body or its header, gets one of them at random."""


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
    switches: bool = False
    """Whether the answer goes on with new weights when a step is published while it is sampled (`switching.py`)."""


class TurnMaker:
    """Makes turns of requests. Nothing of a request is recorded here."""

    def __init__(
        self, resolver: ModelResolver, rollouts: RolloutStore, conversations: Conversations, structures: Structures
    ) -> None:
        self._resolver = resolver
        self._rollouts = rollouts
        self._conversations = conversations
        self._structures = structures
        self._workers = Workers()

    async def prepare(
        self,
        request: ChatRequest,
        rollout_id: str | None,
        key: str,
        *,
        seed: int | None = None,
        switches: bool = False,
        check_length: bool = True,
    ) -> Turn:
        if rollout_id is not None:
            validate_name(rollout_id, param="rollout_id")
        size = work_size(request.messages, request.tools)
        messages = await self._workers.run(size, normalize_messages, request.messages)
        policy = await self.find_policy(request.model, rollout_id)
        sampling = None if rollout_id is None else self._rollouts.check_open(rollout_id, policy.project)
        if check_length:
            _set_sampling(request, sampling or policy.sampling)
        renderer = choose_renderer(policy, request)
        tools = request.tools or None
        limit = policy.size_limit(1 if check_length else COUNTED_CONTEXTS)
        await self._workers.run(size, check_size, messages, tools, limit)
        model = f"{policy.project}/{policy.name}"
        if request.prompt_token_ids is not None:
            model += " without template"  # no chat continues the tokens of a bare prompt

        def hash_with(tools: list[Tool] | None) -> list[bytes]:
            return conversation_hashes(model, tools, request.chat_template_kwargs, messages)

        hashes = await self._workers.run(size, hash_with, tools)
        earlier = self._conversations.find(messages, hashes, rollout_id, hash_with)
        for message in messages:
            message.pop("exchange_id", None)
        prompt = await self._workers.run(size, _build_prompt, renderer, messages, tools, earlier)
        return Turn(
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
            max_tokens=_max_tokens(request, len(prompt.token_ids), policy) if check_length else 0,
            seed=_choose_seed(request.seed if request.seed is not None else seed),
            grammar=await self._structures.prepare(request, renderer, prompt.token_ids, policy.engine, model_name=model)
            if check_length
            else None,
            key=key,
            switches=switches,
        )

    async def find_policy(self, model: str, rollout_id: str | None) -> PolicyRef:
        """Find the policy for a model name. An unknown name means the model that its rollout was announced with.

        That serves agents whose model name cannot be changed.
        """
        if (ready := self._resolver.resolve_ready(model)) is not None:
            return ready
        try:
            return await self._resolver.resolve(model)
        except NotFoundError:
            announced = None if rollout_id is None or "@" in model else self._rollouts.announced_model(rollout_id, None)
            if announced is None:
                raise
        return await self._resolver.resolve(announced)


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


def _set_sampling(request: ChatRequest, sampling: SamplingConfig | None) -> None:
    """Sample a request as `sampling` says, and note what of the request that replaces.

    Raises:
        InvalidRequestError: nothing replaces a penalty of the request.
    """
    if sampling is None:
        for name in request.penalties:
            raise InvalidRequestError(
                f"`{name}` is not supported (got {getattr(request, name)}), since training cannot repeat it; leave it "
                "out, or set `sampling` of the rollout or the model, which replaces what its requests ask for",
                param=name,
            )
        return
    for name, value in sampling:
        asked = getattr(request, name)
        if asked is not None and max(asked, 0) != value:  # a `top_k` of -1 means 0
            request.ignored.append(name)
        setattr(request, name, value)
    request.ignored.extend(request.penalties)


def choose_renderer(policy: PolicyRef, request: ChatRequest) -> Renderer:
    """Return the renderer of a policy with the settings of a request.

    Raises:
        InvalidRequestError: the chat template lacks a setting, or the model cannot call tools.
    """
    renderer = policy.renderer
    if request.prompt_token_ids is not None:
        return TextRenderer(renderer, request.prompt_token_ids)
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


def _choose_seed(seed: int | None) -> int:
    return int.from_bytes(os.urandom(8)) if seed is None else seed % SEEDS


def _max_tokens(request: ChatRequest, num_prompt_tokens: int, policy: PolicyRef) -> int:
    room = policy.max_context - num_prompt_tokens
    if room < 1:
        raise ContextLengthError(
            f"the messages are {num_prompt_tokens} tokens long, and {policy.context} leaves no room for an answer; "
            "shorten them",
            param="messages",
        )
    return min(room, request.token_limit or room)
