"""The items of a conversation: plain messages, and the OpenAI `Choice` objects that a model answered with.

A *message* is a dict in OpenAI's format. A *choice* is `completion.choices[0]`; it stays an object, because training
needs its fields (exchange id, log-probs, finish reason). `openai` is imported only to load a choice from a dump.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, cast

from pydantic import BaseModel, BeforeValidator, PlainSerializer, ValidationError

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import Choice
    from openai.types.chat.chat_completion_message_param import ChatCompletionMessageParam
    from openai.types.chat.chat_completion_tool_param import ChatCompletionToolParam
    from typing_extensions import TypeIs

    Message = ChatCompletionMessageParam
    MessageOrChoice = Message | Choice
    Messages = list[Message]
    MessagesAndChoices = list[MessageOrChoice]
    Tools = list[ChatCompletionToolParam]

_CHOICE_MODULE = "openai.types.chat.chat_completion"
_KEPT_OF_AN_ANSWER = ("reasoning_content", "reasoning", "refusal", "function_call", "tool_calls")


def is_choice(item: object) -> TypeIs[Choice]:
    """Whether `item` is an OpenAI `Choice`. Before the class is imported, nothing can be one."""
    module = sys.modules.get(_CHOICE_MODULE)
    return module is not None and isinstance(item, module.Choice)


def load_choice(data: Mapping[str, Any]) -> Choice:
    """Make a `Choice` from the dictionary that its `model_dump` wrote, with extra fields.

    It is as lenient as the OpenAI client: an unknown finish reason or tool call stays as it is.
    """
    from openai.types.chat.chat_completion import Choice

    try:
        return Choice.model_validate(dict(data))
    except ValidationError:
        if not isinstance(data["message"], Mapping) or "role" not in data["message"]:
            raise
        return Choice.construct(**data)


def parse_item(item: Any) -> Any:
    """Return `item` as a message (the same dict) or a `Choice`.

    Raises:
        ValueError: it is neither; the message says what to pass instead.
    """
    if is_choice(item):
        return item
    if isinstance(item, Mapping):
        if "finish_reason" in item and "message" in item:
            return load_choice(item)
        if "role" in item:
            return item if isinstance(item, dict) else dict(item)
        raise ValueError(f"a message needs the key 'role'; got a dict with the keys {sorted(map(str, item))}")
    if isinstance(item, BaseModel) and hasattr(item, "role"):
        return item.model_dump(exclude_none=True, exclude_unset=True, warnings=False)
    raise ValueError(f"expected a message (a dict) or an OpenAI `Choice`, got {type(item).__name__}{_advice(item)}")


def _advice(item: object) -> str:
    if hasattr(item, "choices"):
        return "; append `completion.choices[0]`, not the whole completion"
    if hasattr(item, "delta"):
        return "; a streamed chunk is not a whole answer: collect the stream first"
    if hasattr(item, "finish_reason") and hasattr(item, "text"):
        return (
            "; sample text completions at `model.rollout_base_url(id)`, and read the trajectory with "
            "`model.get_rollout(id)`"
        )
    if hasattr(item, "finish_reason"):
        return "; convert it with `art.utils.litellm.convert_litellm_choice_to_openai`"
    return ""


def parse_items(items: Any) -> list[Any]:
    if isinstance(items, (str, bytes, Mapping)) or not isinstance(items, Iterable):
        raise ValueError(f"expected a list of messages and choices, got {type(items).__name__}")
    return [parse_item(item) for item in items]


def dump_items(items: list[Any]) -> list[Any]:
    """Dump messages and choices. Only fields that were set are written, so that a loaded choice equals the original."""
    parsed = [parse_item(item) for item in items]
    return [item.model_dump(exclude_unset=True, warnings=False) if is_choice(item) else item for item in parsed]


def to_message(item: Any) -> dict[str, Any]:
    """Convert a message or a `Choice` to a message that can be sent to a model.

    A choice gives its assistant message. Its reasoning, refusal and calls are kept, because the model must see its
    earlier turns as they are trained. Missing content becomes "".
    """
    item = parse_item(item)
    if not is_choice(item):
        return {**item, "content": ""} if "content" in item and item["content"] is None else dict(item)
    answer = item.message.model_dump(exclude_unset=True, warnings=False)
    message: dict[str, Any] = {"role": "assistant", "content": answer.get("content") or ""}
    message |= {key: answer[key] for key in _KEPT_OF_AN_ANSWER if answer.get(key)}
    if audio := answer.get("audio"):
        message["audio"] = {"id": audio["id"]}  # requests refer to earlier audio by its id
    return message


def get_messages(messages_and_choices: MessagesAndChoices) -> Messages:
    """Convert a conversation to messages; choices become assistant messages."""
    return cast("Messages", [to_message(item) for item in messages_and_choices])


if not TYPE_CHECKING:
    Message = dict[str, Any]
    MessageOrChoice = Any
    Messages = list[dict[str, Any]]
    MessagesAndChoices = Annotated[
        list[Any], BeforeValidator(parse_items), PlainSerializer(dump_items, return_type=list[Any])
    ]
    Tools = list[dict[str, Any]]
