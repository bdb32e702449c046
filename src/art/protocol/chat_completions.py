"""Wire types of `/v1/chat/completions`: OpenAI's request, checked strictly; answers are plain dicts.

Every way of writing a form of the answer (response formats, vLLM's guided fields) ends in one `ContentForm`, and every
way of choosing tools in one `CallRule`. The other dialects are translated to this request.

A parameter that says what is sampled and that ART cannot honour is an error that names it. One that only advises
(`reasoning_effort`) is accepted, and the answer names it as ignored; nothing is ignored silently. Fields that only
label a request (`user`, `metadata`, ...) are accepted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from art.errors import InvalidRequestError
from art.protocol.chat import Tool, invalid, short
from art.protocol.training import Objects

R = TypeVar("R", bound=BaseModel)
FormKind = Literal["json", "regex", "choice"]
MAX_FORM_CHARS = 64 * 1024
"""Longest regular expression of a request, and largest schema as JSON text."""
_MAX_TEXTS = 1024


@dataclass(frozen=True, slots=True)
class ContentForm:
    """What the content of an answer must look like."""

    kind: FormKind
    value: Any
    """A JSON schema, a regular expression, or a list of texts."""
    param: str
    """The parameter that the client sent, for errors."""


@dataclass(frozen=True, slots=True)
class CallRule:
    """Which tools an answer may call, and whether it must."""

    mode: Literal["auto", "required", "none"] = "auto"
    name: str | None = None
    """The only function that may be called; `None` for all tools."""
    single: bool = False
    """Whether at most one call is allowed."""


def read_format(value: dict[str, Any] | None, where: str, *, nested: bool) -> ContentForm | None:
    """Read a response format: `{"type": "json_schema", ...}`, `{"type": "json_object"}` or `{"type": "text"}`.

    Args:
        where: name of the parameter, for errors.
        nested: whether the schema is inside an object `json_schema`, as in chat; else it is beside the type.
    """
    if value is None or value.get("type") == "text":
        return None
    if value.get("type") == "json_object":
        return ContentForm("json", {"type": "object"}, where)
    if value.get("type") != "json_schema":
        raise invalid(f"{where}.type", f"must be text, json_object or json_schema, got {value.get('type')!r}")
    holder, path = (value.get("json_schema"), f"{where}.json_schema") if nested else (value, where)
    schema = holder.get("schema") if isinstance(holder, dict) else None
    return ContentForm("json", _schema(schema, f"{path}.schema"), f"{path}.schema")


def read_guided(request: OpenAIRequest) -> list[ContentForm]:
    """Read the forms that vLLM's `guided_json`, `guided_regex`, `guided_choice` and `structured_outputs` ask for.
    Raises `InvalidRequestError` if a value is not valid."""
    given = {f"guided_{kind}": (kind, getattr(request, f"guided_{kind}")) for kind in ("json", "regex", "choice")}
    given |= {f"structured_outputs.{kind}": (kind, it) for kind, it in (request.structured_outputs or {}).items()}
    return [
        _read_guide(kind, value, param)
        for param, (kind, value) in given.items() if value is not None and value is not False
    ]  # fmt: skip


def _read_guide(kind: str, value: Any, param: str) -> ContentForm:
    if kind == "json_object" and value is True:
        return ContentForm("json", {"type": "object"}, param)
    if kind == "json":
        return ContentForm("json", _schema(value, param), param)
    if kind == "regex":
        if not isinstance(value, str) or not value.strip():
            raise invalid(param, "must be a text that is not empty")
        _check_size(len(value), param)
        return ContentForm("regex", value, param)
    if kind == "choice":
        texts = value if isinstance(value, list) else []
        if not 0 < len(texts) <= _MAX_TEXTS or not all(isinstance(text, str) and text for text in texts):
            raise invalid(param, f"must be a list of 1 to {_MAX_TEXTS} texts, none of them empty")
        _check_size(sum(map(len, texts)), param)
        return ContentForm("choice", texts, param)
    raise invalid(param, "is not supported; supported are json, json_object, regex and choice")


def _schema(value: Any, param: str) -> dict[str, Any]:
    """A JSON schema, or its JSON text, within the limits of size."""
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        _check_size(len(json.dumps(schema)), param)
    except RecursionError:
        raise invalid(param, "is nested too deeply") from None
    except ValueError:
        schema = None
    if not isinstance(schema, dict):
        raise invalid(param, "must be a JSON schema, an object")
    return schema


def _check_size(size: int, param: str) -> None:
    if size > MAX_FORM_CHARS:
        raise invalid(param, f"has {size:,} characters; at most {MAX_FORM_CHARS:,} are allowed")


def read_tool_choice(choice: Any, tool_names: Iterable[str], *, parallel: bool) -> CallRule:
    """Read `tool_choice` of a chat request, with `parallel_tool_calls`. Raises `InvalidRequestError` if the choice has
    no known form, names no tool of the request, or there are no tools."""
    known, single, param = frozenset(tool_names), not parallel, "tool_choice"
    if choice == "none" or (choice is None and not known):
        return CallRule("none")
    if not known:
        raise invalid(param, "needs `tools`")
    if choice in (None, "auto", "required"):
        return CallRule(choice or "auto", single=single)
    if not isinstance(choice, dict) or choice.get("type") != "function":
        forms = """'auto', 'required', 'none' or {"type": "function", "function": {"name": ...}}"""
        raise invalid(param, f"must be {forms}, got {short(choice)}; for some of the tools, send only these")
    function = choice.get("function", choice)  # beside the type, in the Responses API
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name not in known:
        raise invalid(param, f"names the function {name!r}, which is not in `tools`: {', '.join(sorted(known))}")
    return CallRule("required", name, single=True)


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
    """`auto`, `none`, `required`, or one function."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None
    parallel_tool_calls: bool | None = None
    """False keeps an answer to one tool call."""

    # What the content of an answer must look like, in the words of vLLM.
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    structured_outputs: dict[str, Any] | None = None
    """One of `json`, `json_object`, `regex` and `choice`."""

    # These are labels without effect on the answer, besides `LABELS`.
    user: str | None = None
    metadata: dict[str, str] | None = None


