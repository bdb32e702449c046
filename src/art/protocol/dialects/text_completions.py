"""Wire types of `/v1/completions` (OpenAI's text completions) and of vLLM's `/tokenize` and `/detokenize`.

Here a prompt is text or tokens that reach the model as they are, without a chat template.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import ConfigDict, Field, PlainValidator

from art.errors import InvalidRequestError
from art.protocol.answers import Answer, ChatUsage
from art.protocol.dialects.chat_completions import (
    MAX_CHOICES,
    MAX_MODEL_NAME,
    MAX_TOP_LOGPROBS,
    OpenAIRequest,
    check_openai_fields,
    parse_body,
)
from art.protocol.training import Objects, Wire

TokenIds: TypeAlias = list[int]
_MAX_TOKEN_ID = 2**32 - 1
_DEFAULT_TOKENS = 16


def _is_token_id(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_TOKEN_ID


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and bool(value) and all(map(_is_token_id, value)))


def _check_prompt(value: Any) -> Any:
    """Check a prompt or a list of prompts. Written by hand, because pydantic reports each element of a long list."""
    if _is_prompt(value) or (isinstance(value, list) and value and all(map(_is_prompt, value))):
        return value
    raise ValueError("a prompt is a text or a list of token ids; send one or a list of them")


def _check_token_ids(value: Any) -> Any:
    if isinstance(value, list) and all(map(_is_token_id, value)):
        return value
    raise ValueError("token ids are numbers from 0")


_Prompts = str | list[str] | TokenIds | list[TokenIds]


class CompletionRequest(OpenAIRequest):
    """Body of `/v1/completions`."""

    prompt: Annotated[_Prompts, PlainValidator(_check_prompt, json_schema_input_type=_Prompts)]
    """A text or its tokens, or several of them. With several, choice `i` of prompt `p` has the index `p * n + i`."""
    add_special_tokens: bool = True
    """Whether the tokenizer adds its own tokens to a text, such as one for the beginning."""
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(default=None, ge=1)
    """16 by default, as in OpenAI's API. A completion never goes beyond the context."""
    stop: str | list[str] | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    """Report the log-prob of each sampled token, and this many of the most likely ones."""

    # Penalties are refused, except where the sampling of a rollout or model replaces them.
    frequency_penalty: float | None = None
    presence_penalty: float | None = None

    # These are accepted only with the value that means "not used".
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    logit_bias: dict[str, float] | None = None

    @property
    def prompts(self) -> list[str | TokenIds]:
        prompt: Any = self.prompt
        return [prompt] if _is_prompt(prompt) else prompt

    @property
    def choices_per_prompt(self) -> int:
        return self.n or 1

    @property
    def token_limit(self) -> int:
        return self.max_tokens or _DEFAULT_TOKENS


_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "tool_choice": (),
    "chat_template_kwargs": ({},),
    "parallel_tool_calls": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
}
"""Fields that cannot be honoured, with the values that mean "not used"."""


def parse_completion_request(body: Any) -> CompletionRequest:
    """Check the decoded JSON body of a request to `/v1/completions`.

    Raises:
        InvalidRequestError: a field is not valid; `param` names it.
    """
    request = parse_body(CompletionRequest, body, _UNSUPPORTED)
    check_openai_fields(request)
    count = len(request.prompts) * request.choices_per_prompt
    if count > MAX_CHOICES:
        raise InvalidRequestError(
            f"{len(request.prompts)} prompts with `n` {request.choices_per_prompt} ask for {count} choices; a request "
            f"has at most {MAX_CHOICES}",
            param="prompt",
        )
    return request


class CompletionChoice(Answer):
    index: int
    text: str
    finish_reason: Literal["stop", "length"]
    logprobs: dict[str, Any] | None
    exchange_id: str
    """Id of the recorded prompt and answer, by which training finds the exact tokens."""


class CompletionAnswer(Answer):
    """OpenAI's `text_completion`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    policy_version: int
    """Step whose weights sampled the answer."""
    choices: list[CompletionChoice]
    usage: ChatUsage


class TokenizeRequest(Wire):
    """Body of `/tokenize`: a `prompt`, or `messages` as in a chat request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str = Field(max_length=MAX_MODEL_NAME)
    prompt: str | None = None
    messages: Objects | None = None
    tools: Objects | None = None
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None
    add_generation_prompt: bool = True
    """Whether the opening of the next answer follows the messages."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its own tokens; by default to a prompt. A chat template writes them itself."""
    return_token_strs: bool = False


class TokenizeAnswer(Wire):
    count: int
    max_model_len: int
    """Largest number of tokens of a prompt and its answer."""
    tokens: list[int]
    token_strs: list[str] | None = None
    """The tokens as the vocabulary writes them, if `return_token_strs` asks for them."""


class DetokenizeRequest(Wire):
    """Body of `/detokenize`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str = Field(max_length=MAX_MODEL_NAME)
    tokens: Annotated[TokenIds, PlainValidator(_check_token_ids, json_schema_input_type=TokenIds)]


class DetokenizeAnswer(Wire):
    prompt: str
    """The exact text of the tokens, with special tokens. Bytes that are not UTF-8 are replaced."""


def parse_tokenize_request(body: Any) -> TokenizeRequest:
    """Check the decoded JSON body of a request to `/tokenize`.

    Raises:
        InvalidRequestError: a field is not valid, or does not fit the others; `param` names it.
    """
    request = parse_body(TokenizeRequest, body, {})
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequestError("send either `prompt` or `messages`", param="prompt")
    if request.messages is not None:
        if request.add_special_tokens:
            raise InvalidRequestError(
                "`add_special_tokens` is for a `prompt`: a chat template writes special tokens itself; leave it out",
                param="add_special_tokens",
            )
        return request
    for name in ("tools", "chat_template_kwargs"):
        if getattr(request, name):
            raise InvalidRequestError(f"`{name}` is for `messages`; leave it out with a `prompt`", param=name)
    return request


def parse_detokenize_request(body: Any) -> DetokenizeRequest:
    """Check the decoded JSON body of a request to `/detokenize`.

    Raises:
        InvalidRequestError: a field is not valid; `param` names it.
    """
    return parse_body(DetokenizeRequest, body, {})
