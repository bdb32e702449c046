"""Wire types of `/v1/chat/completions`: OpenAI's request, checked strictly; answers are plain dicts.

A parameter that says what is sampled and that ART cannot honour is an error that names it. One that only advises
(`reasoning_effort`) is accepted, and the answer names it as ignored; nothing is ignored silently. Fields that only
label a request (`user`, `metadata`, ...) are accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from art.errors import InvalidRequestError
from art.protocol.chat import Tool, short
from art.protocol.dialects.structured import CallRule, ContentForm, read_format, read_guided, read_tool_choice
from art.protocol.training import Objects

R = TypeVar("R", bound=BaseModel)


_NO_CALLS = CallRule("none")
MAX_CHOICES = 128
MAX_MODEL_NAME = 512
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

    model: str = Field(max_length=MAX_MODEL_NAME)
    """Model to ask: `project/name`, `project/name@step`, or `name[@step]` where that is unambiguous."""
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    """Choice i is sampled with `seed + i`. Without a seed one is drawn at random and recorded."""
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    """Draw from this many of the most likely tokens; 0 and -1 mean from all."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Draw only tokens at least this many times as likely as the most likely one."""
    tool_choice: str | dict[str, Any] | None = None
    """`auto`, `none`, `required`, one function, or `allowed_tools`."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None
    parallel_tool_calls: bool | None = None
    """False keeps an answer to one tool call."""

    # What the content of an answer must look like, in the words of vLLM.
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    """A grammar in Lark, as llguidance writes it, or in GBNF."""
    structured_outputs: dict[str, Any] | None = None
    """One of `json`, `json_object`, `regex`, `choice` and `grammar`."""

    # These are labels without effect on the answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None


class ChatRequest(OpenAIRequest):
    """Body of `/v1/chat/completions`."""

    messages: Objects = Field(min_length=1)
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """Another name for `max_tokens`. A completion never goes beyond the context; it then ends with `length`."""
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    return_token_ids: bool | None = None
    """Add the exact tokens to the answer, as vLLM does: `prompt_token_ids`, and `token_ids` in each choice."""
    return_tokens_as_token_ids: bool | None = None
    """Write `token_id:<id>` in place of each token's text in `logprobs`, as vLLM does."""
    tools: Objects | None = None
    response_format: dict[str, Any] | None = None

    # Penalties are refused, except where the sampling of a rollout or model replaces them.
    frequency_penalty: float | None = None
    presence_penalty: float | None = None

    # These only advise: they are accepted, ignored and reported.
    reasoning_effort: str | None = None
    verbosity: str | None = None

    # These are accepted only with the value that means "not used".
    logit_bias: dict[str, float] | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    functions: list[Any] | None = None
    function_call: str | dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    web_search_options: dict[str, Any] | None = None

    _content_form: ContentForm | None = PrivateAttr(default=None)
    # Made by functions, since pydantic would copy a default for each request.
    _call_rule: CallRule = PrivateAttr(default_factory=lambda: _NO_CALLS)
    _strict_tools: frozenset[str] = PrivateAttr(default_factory=frozenset)
    _prompt_token_ids: list[int] | None = PrivateAttr(default=None)
    _ignored: list[str] = PrivateAttr(default_factory=list)
    _remarks: list[str] = PrivateAttr(default_factory=list)

    @property
    def ignored(self) -> list[str]:
        """Fields of the client's request that have no effect. The server adds those that it replaces."""
        return self._ignored

    @property
    def remarks(self) -> list[str]:
        """What the server tells the client about this request, beside the answer."""
        return self._remarks

    @property
    def penalties(self) -> list[str]:
        """The penalties that the request asks for."""
        return [name for name in ("frequency_penalty", "presence_penalty") if getattr(self, name)]

    @property
    def content_form(self) -> ContentForm | None:
        """What the content of the answer must look like; set by `parse_chat_request`."""
        return self._content_form

    @property
    def call_rule(self) -> CallRule:
        """Which tools the answer may call; set by `parse_chat_request`."""
        return self._call_rule

    @property
    def strict_tools(self) -> frozenset[str]:
        """Functions whose arguments must match their schema; set by `parse_chat_request`."""
        return self._strict_tools

    @property
    def prompt_token_ids(self) -> list[int] | None:
        """The prompt of a request that uses no chat template; set by `bare_request`."""
        return self._prompt_token_ids

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "logit_bias": ({},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "web_search_options": (),
}
"""Fields that cannot be honoured, with the values that mean "not used"."""
_ADVICE = {"reasoning_effort": (None,), "verbosity": (None, "medium")}
"""Fields that only advise, with the values that mean "not used"."""