class ChatBody(OpenAIRequest):
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

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class ChatRequest(ChatBody):
    """A chat request of any dialect, with what `parse_chat_request` has read from its fields."""

    content_form: ContentForm | None = None
    """What the content of the answer must look like."""
    call_rule: CallRule = CallRule("none")
    """Which tools the answer may call."""
    strict_tools: frozenset[str] = frozenset()
    """Functions whose arguments must match their schema."""
    ignored: list[str] = []
    """Fields of the client's request that have no effect. The server adds those that it replaces."""
    remarks: list[str] = []
    """What the server tells the client about this request, beside the answer."""

    @property
    def penalties(self) -> list[str]:
        """The penalties that the request asks for."""
        return [name for name in ("frequency_penalty", "presence_penalty") if getattr(self, name)]


_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "logit_bias": ({},), "modalities": (["text"],), "audio": (), "prediction": (), "functions": ([],),
    "function_call": ("none", "auto"), "continue_final_message": (False,), "add_generation_prompt": (True,),
    "web_search_options": (),
}  # fmt: skip
"""Fields that cannot be honoured, with the values that mean "not used"."""
LABELS = (
    "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options",
)  # fmt: skip
"""Fields of OpenAI's APIs that only label a request: whatever they are, they have no effect."""
_ADVICE = {"reasoning_effort": (None,), "verbosity": (None, "medium")}
"""Fields that only advise, with the values that mean "not used"."""


