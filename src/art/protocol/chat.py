"""Wire types of `/v1/chat/completions`: OpenAI's request, checked strictly; answers are plain dicts.

A parameter that ART cannot honour is an error that names it; nothing is ignored silently. Fields that only label a
request (`user`, `metadata`, ...) are accepted. Messages stay plain dicts that `normalize_messages` checks, because each
request carries the whole conversation and models would be slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from art.errors import InvalidRequestError

R = TypeVar("R", bound=BaseModel)

Message: TypeAlias = dict[str, Any]
"""A message as chat templates see it: `role`, `content` (text), and where present `name`, `tool_calls`, `tool_call_id`,
`reasoning_content`, `exchange_id`."""
Tool: TypeAlias = dict[str, Any]
"""A tool: `{"type": "function", "function": {"name": ..., "description": ..., "parameters": <JSON schema>}}`."""

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 4


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False
    include_obfuscation: bool = False
    """Field of OpenAI's API that is accepted without effect."""


class OpenAIRequest(BaseModel):
    """Base class of chat and Responses requests. A number must be a JSON number: `"0.7"` is refused."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    """Model to ask: `project/name`, `project/name@step`, or `name[@step]` where that is unambiguous."""
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    """Choice i is sampled with `seed + i`. Without a seed one is drawn at random and recorded."""
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    tool_choice: str | dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None
    parallel_tool_calls: bool | None = None
    """Accepted only as `true`, which is OpenAI's default."""

    # These are labels without effect on the answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class ChatRequest(OpenAIRequest):
    """Body of `/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """Another name for `max_tokens`. A completion never goes beyond the context; it then ends with `length`."""
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: list[Tool] | None = None

    # These are accepted only with the value that means "not used".
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    functions: list[Any] | None = None
    function_call: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    web_search_options: dict[str, Any] | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "functions": ([],),
    "function_call": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}
"""Fields that cannot be honoured, with the values that mean "not used"."""


def parse_chat_request(body: Any) -> ChatRequest:
    """Check the decoded JSON body of a chat request.

    Raises:
        InvalidRequestError: a field is not valid; `param` names it.
    """
    request = parse_body(ChatRequest, body, _UNSUPPORTED)
    _check_stop(request.stop_strings)
    _check_tools(request)
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequestError("`top_logprobs` needs `logprobs: true`", param="top_logprobs")
    check_openai_fields(request)
    return request


def check_openai_fields(request: OpenAIRequest) -> None:
    """Check the fields that chat and Responses requests share.

    Raises:
        InvalidRequestError: `tool_choice` cannot be honoured, or `stream_options` has no stream.
    """
    if request.tool_choice not in (None, "auto", "none"):
        raise InvalidRequestError(
            f"`tool_choice` {short(request.tool_choice)} cannot be enforced; supported are 'auto' (the default) and "
            "'none'",
            param="tool_choice",
        )
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("`stream_options` needs `stream: true`", param="stream_options")


def parse_body(kind: type[R], body: Any, unsupported: Mapping[str, tuple[Any, ...]]) -> R:
    """Check a decoded JSON body of any dialect.

    Args:
        unsupported: fields that cannot be honoured, with the values that mean "not used".

    Raises:
        InvalidRequestError: a field is not valid; `param` names it.
    """
    if not isinstance(body, dict):
        raise InvalidRequestError(f"the request body must be a JSON object, got {type(body).__name__}")
    try:
        request = kind.model_validate(body)
    except ValidationError as error:
        raise invalid_request(error) from None
    for name in sorted(request.model_fields_set & unsupported.keys()):
        value = getattr(request, name)
        if value is not None and value not in unsupported[name]:
            raise InvalidRequestError(f"`{name}` is not supported; leave it out (got {short(value)})", param=name)
    return request


def invalid_request(error: ValidationError) -> InvalidRequestError:
    """Turn pydantic's first complaint about a request into an error that is worded like OpenAI's."""
    first = error.errors(include_url=False)[0]
    param = ".".join(str(part) for part in first["loc"]) or None
    if first["type"] == "extra_forbidden":
        return InvalidRequestError(f"unknown parameter `{param}`; remove it", param=param)
    if first["type"] == "missing":
        return InvalidRequestError(f"`{param}` is missing", param=param)
    return InvalidRequestError(f"`{param}`: {first['msg']}, got {short(first.get('input'))}", param=param)


def _check_stop(strings: list[str]) -> None:
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"`stop` takes at most {MAX_STOP_STRINGS} strings, got {len(strings)}", param="stop")
    if "" in strings:
        raise InvalidRequestError("`stop` strings must not be empty", param="stop")


def _check_tools(request: ChatRequest) -> None:
    for i, tool in enumerate(request.tools or []):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict) or not function.get("name"):
            raise InvalidRequestError(
                f'each tool must be {{"type": "function", "function": {{"name": ..., ...}}}}, got {short(tool)}',
                param=f"tools.{i}",
            )
    if request.tool_choice == "auto" and not request.tools:
        raise InvalidRequestError("`tool_choice` needs `tools`", param="tool_choice")


_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_KNOWN = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "exchange_id"}
_IGNORED = {"provider_specific_fields"}
"""Bookkeeping of client libraries that means nothing to the model."""

FinishReason = Literal["stop", "length", "tool_calls"]


def normalize_messages(messages: list[Message]) -> list[Message]:
    """Bring chat messages into the one form that the server works with. The input is not changed.

    `developer` becomes `system`, text parts are joined, absent content is the empty string, empty fields are dropped.

    Raises:
        InvalidRequestError: a type is wrong, a role or field is unknown, or content is not text.
    """
    return [normalize_message(message, f"messages.{i}") for i, message in enumerate(messages)]


def normalize_message(message: Message, where: str = "message") -> Message:
    """Bring one chat message into the form that the server works with. `where` names the message in errors."""
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequestError(
            f"`{where}.role` must be system, developer, user, assistant or tool, got {short(role)}",
            param=f"{where}.role",
        )
    content = message.get("content")
    if not isinstance(content, str):
        content = _join_text(content, where)
    result: Message = {"role": _ROLES[role], "content": content}
    if len(message) == 2 and "content" in message:
        return result
    for key, value in message.items():
        if key not in _KNOWN:
            if value and key not in _IGNORED:
                raise InvalidRequestError(f"`{where}.{key}` is not supported; remove it", param=f"{where}.{key}")
        elif key not in ("role", "content") and value is not None:
            if key == "tool_calls":
                if value:
                    result[key] = _normalize_tool_calls(value, f"{where}.tool_calls")
            elif not isinstance(value, str):
                raise InvalidRequestError(
                    f"`{where}.{key}` must be a string, got {short(value)}", param=f"{where}.{key}"
                )
            else:
                result[key] = value
    return result


def _join_text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if not isinstance(content, list):
        raise InvalidRequestError(
            f"`{where}.content` must be text or a list of text parts, got {short(content)}", param=f"{where}.content"
        )
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            what = f"a part of type {kind!r}" if kind else short(part)
            raise InvalidRequestError(
                f"`{where}.content` has {what}; only text parts are supported", param=f"{where}.content"
            )
        texts.append(part["text"])
    return "".join(texts)


def _normalize_tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InvalidRequestError(f"`{where}` must be a list, got {short(calls)}", param=where)
    result = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequestError(
                f"`{where}.{i}` must have a `function` with a `name`, got {short(call)}", param=f"{where}.{i}"
            )
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            raise InvalidRequestError(
                f"`{where}.{i}.function.arguments` must be JSON text, got {short(arguments)}", param=f"{where}.{i}"
            )
        clean: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        if isinstance(call.get("id"), str):
            clean["id"] = call["id"]
        result.append(clean)
    return result


def tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Make a tool call in OpenAI's form. `arguments` is JSON text."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def short(value: Any) -> str:
    """Write a value for an error message, in at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