def parse_chat_request(
    body: Any, form: ContentForm | None = None, strict_tools: Iterable[str] = (), ignored: Iterable[str] = ()
) -> ChatRequest:
    """Check the decoded JSON body of a chat request.

    Args:
        form: what the content must look like, if the dialect of the request has said so already.
        strict_tools: functions that the dialect of the request has called strict.
        ignored: fields of the request in its own dialect that have no effect.

    Raises:
        InvalidRequestError: a field is not valid; `param` names it.
    """
    request = parse_body(ChatRequest, body, _UNSUPPORTED)
    request._ignored = [*ignored, *(name for name, unused in _ADVICE.items() if getattr(request, name) not in unused)]
    _check_stop(request.stop_strings)
    _check_tools(request.tools or [])
    functions = [tool["function"] for tool in request.tools or []]
    request._content_form = _content_form(request, form)
    request._call_rule = read_tool_choice(
        request.tool_choice,
        [function["name"] for function in functions],
        parallel=request.parallel_tool_calls is not False,
    )
    request._strict_tools = frozenset(
        [*strict_tools, *(function["name"] for function in functions if function.get("strict") is True)]
    )
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequestError("`top_logprobs` needs `logprobs: true`", param="top_logprobs")
    check_openai_fields(request)
    return request


def bare_request(fields: dict[str, Any], prompt_token_ids: list[int]) -> ChatRequest:
    """Make the chat request of a prompt that uses no chat template. Its one message is what is recorded.

    Raises:
        InvalidRequestError: a field is not valid; `param` names it.
    """
    request = parse_chat_request(fields)
    request._prompt_token_ids = prompt_token_ids
    return request


def check_openai_fields(request: OpenAIRequest) -> None:
    """Check the fields that chat and Responses requests share.

    Raises:
        InvalidRequestError: `stream_options` has no stream.
    """
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


def _content_form(request: ChatRequest, form: ContentForm | None) -> ContentForm | None:
    plain = [form, read_format(request.response_format, "response_format", nested=True)]
    guided = {name: getattr(request, name) for name in _GUIDED}
    forms = [one for one in [*plain, *read_guided(guided)] if one is not None]
    if len(forms) > 1:
        first, second = forms[0].param, forms[1].param
        raise InvalidRequestError(
            f"`{first}` and `{second}` both say what the answer looks like; send only one of them", param=second
        )
    return forms[0] if forms else None


_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")


_JSON_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords of JSON Schema whose value has schemas by name."""
_SCHEMAS = ("items", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf", "not")
"""Keywords whose value is a schema, or a list of them."""


def _check_tools(tools: list[Tool]) -> None:
    for i, tool in enumerate(tools):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if tool.get("type") != "function" or not isinstance(function, dict) or not isinstance(name, str) or not name:
            raise InvalidRequestError(
                f'each tool must be {{"type": "function", "function": {{"name": ..., ...}}}}, got {short(tool)}',
                param=f"tools.{i}",
            )
        _check_types(function.get("parameters"), f"tools.{i}.function.parameters")


def _check_types(schema: Any, param: str) -> None:
    """Check that each type in a JSON schema exists. A mistyped one would be shown to the model, and never enforced."""
    todo = [("", schema)]
    while todo:
        name, part = todo.pop()
        if not isinstance(part, dict):
            continue
        types = part.get("type")
        for one in types if isinstance(types, list) else [types]:
            if one is not None and one not in _JSON_TYPES:
                where = f" at {short(name)}" if name else ""
                raise InvalidRequestError(
                    f"`{param}` has the type {short(one)}{where}; JSON Schema has {', '.join(_JSON_TYPES)}", param=param
                )
        for key, value in part.items():
            if key in _NAMED_SCHEMAS and isinstance(value, dict):
                todo += value.items()
            elif key in _SCHEMAS:
                todo += [(name, each) for each in (value if isinstance(value, list) else [value])]