def parse_chat_request(
    body: Any, form: ContentForm | None = None, strict_tools: Iterable[str] = (), ignored: Iterable[str] = ()
) -> ChatRequest:
    """Check the decoded JSON body of a chat request. The error for a field that is not valid names it.

    Args:
        form: what the content must look like, if the dialect of the request has said so already.
        strict_tools: functions that the dialect of the request has called strict.
        ignored: fields of the request in its own dialect that have no effect.
    """
    request = parse_body(ChatBody, body, _UNSUPPORTED, LABELS)
    if len(request.stop_strings) > MAX_STOP_STRINGS:
        raise invalid("stop", f"takes at most {MAX_STOP_STRINGS} strings, got {len(request.stop_strings)}")
    if "" in request.stop_strings:
        raise invalid("stop", "strings must not be empty")
    _check_tools(request.tools or [])
    functions = [tool["function"] for tool in request.tools or []]
    names, parallel = [function["name"] for function in functions], request.parallel_tool_calls is not False
    strict = {function["name"] for function in functions if function.get("strict") is True}
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs", "needs `logprobs: true`")
    return ChatRequest.model_construct(
        **vars(request),
        content_form=_content_form(request, form),
        call_rule=read_tool_choice(request.tool_choice, names, parallel=parallel),
        strict_tools=frozenset(strict.union(strict_tools)),
        ignored=[*ignored, *(name for name, unused in _ADVICE.items() if getattr(request, name) not in unused)],
        remarks=[],
    )


def parse_body(kind: type[R], body: Any, unsupported: Mapping[str, tuple[Any, ...]], labels: Iterable[str]) -> R:
    """Check a decoded JSON body of any dialect. The error for a field that is not valid names it.

    Args:
        unsupported: fields that cannot be honoured, with the values that mean "not used".
        labels: fields without effect.
    """
    if not isinstance(body, dict):
        raise InvalidRequestError(f"the request body must be a JSON object, got {type(body).__name__}")
    for name in sorted(body.keys() & unsupported.keys()):
        value = body[name]
        if value is not None and value not in unsupported[name]:
            raise invalid(name, f"is not supported; leave it out (got {short(value)})")
    unread = {*unsupported, *labels} - kind.model_fields.keys()
    try:
        request = kind.model_validate({name: value for name, value in body.items() if name not in unread})
    except ValidationError as error:
        raise invalid_request(error) from None
    if isinstance(request, OpenAIRequest) and request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "needs `stream: true`")
    return request


def check_keys(value: dict[str, Any] | None, param: str, known: Iterable[str]) -> None:
    """Check that an object of a request has no other keys than the `known` ones, and an object as its `format`."""
    for key, one in (value or {}).items():
        if key not in known and one is not None:
            raise invalid(f"{param}.{key}", f"is not supported; leave it out (got {short(one)})")
        if key == "format" and not isinstance(one, dict | None):
            raise invalid(f"{param}.format", 'must be an object such as {"type": "text"}')


def invalid_request(error: ValidationError) -> InvalidRequestError:
    """Turn pydantic's first complaint about a request into an error that is worded like OpenAI's."""
    first = error.errors(include_url=False)[0]
    param = ".".join(str(part) for part in first["loc"]) or None
    if first["type"] == "extra_forbidden":
        return InvalidRequestError(f"unknown parameter `{param}`; remove it", param=param)
    if first["type"] == "missing":
        return InvalidRequestError(f"`{param}` is missing", param=param)
    return InvalidRequestError(f"`{param}`: {first['msg']}, got {short(first.get('input'))}", param=param)


def _content_form(request: ChatBody, form: ContentForm | None) -> ContentForm | None:
    plain = [form, read_format(request.response_format, "response_format", nested=True)]
    forms = [one for one in [*plain, *read_guided(request)] if one is not None]
    if len(forms) > 1:
        first, second = forms[0].param, forms[1].param
        raise invalid(second, f"and `{first}` both say what the answer looks like; send only one of them")
    return forms[0] if forms else None


def _check_tools(tools: list[Tool]) -> None:
    for i, tool in enumerate(tools):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if tool.get("type") != "function" or not isinstance(function, dict) or not isinstance(name, str) or not name:
            form = '{"type": "function", "function": {"name": ..., ...}}'
            raise InvalidRequestError(f"each tool must be {form}, got {short(tool)}", param=f"tools.{i}")
