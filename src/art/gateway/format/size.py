"""Refuse a conversation that cannot fit the model's context before it is rendered and tokenised.

To tokenise a text takes about a microsecond and up to a hundred bytes of memory per character, so a message of some
MiB would cost seconds and gigabytes only to be refused. Three checks, each only where the one before leaves it open:

    1. characters   a token has at most as many characters as the longest one of the vocabulary
    2. messages     every message takes a token or more
    3. tokens       texts are counted piece by piece, up to where they are too long
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import orjson

from art.errors import ContextLengthError
from art.gateway.format.tokenizer import Tokenizer
from art.protocol.chat import Message, Tool

_USUAL = 8
"""A text with fewer characters per token of context is tokenised at once: ordinary text has three to five a token."""
_REASONING = 8
"""Answers may hold reasoning that the template leaves out, up to this many times the context."""
_PIECE = 2**14
"""Characters that are counted at a time."""
_PER_MESSAGE = 16
"""Smallest number of characters that a message counts as, where work is compared with other work."""


COUNTED_CONTEXTS = 8
"""The tokens of a request are counted if they fill the context up to this many times."""


@dataclass(frozen=True, slots=True)
class SizeLimit:
    """What the messages of a request may fill."""

    max_context: int
    tokenizer: Tokenizer
    num_contexts: int = 1
    """How many times the context."""
    context: str = "the model's context"
    """The limit in words, for errors."""


def work_size(messages: list[Message], tools: list[Tool] | None) -> int:
    """Roughly the number of characters to work on. The messages need not be checked yet."""
    size = len(messages) * _PER_MESSAGE + (len(orjson.dumps(tools)) if tools else 0)
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            size += sum(
                len(text) for part in content if isinstance(part, dict) and isinstance(text := part.get("text"), str)
            )
        elif isinstance(content, str):
            size += len(content)
        if message.get("tool_calls"):
            size += sum(map(len, _arguments(message)))
    return size


def check_size(messages: list[Message], tools: list[Tool] | None, limit: SizeLimit) -> None:
    """Check that normalised messages can keep a limit.

    Raises:
        ContextLengthError: they cannot.
    """
    max_tokens, longest = limit.max_context * limit.num_contexts, limit.tokenizer.longest_token
    num_chars = sum(map(len, _texts(messages))) + (len(orjson.dumps(tools)) if tools else 0)
    if num_chars > max_tokens * longest:
        raise ContextLengthError(
            f"the messages and tools have {num_chars} characters; {max_tokens} tokens hold at most "
            f"{max_tokens * longest}, and the limit is {limit.context}; shorten them",
            param="messages",
        )
    if len(messages) > max_tokens:
        raise ContextLengthError(
            f"there are {len(messages)} messages, and the limit is {limit.context}; send fewer",
            param="messages",
        )
    if num_chars > limit.max_context * _USUAL:
        asked = (message for message in messages if message["role"] != "assistant")
        _check_tokens(_texts(asked), max_tokens, limit)
        _check_tokens(_texts(messages), max(max_tokens, limit.max_context * _REASONING), limit)


def _check_tokens(texts: Iterable[str], max_tokens: int, limit: SizeLimit) -> None:
    """Count the tokens of texts in pieces, up to where they are too many. A cut between pieces may add a few tokens."""
    count = num_pieces = 0
    for text in texts:
        for start in range(0, len(text), _PIECE):
            count += len(limit.tokenizer.encode(text[start : start + _PIECE], add_special_tokens=False))
            num_pieces += 1
            if count > max_tokens + num_pieces * limit.tokenizer.longest_token:
                raise ContextLengthError(
                    f"the messages are more than {max_tokens} tokens long, and the limit is {limit.context}; shorten "
                    "them",
                    param="messages",
                )


def _texts(messages: Iterable[Message]) -> Iterator[str]:
    """The texts that a template may print, without reasoning, which most templates leave out."""
    for message in messages:
        yield message["content"]
        if message.get("tool_calls"):
            yield from _arguments(message)


def _arguments(message: Message) -> Iterator[str]:
    calls = message["tool_calls"]
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if isinstance(arguments, str):
            yield arguments
