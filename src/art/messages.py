"""The items of a conversation: plain messages, and the OpenAI `Choice` objects that a model answered with.

A *message* is a dict in OpenAI's format. A *choice* is `completion.choices[0]`; it stays an object, because training
needs its fields (exchange id, log-probs, finish reason). `openai` is imported only to load a choice from a dump.
"""

from __future__ import annotations

import json
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
    advice = next((f"; {text}" for names, text in _ADVICE.items() if all(hasattr(item, name) for name in names)), "")
    raise ValueError(f"expected a message (a dict) or an OpenAI `Choice`, got {type(item).__name__}{advice}")


_ADVICE = {
    ("choices",): "append `completion.choices[0]`, not the whole completion",
    ("delta",): "a streamed chunk is not a whole answer: collect the stream first",
    ("finish_reason", "text"): "the choices of text completions cannot be trained: ask for chat completions",
    ("finish_reason",): "convert it with `art.utils.litellm.convert_litellm_choice_to_openai`",
}
"""What to do with objects that people pass as messages, by the attributes that tell them."""


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


_NOT_SENT_BACK = ("reasoning", "reasoning_content", "refusal", "annotations", "name")
"""Fields that clients leave out of an answer, or add to it, when they send it again."""


def message_key(item: Any) -> str:
    """Return a key that is equal for an answer and for the message that clients make of it.

    Empty fields are left out, and the arguments of calls are compared as objects.
    """
    message = {key: value for key, value in to_message(item).items() if value and key not in _NOT_SENT_BACK}
    calls = []
    for call in message.get("tool_calls", ()):
        try:
            function = call["function"]
            call = {"id": call.get("id"), "name": function.get("name"), "arguments": json.loads(function["arguments"])}
        except (LookupError, ValueError):  # another kind of tool, or arguments that are not JSON: compared as text
            pass
        calls.append(call)
    return json.dumps({**message, "tool_calls": calls}, sort_keys=True, default=str)


# -- streamed answers --


def join_stream(text: str) -> dict[str, Any]:
    """Join the chunks of a streamed chat completion to a whole one.

    Raises:
        ValueError: the stream was closed before its end.
    """
    choices: dict[int, dict[str, Any]] = {}
    completion: dict[str, Any] = {}
    for line in text.splitlines():
        payload = line.removeprefix("data:").strip()
        if not line.startswith("data:") or payload == "[DONE]":
            continue
        chunk = json.loads(payload)
        completion |= {key: value for key, value in chunk.items() if value is not None}
        for part in chunk.get("choices", ()):
            choice = choices.setdefault(part["index"], {"index": part["index"], "message": {"role": "assistant"}})
            _merge(choice["message"], part.get("delta") or {})
            _merge(choice, {key: value for key, value in part.items() if key not in ("delta", "index")})
    unfinished = [index for index, choice in choices.items() if not choice.get("finish_reason")]
    if unfinished or not choices:
        raise ValueError("the stream was closed before its end")
    for choice in choices.values():
        for call in choice["message"].get("tool_calls", ()):
            call.pop("index", None)
    return completion | {"object": "chat.completion", "choices": [choices[index] for index in sorted(choices)]}


_WHOLE = ("role", "type", "id", "finish_reason", "exchange_id")
"""Fields that come whole in each chunk; other texts come in pieces."""


def _merge(whole: dict[str, Any], part: Mapping[str, Any]) -> None:
    """Add a piece: texts and lists are appended; an item with an `index` is merged with the item of that index."""
    for key, value in part.items():
        known = whole.get(key)
        if value is None:
            whole.setdefault(key, None)
        elif isinstance(value, list):
            whole[key] = _merge_items(known or [], value)
        elif isinstance(value, Mapping):
            whole[key] = dict(known or {})
            _merge(whole[key], value)
        elif isinstance(value, str) and isinstance(known, str) and key not in _WHOLE:
            whole[key] = known + value
        elif value != "" or not known:
            whole[key] = value


def _merge_items(known: list[Any], new: list[Any]) -> list[Any]:
    items = list(known)
    for item in new:
        index = item.get("index") if isinstance(item, Mapping) else None
        if index is None:
            items.append(item)
            continue
        same = next((other for other in items if other.get("index") == index), None)
        if same is None:
            items.append(same := {})
        _merge(same, item)
    return items


if not TYPE_CHECKING:
    Message = dict[str, Any]
    MessageOrChoice = Any
    Messages = list[dict[str, Any]]
    MessagesAndChoices = Annotated[
        list[Any], BeforeValidator(parse_items), PlainSerializer(dump_items, return_type=list[Any])
    ]
    Tools = list[dict[str, Any]]
